/* The plan of a call, made on the device from the row counts, and tensor maps made on the host. */
#include "shape.cuh"
#include "tensor.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;

/* One warp: first[g+1] = first[g] + tiles(rows of g). */
template <class F>
__device__ __forceinline__ void number_tiles(struct plan *plan, int groups, const int32_t *offsets,
                                             F &&tiles)
{
    const int lane = threadIdx.x % 32;
    int before = 0;

    if (lane == 0)
        plan->next = plan->first[0] = 0;
    for (int from = 0; from < groups; from += 32) {
        const int g = from + lane;
        int sum = g < groups ? tiles(offsets[g + 1] - offsets[g]) : 0;

#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int left = __shfl_up_sync(~0u, sum, i);

            sum += lane >= i ? left : 0;
        }
        if (g < groups)
            plan->first[g + 1] = before + sum;
        before += __shfl_sync(~0u, sum, 31);
    }
}

__global__ void plan_rows_kernel(struct plan *plan, int groups, int columns, const int32_t *offsets)
{
    number_tiles(plan, groups, offsets,
                 [=](int rows) { return (rows + COMMON - 1) / COMMON * columns; });
}

struct weight_sources {
    const __nv_bfloat16 *dy, *x;
    int64_t n, k;
};

/* a warp a group for the maps; the first warp numbers the tiles as well */
__global__ __launch_bounds__(WARPS * 32) void plan_weight_kernel(
    const __grid_constant__ struct group_maps whole, struct plan *plan, int groups, int columns,
    bool add, const int32_t *offsets, const weight_sources source, struct group_maps *maps)
{
    __shared__ __align__(128) struct group_maps own[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = blockIdx.x * WARPS + warp;

    if (g == 0)
        number_tiles(plan, groups, offsets, [=](int rows) { return rows || !add ? columns : 0; });
    if (g >= groups)
        return;
    const int64_t from = offsets[g];
    const int rows = max(1, offsets[g + 1] - offsets[g]); /* 0 is no length; it is not read then */
    const uint32_t dy = shared_address(&own[warp].dy), x = shared_address(&own[warp].x);

    for (int i = lane; i < (int)sizeof whole / 4; i += 32)
        ((uint32_t *)&own[warp])[i] = ((const uint32_t *)&whole)[i];
    __syncwarp();
    if (lane == 0) {
        map_replace(dy, source.dy + from * source.n, rows);
        map_replace(x, source.x + from * source.k, rows);
    }
    __syncwarp();
    map_publish(&maps[g].dy, dy);
    map_publish(&maps[g].x, x);
}

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's encoder, found at run time: libcuda is not linked. */
encode_function encoder()
{
    static const encode_function found = [] {
        void *f = nullptr;
        cudaDriverEntryPointQueryResult result;

        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                             &result) != cudaSuccess ||
            result != cudaDriverEntryPointSuccess)
            f = nullptr;
        return (encode_function)f;
    }();

    return found;
}

} /* namespace */

struct group_maps *maps_of(const struct grouped_gemm_shape *shape, void *workspace)
{
    const size_t plan = sizeof(struct plan) + ((size_t)shape->groups + 1) * sizeof(int32_t);

    return (struct group_maps *)((char *)workspace + (plan + 127) / 128 * 128);
}

cudaError_t plan_rows(cudaStream_t stream, const struct grouped_gemm_shape *shape, int columns,
                      const int32_t *offsets, struct plan *plan)
{
    plan_rows_kernel<<<1, 32, 0, stream>>>(plan, shape->groups, columns, offsets);
    return cudaGetLastError();
}

cudaError_t plan_weight(cudaStream_t stream, const struct grouped_gemm_shape *shape, int columns,
                        const int32_t *offsets, const struct group_maps *whole, const void *dy,
                        const void *x, struct plan *plan, struct group_maps *maps)
{
    const weight_sources source = {(const __nv_bfloat16 *)dy, (const __nv_bfloat16 *)x, shape->n,
                                   shape->k};

    plan_weight_kernel<<<(shape->groups + WARPS - 1) / WARPS, WARPS * 32, 0, stream>>>(
        *whole, plan, shape->groups, columns, shape->add != 0, offsets, source, maps);
    return cudaGetLastError();
}

bool encode_map(CUtensorMap *map, int type, const void *data, int dimensions, const int64_t *size,
                int64_t pitch, int64_t stride, int box_columns, int box_rows)
{
    const bool narrow = type == GROUPED_GEMM_BF16;
    const uint64_t bytes = narrow ? 2 : 4;
    const cuuint64_t sizes[3] = {(cuuint64_t)size[0], (cuuint64_t)size[1],
                                 dimensions > 2 ? (cuuint64_t)size[2] : 1};
    const cuuint64_t pitches[2] = {pitch * bytes, stride * bytes};
    const cuuint32_t box[3] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1};
    const cuuint32_t every[3] = {1, 1, 1};

    return encoder() &&
           encoder()(
               map, narrow ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
               dimensions, (void *)data, sizes, pitches, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
