/* A packed row on the device: what the parts of a pass read of it. */
#ifndef GLM52_MODEL_INPUT_H
#define GLM52_MODEL_INPUT_H

#include "data/pack.h"
#include "model/model.h"
#include "model/plan.h"

enum { MTP_DEPTHS = 16 };

/* Host memory in which rows are put together before they travel. */
struct input_stage {
    struct host *host;
    int64_t rows;
    unsigned char *bytes;
    size_t size;
};

struct input {
    int64_t rows;
    const int32_t *token, *position;  /* [rows]; positions restart in each document */
    const int32_t *start, *end;       /* [rows] visible keys: start .. end - 1 */
    const int32_t *label;             /* [rows], negative for none */
    const float *weight;              /* [rows] share of each row's loss in the step's */
    const float *kl_weight;           /* [rows] share of each row in the indexer loss, coefficient included */
    const float *counted;             /* [rows] 0 for rows that take part in nothing */
    float *rope, *rope_query;         /* [rows,half,2] of keys and indexer, of queries of the main attention */
    const int32_t *sequence;          /* [sequences + 1] rows of the balance loss */
    int32_t sequences;
    double pairs, selected_pairs;     /* visible, and of at most index_topk keys per row */
};

struct input_plan {
    int half, depths;
    struct slot integers;   /* per view: token, position, start, end, label; then the boundaries of sequences */
    struct slot floats;     /* per view: weight, kl_weight, counted */
    struct slot rope, frequency;
};

/* What a pack's rows count for in the step. */
struct input_scale {
    int packs;              /* of the step, this one included */
    double loss;            /* 1 / total loss weight */
    double kl;              /* indexer_loss.coeff / counted rows, or / total loss weight */
    double mtp[MTP_DEPTHS];    /* factor of each depth's rows */
    double mtp_kl[MTP_DEPTHS];
};

/* Rows of a pack that count: for the trunk, and at each MTP depth those with a label there, and with an input token. */
struct input_count {
    double loss, rows, tokens; /* tokens: rows that count, and rows that do not */
    double mtp[MTP_DEPTHS], mtp_rows[MTP_DEPTHS], chain;
};

/* depths: MTP depths beside the trunk. */
glm52_status input_stage_open(struct host *host, int64_t rows, int depths, struct input_stage *stage);
void input_stage_close(struct input_stage *stage);
void input_layout(const struct model_config *c, int depths, struct plan *p, struct input_plan *layout);
void input_count(const struct pack *pack, int depths, struct input_count *sum); /* adds to *sum */
/* What all packs have in common; once the memory is there. */
void input_open(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS]);
/* Sends the pack to the device. Addresses and all else in `out` depend on its rows and the number of its sequences
 * alone, but for the pairs that only a tally reads. out[0] is the trunk's view; out[1 + d] that of MTP depth d: row t
 * reads token t + 1 + d of its document and predicts the one after, rows beyond the document take part in nothing. */
void input_upload(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  struct input_stage *stage, const struct pack *pack, const struct input_scale *scale,
                  struct input *out);
/* Builds the rotary tables of the views, on the device. */
void input_tables(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  const struct input *in);

#endif
