/* Products by cuBLASLt. What serves a shape best is asked once and kept, since asking takes longer than most
 * products. Where Hopper was seen to do better than cuBLASLt's first choice, another of its choices is taken; never
 * by timing, which would choose differently from run to run.
 *
 * cuBLASLt thinks in columns: a row-major c = a b is its c^T = b^T a^T, so operands trade places. Sums are fp32
 * without TF32, and split sums are added in fp32 in a fixed order (no reduction in place, which is atomic). */
#include "dense/matmul.cuh"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int SLOTS = 1024, PROBES = 8; /* of the table of shapes; the oldest guest of a full neighbourhood goes */

struct product_key {
    struct gemm shape;
    int32_t alignment[4], reads_from; /* of a, b, from, c: powers of two up to 16 bytes */
};

struct product_plan {
    bool taken, plain;
    product_key key;
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t left, right, result;
    cublasLtMatmulAlgo_t algorithm;
};

int32_t alignment_of(const void *p)
{
    const uintptr_t low = (uintptr_t)p & 15;

    return low == 0 ? 16 : (int32_t)(low & (~low + 1));
}

uint64_t hash(const product_key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t h = 0xcbf29ce484222325u;

    for (size_t i = 0; i < sizeof *key; i++) h = (h ^ bytes[i]) * 0x100000001b3u;
    return h ^ h >> 29;
}

cudaDataType_t type_of(glm52_dtype type)
{
    return type == GLM52_DTYPE_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* lines x length in memory, so `length` rows for cuBLASLt. */
void lay_out(cublasLtMatrixLayoutOpaque_t *layout, glm52_dtype type, int64_t length, int64_t lines, int64_t ld,
             int64_t batch, int64_t stride)
{
    const int32_t count = (int32_t)batch;

    cublasLtMatrixLayoutInit(layout, type_of(type), (uint64_t)length, (uint64_t)lines, ld);
    if (batch == 1) return;
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
}

void describe(product_plan *p)
{
    const struct gemm *g = &p->key.shape;
    const cublasOperation_t left = g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t right = g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;

    cublasLtMatmulDescInit(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(&p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &left, sizeof left);
    cublasLtMatmulDescSetAttribute(&p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &right, sizeof right);
    lay_out(&p->left, g->b_type, g->transpose_b ? g->k : g->n, g->transpose_b ? g->n : g->k, g->ldb, g->batch,
            g->stride_b);
    lay_out(&p->right, g->a_type, g->transpose_a ? g->m : g->k, g->transpose_a ? g->k : g->m, g->lda, g->batch,
            g->stride_a);
    lay_out(&p->result, g->c_type, g->n, g->m, g->ldc, g->batch, g->stride_c);
}

struct tile_size {
    cublasLtMatmulTile_t tile;
    int64_t m, n; /* rows and columns of c */
};

/* The tile for a large product of bf16, by what was measured on an H200, alone and among other products, at 8192
 * tokens and the widths of GLM-5.2 (docs/performance.md): small tiles, of which a multiprocessor holds two, write one
 * while they sum another, which pays where the depth is short or c is wide. */
tile_size wanted_tile(const struct gemm *g)
{
    constexpr tile_size none = {CUBLASLT_MATMUL_TILE_UNDEFINED, 1, 1};
    constexpr int64_t LARGE = 1024, WIDE = 6144, SHORT = 2048, SHORT_OF_HEAD = 512;

    if (g->a_type != GLM52_DTYPE_BF16 || g->m < LARGE || (g->transpose_a && g->transpose_b)) return none;
    if (g->batch > 1 && (g->transpose_a || g->k > SHORT_OF_HEAD)) return none;
    if (g->batch > 1) return {CUBLASLT_MATMUL_TILE_128x128, 128, 128};
    if (g->n < LARGE) return none;
    if (g->transpose_a && g->k > SHORT) return {CUBLASLT_MATMUL_TILE_256x128, 128, 256};
    if (g->transpose_a) return {CUBLASLT_MATMUL_TILE_128x160, 160, 128};
    if (g->n < WIDE || g->c_type != GLM52_DTYPE_BF16) return none;
    if (g->transpose_b) return {CUBLASLT_MATMUL_TILE_176x128, 128, 176};
    return {CUBLASLT_MATMUL_TILE_128x160, 160, 128};
}

/* Which of cuBLASLt's choices: the first with the wanted tile, if no multiprocessor is
 * then idle for long, else the first. */
int choose(const cuda_device *d, const struct gemm *g, const cublasLtMatmulHeuristicResult_t *offered, int count)
{
    constexpr int64_t ROUNDS = 12; /* of tiles; the last may be nearly empty */
    const tile_size wanted = wanted_tile(g);

    if (g->batch * divided(g->m, wanted.m) * divided(g->n, wanted.n) < ROUNDS * d->multiprocessors) return 0;
    for (int i = 0; i < count; i++) {
        uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED, splits = 1;
        size_t written;

        cublasLtMatmulAlgoConfigGetAttribute(&offered[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile,
                                             &written);
        cublasLtMatmulAlgoConfigGetAttribute(&offered[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits,
                                             &written);
        if (offered[i].state == CUBLAS_STATUS_SUCCESS && tile == (uint32_t)wanted.tile && splits <= 1) return i;
    }
    return 0;
}

bool choose_algorithm(cuda_device *d, product_plan *p)
{
    constexpr int OFFERS = 12;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t align[4] = {(uint32_t)p->key.alignment[1], (uint32_t)p->key.alignment[0],
                               (uint32_t)p->key.alignment[2], (uint32_t)p->key.alignment[3]};
    const cublasLtMatmulPreferenceAttributes_t which[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t offered[OFFERS];
    int found = 0;

    cublasLtMatmulPreferenceInit(&preference);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &PRODUCT_BYTES,
                                         sizeof PRODUCT_BYTES);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                         sizeof schemes);
    for (int i = 0; i < 4; i++) cublasLtMatmulPreferenceSetAttribute(&preference, which[i], &align[i], sizeof align[i]);
    if (cublasLtMatmulAlgoGetHeuristic(d->blas, &p->operation, &p->left, &p->right, &p->result, &p->result, &preference,
                                       OFFERS, offered, &found) != CUBLAS_STATUS_SUCCESS ||
        found == 0)
        return false;
    p->algorithm = offered[choose(d, &p->key.shape, offered, found)].algo;
    return true;
}

} /* namespace */

struct matmul_cache {
    product_plan slot[SLOTS];
};

namespace {

product_plan *find_plan(cuda_device *d, const product_key *key)
{
    const uint64_t home = hash(key);
    product_plan *p = nullptr;

    for (int i = 0; i < PROBES; i++) {
        p = &d->products->slot[(home + i) % SLOTS];
        if (!p->taken) break;
        if (memcmp(&p->key, key, sizeof *key) == 0) return p;
    }
    if (p->taken) p = &d->products->slot[home % SLOTS];
    p->taken = true;
    p->key = *key;
    p->plain = key->shape.a_type != key->shape.b_type;
    if (p->plain) return p;
    describe(p);
    p->plain = !choose_algorithm(d, p);
    return p;
}

} /* namespace */

glm52_status matmul_open(cuda_device *d)
{
    d->products = (struct matmul_cache *)calloc(1, sizeof *d->products);
    return d->products ? GLM52_OK : fail(GLM52_E_NOMEM, "no memory for the table of matrix products");
}

void matmul_close(cuda_device *d)
{
    free(d->products);
    d->products = nullptr;
}

void matmul(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
            const void *from, void *c)
{
    product_key key;
    product_plan *p;

    if (g->m == 0 || g->n == 0 || g->batch == 0) return;
    if (g->k == 0) {
        matmul_plain(d, g, a, b, alpha, beta, from, c);
        return;
    }
    if (mixed_serves(g)) {
        matmul_mixed(d, g, a, b, alpha, beta, from, c);
        return;
    }
    memset(&key, 0, sizeof key);
    key.shape = *g;
    key.shape.scale = 0;
    key.shape.add = 0;
    key.shape.from = nullptr;
    if (g->batch == 1) key.shape.stride_a = key.shape.stride_b = key.shape.stride_c = 0;
    key.reads_from = beta != 0;
    key.alignment[0] = alignment_of(a);
    key.alignment[1] = alignment_of(b);
    key.alignment[2] = alignment_of(from);
    key.alignment[3] = alignment_of(c);
    p = find_plan(d, &key);
    if (p->plain) {
        matmul_plain(d, g, a, b, alpha, beta, from, c);
        return;
    }
    if (cublasLtMatmul(d->blas, &p->operation, &alpha, b, &p->left, a, &p->right, &beta, from, &p->result, c,
                       &p->result, &p->algorithm, d->scratch, PRODUCT_BYTES, d->stream) != CUBLAS_STATUS_SUCCESS)
        record_error(d, cudaErrorUnknown, "cublasLtMatmul");
    launched(d, "gemm");
}
