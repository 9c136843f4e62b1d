/* What the kernels make codes with (cuda/quantise/codes.cuh, fours.cuh) against base/narrow.h: every fp32 number to
 * E4M3, E5M2 and E2M1, every code back, every pair of mantissas that a bf16 quotient has; and base/narrow.h on the
 * device against the same on the host for one fp32 number in 61. */
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "quantise/fours.cuh"

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
    const uint2 got = encode_run<CODE>(x, factor{1});
    for (int i = 0; i < RUN; i++) {
        const uint32_t code = CODE == E2M1 ? got.x >> 4 * i & 15 : (i < 4 ? got.x : got.y) >> 8 * (i % 4) & 0xff;

        if (code != defined<CODE>(x[i])) atomicAdd(wrong, 1);
    }
}

/* Magnitudes of plain blocks, and every bf16 number as what a run of it encodes to by either order. */
__global__ void fours_kernel(unsigned long long *wrong)
{
    const float x = narrow_float(blockIdx.x * blockDim.x + threadIdx.x);

    if (x < 7 && fours_counted(x) - COUNTED != f32_to_e2m1(x)) atomicAdd(wrong, 1);
}

__global__ void fours_run_kernel(unsigned long long *wrong)
{
    const uint32_t place = blockIdx.y, bits = (blockIdx.x * blockDim.x + threadIdx.x) << 16;
    const float x = narrow_float(bits);
    several<bf16, RUN> run = {};

    if (!(fabsf(x) < 6.5f)) return;
    run.at[place] = __float2bfloat16_rn(x);
    if (encode_fours(run, factor{1}) != (uint32_t)code_of(NVFP4, 0, 1, x) << 4 * place) atomicAdd(wrong, 1);
    if (encode_fours(run, known_divisor(1)) != (uint32_t)code_of(NVFP4_MODELOPT, 0, 1, x) << 4 * place)
        atomicAdd(wrong, 1);
}

/* A divisor of each mantissa, by the thread, with dividends of every bf16 mantissa and sign. */
__global__ void quotient_kernel(unsigned long long *wrong)
{
    const float of = narrow_float(0x3f800000u + blockIdx.x * blockDim.x + threadIdx.x);
    const known_divisor by(of);
    int differ = 0;

    for (uint32_t i = 0; i < 256; i++) {
        const float x = narrow_float((i >> 7) << 31 | 0x3f800000u | (i & 127) << 16);

        differ += narrow_bits(by(x)) != narrow_bits(x / of);
    }
    differ += narrow_bits(by(-0.0f)) != 0x80000000u || narrow_bits(by(0)) != 0;
    if (differ) atomicAdd(wrong, differ);
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

int check_fours()
{
    unsigned long long *magnitudes = counter(), *runs = counter(), *quotients = counter();

    encode_kernel<E2M1><<<(1u << 29) / 256, 256>>>(magnitudes);
    fours_kernel<<<(1u << 31) / 256, 256>>>(magnitudes);
    fours_run_kernel<<<dim3((1u << 16) / 256, RUN), 256>>>(runs);
    quotient_kernel<<<(1u << 23) / 256, 256>>>(quotients);
    return report("every fp32 number, two ways and definition", "E2M1", counted(magnitudes)) +
           report("every bf16 number at every place of a run", "E2M1", counted(runs)) +
           report("every quotient of bf16 and fp32 mantissas, and of zeros", "fp32", counted(quotients));
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
    const int failures = check_hardware<E4M3>("E4M3") + check_hardware<E5M2>("E5M2") + check_fours() +
                         check_host<E4M3>("E4M3") + check_host<E5M2>("E5M2") + check_host<E2M1>("E2M1");

    std::printf("%d failures\n", failures);
    return failures != 0;
}
