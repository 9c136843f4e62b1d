#include "device/tensor_map.cuh"

#include <cuda_runtime.h>

namespace {

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's encoder, found at run time: libcuda is not linked. */
encode_function encoder()
{
    static const encode_function found = [] {
        void *f = nullptr;
        cudaDriverEntryPointQueryResult result;

        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result) !=
                cudaSuccess ||
            result != cudaDriverEntryPointSuccess)
            f = nullptr;
        return (encode_function)f;
    }();

    return found;
}

} /* namespace */

bool map_bf16_rows(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t columns, int box_rows)
{
    const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, pitch = (cuuint64_t)columns * 2;
    const cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, every[2] = {1, 1};

    return encoder() &&
           encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)rows_of, sizes, &pitch, box, every,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool map_array(CUtensorMap *map, bool narrow, const void *at, const int64_t (&size)[4], const int64_t (&pitch)[3],
               const int (&box)[4])
{
    const CUtensorMapSwizzle swizzle =
        box[0] * (narrow ? 2 : 4) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    const cuuint32_t every[4] = {1, 1, 1, 1};
    cuuint64_t sizes[4], pitches[3];
    cuuint32_t boxes[4];

    for (int i = 0; i < 4; i++) {
        sizes[i] = (cuuint64_t)size[i];
        boxes[i] = (cuuint32_t)box[i];
        if (i < 3) pitches[i] = (cuuint64_t)pitch[i] * (narrow ? 2 : 4);
    }
    return encoder() &&
           encoder()(map, narrow ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (void *)at,
                     sizes, pitches, boxes, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
