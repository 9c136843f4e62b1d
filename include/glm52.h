/* glm52: trains GLM-5.2 (MLA attention, DeepSeek Sparse Attention with IndexShare, mixture of experts) from C.
 *
 * This is the only public header. It needs nothing but <stddef.h> and <stdint.h>, and compiles alone as
 * C99, C11 and C++11.
 *
 * Conventions
 *   Handles   Opaque and reference-counted. glm52_x_create() hands one reference to the caller;
 *             glm52_x_ref() adds one; glm52_x_unref(&x) drops one and nulls the pointer. A child keeps its
 *             parents alive, so handles may be dropped in any order. NULL and a handle of another class
 *             are refused with GLM52_E_HANDLE.
 *   Status    Every function that can fail returns glm52_status: GLM52_OK or a negative number, GLM52_E_... A
 *             failing call leaves its outputs untouched and fills the calling thread's last error. Every one
 *             may return HANDLE (for a wrong handle), INVALID (for NULL, unless the contract gives it a
 *             meaning, and for a wrong value) and NOMEM; "Errors:" at the end of a contract lists the others.
 *   Strings   UTF-8, NUL-terminated. A `const char *` that comes out is borrowed from the handle until the
 *             next call that changes it, or until the handle dies.
 *   Structs   Start with struct_size, which the caller sets to sizeof; see "Structs" below.
 *   Threads   A context and all that was made from it serve one thread at a time. The ref and unref functions,
 *             glm52_context_cancel(), glm52_context_withdraw_cancel(), glm52_context_memory() and the functions
 *             without a handle may be called from any thread, also while another one works.
 *   Since     0.1, where a contract names no release.
 *   Nothing in the library exits, aborts, prints or installs a signal handler.
 *
 * The rules of binary compatibility, and how to add to this file, are in docs/abi.md.
 */
#ifndef GLM52_H
#define GLM52_H

#include <stddef.h>
#include <stdint.h>

#if defined(SWIG)
#define GLM52_API
#elif defined(__GNUC__)
#define GLM52_API __attribute__((visibility("default")))
#else
#define GLM52_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------ */

typedef int32_t glm52_status;
enum {
    GLM52_OK = 0,
    GLM52_E_NOMEM = -1,        /* memory is exhausted, or a hook refused to give it */
    GLM52_E_INVALID = -2,      /* an argument, option or shape is wrong */
    GLM52_E_STATE = -3,        /* the call is not allowed now */
    GLM52_E_HANDLE = -4,       /* NULL, a handle of another class, or a released one */
    GLM52_E_IO = -5,           /* reading or writing failed */
    GLM52_E_CORRUPT = -6,      /* a file is damaged or malformed */
    GLM52_E_VERSION = -7,      /* made by or for a newer version */
    GLM52_E_UNSUPPORTED = -8,  /* valid, but this build or device cannot do it */
    GLM52_E_DEVICE = -9,       /* the device or its driver failed */
    GLM52_E_COMM = -10,        /* communication between ranks failed */
    GLM52_E_CANCELLED = -11,   /* glm52_context_cancel() was called */
    GLM52_E_TIMEOUT = -12,
    GLM52_E_NUMERIC = -13,     /* a loss or gradient is not finite */
    GLM52_E_CALLBACK = -14,    /* a callback of the host failed */
    GLM52_E_AGAIN = -15,
    GLM52_E_INTERNAL = -16     /* a defect of the library */
};

typedef int32_t glm52_dtype;
enum {
    GLM52_DTYPE_F32 = 1,
    GLM52_DTYPE_BF16 = 2,
    GLM52_DTYPE_F64 = 3,
    GLM52_DTYPE_I32 = 4,
    GLM52_DTYPE_I64 = 5,
    GLM52_DTYPE_U8 = 6,
    GLM52_DTYPE_F8_E4M3 = 7,
    GLM52_DTYPE_F16 = 8
};

typedef int32_t glm52_log_level;
enum { GLM52_LOG_ERROR = 1, GLM52_LOG_WARNING = 2, GLM52_LOG_NOTICE = 3, GLM52_LOG_DEBUG = 4 };

typedef struct glm52_context glm52_context;
typedef struct glm52_config glm52_config;
typedef struct glm52_model glm52_model;
typedef struct glm52_batch glm52_batch;
typedef struct glm52_dataset glm52_dataset;
typedef struct glm52_optimizer glm52_optimizer;
typedef struct glm52_step glm52_step;
typedef struct glm52_error glm52_error;

/* ---- structs ----------------------------------------------------------------------------------------- *
 * The caller sets struct_size = sizeof the struct (and zeroes the rest of an input). Members are only ever
 * appended. A larger input struct than the library knows is accepted if the unknown bytes are zero. Of an
 * output struct the library writes at most struct_size bytes, and sets struct_size to what it wrote. `flags`
 * and `reserved*` must be zero. VERSION: a struct_size below that of the first release, or unknown bytes. */

/* Memory of the host. `bytes` at release equals `bytes` at allocation. Alignment is 64 bytes at least.
 * May be called from any thread the library computes on. */
typedef struct glm52_allocator {
    uint32_t struct_size;
    uint32_t flags;
    void *user;
    void *(*allocate)(void *user, size_t bytes, size_t alignment); /* NULL when there is none */
    void (*release)(void *user, void *memory, size_t bytes);
} glm52_allocator;

/* File operations. Every function returns 0 or a count on success, and a negative errno otherwise.
 * `file` is whatever open() stored. Paths are UTF-8. */
typedef struct glm52_files {
    uint32_t struct_size;
    uint32_t flags;
    void *user;
    int64_t (*open)(void *user, const char *path, int32_t for_writing, void **file); /* creates or truncates */
    int64_t (*size)(void *user, void *file);                                         /* bytes */
    int64_t (*read)(void *user, void *file, void *buffer, size_t bytes, uint64_t offset); /* short only at the end */
    int64_t (*write)(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset);
    int64_t (*sync)(void *user, void *file);
    int64_t (*close)(void *user, void *file);
    int64_t (*rename)(void *user, const char *from, const char *to);
    int64_t (*remove)(void *user, const char *path);
    int64_t (*make_directory)(void *user, const char *path); /* succeeds if it exists */
    int64_t (*sync_directory)(void *user, const char *path);
} glm52_files;

/* Receives messages; may be called from any thread the library computes on; must not call the library. */
typedef void (*glm52_log_function)(void *user, glm52_log_level level, const char *message);

/* What a context needs before anything else. Everything about model, data and training is a glm52_config. */
typedef struct glm52_context_options {
    uint32_t struct_size;
    uint32_t flags;
    const char *device;      /* "cpu" (NULL means cpu), "meta" (counts, computes nothing), "cuda", "cuda:1", "auto" */
    int32_t threads;         /* of the cpu device; 0: as many as OpenMP offers */
    uint32_t reserved0;
    const glm52_allocator *allocator; /* NULL: the C library; copied */
    const glm52_files *files;         /* NULL: the operating system; copied */
    glm52_log_function log;           /* NULL: silence */
    void *log_user;
} glm52_context_options;

/* One option of the schema. */
typedef struct glm52_option_info {
    uint32_t struct_size;
    uint32_t flags;
    const char *key;         /* "optim.lr" */
    const char *type;        /* "integer", "number", "boolean", "string", "choice", "list" */
    const char *range;       /* "1 .. 1048576", "adamw|muon", "" */
    const char *default_value;
    const char *summary;     /* one line */
} glm52_option_info;

/* A view of a tensor, row-major and contiguous. */
typedef struct glm52_view {
    uint32_t struct_size;
    uint32_t flags;
    void *data;              /* on the host, or on the context's device if on_device is 1 */
    glm52_dtype dtype;
    int32_t on_device;
    int32_t dimensions;      /* 0 .. 4 */
    uint32_t reserved0;
    int64_t shape[4];
    uint64_t bytes;
} glm52_view;

/* A parameter of a model, with views of its value and gradient. */
typedef struct glm52_parameter_info {
    uint32_t struct_size;
    uint32_t flags;
    const char *name;        /* hub name; borrowed from the model */
    const char *policy;      /* optimizer policy: "adamw", "muon", "none" */
    glm52_view value;
    glm52_view gradient;     /* data is NULL before a step exists; see precision.gradients for its dtype */
} glm52_parameter_info;

/* One row of a plan. section "memory": amount is bytes of the class `name`; "flops": amount is executed
 * FLOPs of the operation `name` in one step, `calls` how often it ran, `bytes` what it read and wrote. */
typedef struct glm52_plan_row {
    uint32_t struct_size;
    uint32_t flags;
    const char *section;
    const char *name;
    double amount;
    double bytes;
    uint64_t calls;
} glm52_plan_row;

/* ---- the library ------------------------------------------------------------------------------------- */

/* Version of the project, "0.1.0". Never NULL. */
GLM52_API const char *glm52_version(void);
/* Version of the ABI; equals the number in the soname. */
GLM52_API int32_t glm52_abi_version(void);
/* One line: compiler, devices and libraries this build knows. */
GLM52_API const char *glm52_build_info(void);
/* 1 if this build has the feature ("cuda", "nccl", "mpi", "failpoints", "checked"), else 0; unknown names give 0. */
GLM52_API int32_t glm52_feature(const char *name);
/* "GLM52_E_INVALID"; "unknown" for a number that is no status. */
GLM52_API const char *glm52_status_name(glm52_status status);
/* Address of the public function of that name, or NULL. For hosts that open the library at run time. */
GLM52_API void *glm52_get_proc(const char *name);

/* ---- errors ------------------------------------------------------------------------------------------ */

/* This thread's last failure, or NULL. Borrowed: valid until the thread's next failing call. A success does
 * not clear it. */
GLM52_API const glm52_error *glm52_error_last(void);
/* Takes the last failure over: the caller owns it and the thread's last error becomes NULL. NULL if there is
 * none or memory is exhausted. Release with glm52_error_unref(). */
GLM52_API glm52_error *glm52_error_take(void);
/* An error has one owner; its memory is the C library's, for it may outlive every context. */
GLM52_API void glm52_error_unref(glm52_error **self);
/* GLM52_OK for NULL. */
GLM52_API glm52_status glm52_error_status(const glm52_error *self);
/* What happened, with which values. Never NULL. Borrowed from the error. */
GLM52_API const char *glm52_error_message(const glm52_error *self);
/* What to do; "" if the message says it all. Never NULL. Borrowed from the error. */
GLM52_API const char *glm52_error_hint(const glm52_error *self);
/* Value of a detail such as "tensor", "byte", "key", "path", "errno"; NULL if there is none. Borrowed from the
 * error. */
GLM52_API const char *glm52_error_detail(const glm52_error *self, const char *key);

/* ---- context ----------------------------------------------------------------------------------------- */

/* options may be NULL: cpu, all threads, C library memory, operating system files, no log.
 * Errors: UNSUPPORTED (a device this build lacks), DEVICE (none there). */
GLM52_API glm52_status glm52_context_create(const glm52_context_options *options, glm52_context **out);
GLM52_API glm52_context *glm52_context_ref(glm52_context *self);
GLM52_API void glm52_context_unref(glm52_context **self);
/* Asks the running call on this context, or the next one, to return GLM52_E_CANCELLED: one atomic store, safe in
 * signal handlers and from any thread. The call that notices clears the request. It returns after at most the
 * microbatch (of a step), tensor (of creating, loading, saving, resuming) or token (of generating) that was being
 * worked on; the other functions, and the update after the last microbatch, run to their end. */
GLM52_API void glm52_context_cancel(glm52_context *self);
/* Takes back a request that no call has noticed yet, so that it does not meet the next one: 1 if there
 * was one, else 0. For what follows the call that the request was meant for, such as saving after Ctrl-C.
 * From any thread, and in signal handlers. */
GLM52_API int32_t glm52_context_withdraw_cancel(glm52_context *self);
/* One line about the device ("cpu, 2 threads, ..."). Borrowed from the context. */
GLM52_API glm52_status glm52_context_describe_device(glm52_context *self, const char **out);
/* Bytes the library holds through the context's allocator now, and at most so far. Either may be NULL. May be
 * called from any thread. */
GLM52_API glm52_status glm52_context_memory(glm52_context *self, uint64_t *now, uint64_t *peak);
/* Number of devices of a kind: "cpu" gives 1, "cuda" the GPUs the driver shows. 0 for unknown kinds, and
 * where a driver or the back end is missing. */
GLM52_API int32_t glm52_context_device_count(const char *kind);

/* ---- config ------------------------------------------------------------------------------------------ */

/* All options at their defaults. */
GLM52_API glm52_status glm52_config_create(glm52_context *context, glm52_config **out);
GLM52_API glm52_config *glm52_config_ref(glm52_config *self);
GLM52_API void glm52_config_unref(glm52_config **self);
/* Reads the model section from a hub config.json (model_type glm_moe_dsa), in place of a preset or an earlier
 * file; options that were set one by one win over it, whichever came first. Keys outside the schema are kept
 * for the dump. On failure the config is unchanged. Errors: IO, CORRUPT, UNSUPPORTED. */
GLM52_API glm52_status glm52_config_load_hub(glm52_config *self, const char *path);
/* Applies a JSON object {"model": {...}, "optim": {...}}, or with dotted keys; strict. On failure the config is
 * unchanged. Errors: CORRUPT (line and column), INVALID (the detail "key" names the option). */
GLM52_API glm52_status glm52_config_load_json(glm52_config *self, const char *json);
/* Sets one option: ("optim.lr", "2e-4"). Errors: INVALID with the nearest key or the valid range. */
GLM52_API glm52_status glm52_config_set(glm52_config *self, const char *key, const char *value);
/* Value of an option as text. Borrowed until the next call on this config. */
GLM52_API glm52_status glm52_config_get(glm52_config *self, const char *key, const char **out);
/* Option number `index` of the schema, 0 ..; INVALID past the end. Strings live as long as the library. */
GLM52_API glm52_status glm52_config_describe(uint32_t index, glm52_option_info *out);
/* Checks everything that can be decided without allocating: ranges, shapes, combinations. */
GLM52_API glm52_status glm52_config_validate(glm52_config *self);
/* All options as a JSON object that glm52_config_load_json() takes; with hub = 1 the model section as a hub
 * config.json. Borrowed until the next call on this config. */
GLM52_API glm52_status glm52_config_dump(glm52_config *self, int32_t hub, const char **out);

/* ---- model ------------------------------------------------------------------------------------------- */

/* Validates the config (copied) and makes a randomly initialised model: each value is a pure function of
 * train.seed, parameter name and element index. If model.hub is set, loads that directory instead.
 * Errors: CANCELLED, DEVICE, and those of loading: IO, CORRUPT, UNSUPPORTED. */
GLM52_API glm52_status glm52_model_create(glm52_context *context, glm52_config *config, glm52_model **out);
/* Loads a hub directory (config.json, safetensors). Options of `config` outside the model section are kept
 * for the model's config; NULL means defaults.
 * Errors: IO, CORRUPT (names tensor and byte), UNSUPPORTED, CANCELLED, DEVICE. */
GLM52_API glm52_status glm52_model_load(glm52_context *context, glm52_config *config, const char *directory,
                                        glm52_model **out);
GLM52_API glm52_model *glm52_model_ref(glm52_model *self);
GLM52_API void glm52_model_unref(glm52_model **self);
/* Writes config.json and safetensors (one file up to shard_bytes, then shards with an index) in dtype
 * F32 or BF16 (0: as held). Files are written beside their final names, then renamed.
 * Errors: IO, UNSUPPORTED (another dtype), CANCELLED, DEVICE. */
GLM52_API glm52_status glm52_model_save(glm52_model *self, const char *directory, glm52_dtype dtype);
/* One line: "6 layers (1 dense + 5 MoE), 2.2M parameters, stage sparse". Borrowed from the model. */
GLM52_API glm52_status glm52_model_describe(glm52_model *self, const char **out);
/* How many parameters the table has, and elements in all of them. Either may be NULL. */
GLM52_API glm52_status glm52_model_parameter_count(glm52_model *self, uint32_t *tensors, uint64_t *elements);
/* Parameter number `index` in table order. Views stay valid while the model lives. */
GLM52_API glm52_status glm52_model_parameter(glm52_model *self, uint32_t index, glm52_parameter_info *out);
/* Number of the parameter with this hub name; INVALID if there is none. */
GLM52_API glm52_status glm52_model_parameter_find(glm52_model *self, const char *name, uint32_t *index);
/* Runs the model on a batch without gradients and keeps what `outputs` names (separated by spaces; a
 * trailing * matches any ending): logits, ce_rows, loss, final_hidden, hidden.L (residual stream after layer
 * L), topk.L, index_scores.L, router_logits.L, router_idx.L, router_w.L. index_scores and logits take
 * rows x keys or rows x vocabulary of memory: ask for them on short batches. Errors: DEVICE. */
GLM52_API glm52_status glm52_model_forward(glm52_model *self, glm52_batch *batch, const char *outputs);
/* Continues `prompt` (count token ids) by up to `limit` tokens into `tokens`; *produced says how many.
 * temperature 0 picks the most likely token; otherwise samples, a pure function of seed and position.
 * Errors: NUMERIC (a logit is not finite), CANCELLED, DEVICE. */
GLM52_API glm52_status glm52_model_generate(glm52_model *self, const int32_t *prompt, uint64_t count,
                                            uint64_t limit, double temperature, uint64_t seed, int32_t *tokens,
                                            uint64_t *produced);

/* ---- batch: one packed row of documents -------------------------------------------------------------- */

/* A batch without tokens. */
GLM52_API glm52_status glm52_batch_create(glm52_context *context, glm52_batch **out);
GLM52_API glm52_batch *glm52_batch_ref(glm52_batch *self);
GLM52_API void glm52_batch_unref(glm52_batch **self);
/* Copies a field from caller memory:
 *   "tokens"      I32 or I64 [T], 0 <= id < vocabulary. Setting it clears all other fields.
 *   "cu_seqlens"  I32 or I64 [documents + 1], 0 first, strictly rising, T last. Default {0, T}.
 *   "labels"      I32 or I64 [T], -100 for none. Default: the next token inside the document.
 *   "loss_mask"   F32 or U8 [T], weight of each row's loss. Default 1.
 *   "row_mask"    F32 or U8 [T], 0 for rows that count nowhere else either: indexer loss, expert counts. Default 1.
 * Ids are checked against the model by the call that uses the batch. Errors: STATE (no tokens yet). */
GLM52_API glm52_status glm52_batch_set(glm52_batch *self, const char *field, glm52_dtype dtype,
                                       const void *values, uint64_t count);
/* How many tokens and documents it holds; 0 of both before tokens are set. Either may be NULL. */
GLM52_API glm52_status glm52_batch_tokens(glm52_batch *self, uint64_t *tokens, uint64_t *documents);
/* A field as set or derived, or an output of the last glm52_model_forward(). Host memory, borrowed until the
 * batch changes or is run again. */
GLM52_API glm52_status glm52_batch_get(glm52_batch *self, const char *name, glm52_view *out);

/* ---- dataset ----------------------------------------------------------------------------------------- */

/* Opens what the data section of the config names. Errors: IO, UNSUPPORTED. */
GLM52_API glm52_status glm52_dataset_open(glm52_context *context, glm52_config *config, glm52_dataset **out);
GLM52_API glm52_dataset *glm52_dataset_ref(glm52_dataset *self);
GLM52_API void glm52_dataset_unref(glm52_dataset **self);
/* Fills the batch with the next training pack and moves on. Pack number n is a pure function of (seed, n). */
GLM52_API glm52_status glm52_dataset_next(glm52_dataset *self, glm52_batch *batch);
/* Sets the number of the next training pack; constant time. */
GLM52_API glm52_status glm52_dataset_seek(glm52_dataset *self, uint64_t pack);
/* Fills the batch with held-out pack `index`; INVALID past glm52_dataset_held_out_packs(). */
GLM52_API glm52_status glm52_dataset_held_out(glm52_dataset *self, uint64_t index, glm52_batch *batch);
/* Number of held-out packs; the same for the life of the dataset. */
GLM52_API glm52_status glm52_dataset_held_out_packs(glm52_dataset *self, uint64_t *packs);
/* One line: documents, tokens, packs. Borrowed from the dataset. */
GLM52_API glm52_status glm52_dataset_describe(glm52_dataset *self, const char **out);

/* ---- optimizer --------------------------------------------------------------------------------------- */

/* State (moments, masters) for every parameter whose policy asks for it. Config: optim section of the model's
 * config, or of `config` if not NULL. Errors: DEVICE. */
GLM52_API glm52_status glm52_optimizer_create(glm52_model *model, glm52_config *config, glm52_optimizer **out);
GLM52_API glm52_optimizer *glm52_optimizer_ref(glm52_optimizer *self);
GLM52_API void glm52_optimizer_unref(glm52_optimizer **self);
/* Overrides the schedule from the next step on; a negative value returns to it. */
GLM52_API glm52_status glm52_optimizer_set_lr(glm52_optimizer *self, double lr);
/* Takes the masters anew from the parameters; call after writing parameters through a view. Errors: DEVICE. */
GLM52_API glm52_status glm52_optimizer_resync(glm52_optimizer *self);

/* ---- step -------------------------------------------------------------------------------------------- */

/* Plans and takes all memory a training step will ever need. optimizer may be NULL for evaluation only.
 * config: train section; NULL means the model's.
 * Errors: STATE (config describes another stage, or the optimizer is of an earlier one), NOMEM (the hint says what
 * would fit), UNSUPPORTED (train.cuda_graph = on without CUDA), DEVICE. */
GLM52_API glm52_status glm52_step_create(glm52_model *model, glm52_optimizer *optimizer, glm52_config *config,
                                         glm52_step **out);
GLM52_API glm52_step *glm52_step_ref(glm52_step *self);
GLM52_API void glm52_step_unref(glm52_step **self);
/* One optimizer update over `count` packed microbatches (1 .. train.microbatches): forward and backward of
 * each, the loss being the mean over all labelled tokens of all of them, clipping, update. On failure
 * parameters and optimizer state are as before the call, unless glm52_error_detail(e, "state") is "lost", or
 * "updated": then all is done but the line in the metrics file of config `out`.
 * Errors: STATE (no optimizer), CANCELLED, NUMERIC, IO (of the metrics file), DEVICE, COMM. */
GLM52_API glm52_status glm52_step_run(glm52_step *self, glm52_batch *const *batches, uint32_t count);
/* Forward and backward without the update: gradients stay in the parameters' gradient views.
 * Errors: STATE (no optimizer), CANCELLED, DEVICE, COMM. */
GLM52_API glm52_status glm52_step_gradients(glm52_step *self, glm52_batch *const *batches, uint32_t count);
/* Mean loss over all labelled tokens; no gradients. The metric "held_out_loss" too; loss may be NULL.
 * Errors: CANCELLED, IO (of the metrics file), DEVICE, COMM. */
GLM52_API glm52_status glm52_step_evaluate(glm52_step *self, glm52_batch *const *batches, uint32_t count,
                                           double *loss);
/* A number of the last run: step, loss (everything that was minimised), ce, indexer_loss, mtp_loss, auxiliary_loss,
 * grad_norm, lr, tokens, tokens_per_second, seconds, held_out_loss, peak_memory, skipped; per MTP depth D mtp.D.loss,
 * mtp.D.acceptance, mtp.D.cumulative_acceptance; indexer_loss.L and router_load.L per layer; grad_norm.GROUP; on CUDA
 * graph_captures and graph_replays. */
GLM52_API glm52_status glm52_step_metric(glm52_step *self, const char *name, double *out);
/* Name of metric `index`, 0 ..; NULL past the end. Borrowed until the next call on this step. */
GLM52_API const char *glm52_step_metric_name(glm52_step *self, uint32_t index);
/* Goes on with the stage that `config` describes (train, indexer_loss, mtp, moe and optim sections; the model's
 * shape stays): which parameters are trained, which losses, which attention. Model, counters, data position and
 * the optimizer state of parameters that are trained before and after are kept; other state begins at zero. A
 * new train.stage begins a new schedule. The same as saving, leaving and resuming under the new options, bit for
 * bit. An optimizer made earlier serves no new step of the model. On failure the old stage goes on, unless the
 * detail "state" is "lost": then model and optimizer are in the new stage, and the step has no memory and wants
 * another call before it does anything else.
 * Errors: STATE (no optimizer, or another step of the model is open), DEVICE. */
GLM52_API glm52_status glm52_step_set_stage(glm52_step *self, glm52_config *config);
/* Row `index` of the plan: memory per class and FLOPs per operation of one step with full microbatches.
 * INVALID past the end. The dry run happens at the first call. Workspaces are those of the context's device; on device
 * meta, of the one that the config names, where that is a GPU and the CUDA back end is installed, else of the cpu. */
GLM52_API glm52_status glm52_step_plan(glm52_step *self, uint32_t index, glm52_plan_row *out);
/* Writes model, optimizer state and counters to a directory; the previous state there survives a failure.
 * Errors: STATE (no optimizer), IO, CANCELLED, DEVICE. */
GLM52_API glm52_status glm52_step_save(glm52_step *self, const char *directory);
/* Takes model, optimizer state and counters from a directory that glm52_step_save() wrote; *packs is where
 * to seek the dataset, or NULL. A failure changes nothing, unless the detail "state" is "lost": then reading had begun,
 * and the step wants another resume before it runs.
 * Errors: STATE (no optimizer), IO, CORRUPT, VERSION, CANCELLED, DEVICE. */
GLM52_API glm52_status glm52_step_resume(glm52_step *self, const char *directory, uint64_t *packs);

#ifdef __cplusplus
}
#endif

#endif
