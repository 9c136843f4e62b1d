/* The hardware's conversions against base/narrow.h: every fp32 number to E4M3 and E5M2, every code of both back, by the
 * functions that the kernels use (cuda/quantise/codes.cuh); and base/narrow.h on the device against the same on the
 * host, E2M1 too, for one fp32 number in 61.
 *
 *     nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -Icuda -Ilib -Iinclude -o quantise \
 *         tests/gpu/quantise.cu
 */
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "quantise/codes.cuh"

using namespace quantising;

namespace {

void check(cudaError_t error)
{
    if (error == cudaSuccess) return;
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
}

template <code CODE>
__host__ __device__ uint8_t defined(float x)
{
    return CODE == E2M1 ? f32_to_e2m1(x) : CODE == E5M2 ? f32_to_e5m2(x) : f32_to_e4m3(x);
}

/* Counts the numbers whose codes differ. */
template <code CODE>
__global__ void encode_kernel(unsigned long long *wrong)
{
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * (uint32_t)RUN;
    float x[RUN];

    for (int i = 0; i < RUN; i++) x[i] = narrow_float(first + i);
    const uint2 got = encode_run<CODE>(FP8_BLOCK, x, 1);
    for (int i = 0; i < RUN; i++)
        if (((i < 4 ? got.x : got.y) >> 8 * (i % 4) & 0xff) != defined<CODE>(x[i])) atomicAdd(wrong, 1);
}

template <code CODE>
__global__ void decode_kernel(unsigned long long *wrong)
{
    const uint32_t code = threadIdx.x, other = 255 - code;
    const float2 got = decode_pair<CODE>(other << 8 | code);
    const float low = code_value(FP8_BLOCK, CODE == E5M2, code), high = code_value(FP8_BLOCK, CODE == E5M2, other);

    if (!(got.x == low || (got.x != got.x && low != low)) || !(got.y == high || (got.y != got.y && high != high)))
        atomicAdd(wrong, 1);
}

constexpr uint32_t APART = 61;
constexpr int64_t SAMPLES = ((int64_t)1 << 32) / APART;

template <code CODE>
__global__ void sample_kernel(uint8_t *codes)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;

    if (i < SAMPLES) codes[i] = defined<CODE>(narrow_float((uint32_t)i * APART));
}

int report(const char *what, const char *format, unsigned long long wrong)
{
    std::printf("%-60s %s: %llu differ%s\n", what, format, wrong, wrong ? "  FAILED" : "");
    return wrong != 0;
}

unsigned long long *counter()
{
    unsigned long long *wrong;

    check(cudaMalloc(&wrong, sizeof *wrong));
    check(cudaMemset(wrong, 0, sizeof *wrong));
    return wrong;
}

unsigned long long counted(unsigned long long *wrong)
{
    unsigned long long result;

    check(cudaMemcpy(&result, wrong, sizeof result, cudaMemcpyDeviceToHost));
    check(cudaFree(wrong));
    return result;
}

template <code CODE>
int check_hardware(const char *format)
{
    unsigned long long *encoded = counter(), *decoded = counter();

    encode_kernel<CODE><<<(1u << 29) / 256, 256>>>(encoded); /* 2^32 numbers, RUN = 2^3 a thread */
    decode_kernel<CODE><<<1, 256>>>(decoded);
    return report("every fp32 number, hardware and definition", format, counted(encoded)) +
           report("every code, hardware and definition", format, counted(decoded));
}

template <code CODE>
int check_host(const char *format)
{
    std::vector<uint8_t> host(SAMPLES);
    unsigned long long wrong = 0;
    uint8_t *codes;

    check(cudaMalloc(&codes, SAMPLES));
    sample_kernel<CODE><<<(unsigned)divided(SAMPLES, 256), 256>>>(codes);
    check(cudaMemcpy(host.data(), codes, SAMPLES, cudaMemcpyDeviceToHost));
    check(cudaFree(codes));
    for (int64_t i = 0; i < SAMPLES; i++) wrong += host[i] != defined<CODE>(narrow_float((uint32_t)i * APART));
    return report("one fp32 number in 61, definition on device and host", format, wrong);
}

} /* namespace */

int main()
{
    static_assert(RUN == 8, "the grid counts on it");
    const int failures = check_hardware<E4M3>("E4M3") + check_hardware<E5M2>("E5M2") + check_host<E4M3>("E4M3") +
                         check_host<E5M2>("E5M2") + check_host<E2M1>("E2M1");

    std::printf("%d failures\n", failures);
    return failures != 0;
}
