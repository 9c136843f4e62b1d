/* A tile of a matrix product by one block of 256 threads: BM x BN sums, spread over the threads' registers, of operands
 * that pass through shared memory. bf16 on tensor cores (mma.sync m16n8k16), fp32 in plain multiply-adds; the order
 * of a sum depends on its depth alone. The building block of every product that cuBLASLt has no form for.
 *
 * The left operand is [BM, depth], the right one [depth, BN]. Each lies in memory along the depth (element (i, k) at
 * i * ld + k), or across it (at k * ld + i); staged tiles keep that order. */
#pragma once

#include "device/element.cuh"

constexpr int TILE_THREADS = 256;

enum order { ALONG, ACROSS };

template <class T> struct tile_shape;
template <> struct tile_shape<float> {
    static constexpr int DEPTH = 16, PAD = 4; /* of a stage; elements that shift a line's banks */
};
template <> struct tile_shape<bf16> {
    static constexpr int DEPTH = 32, PAD = 8;
};

/* LINES x LENGTH elements of `from` into shared memory, converted to T, 0 beyond the first `lines` and `length`.
 * wide: lines and their lengths are multiples of 16 bytes. */
template <class T, int LINES, int LENGTH, int STRIDE, class S>
__device__ __forceinline__ void stage(T *tile, const S *from, int64_t ld, int lines, int length, bool wide)
{
    constexpr int STEP = 16 / sizeof(T);

    if (sizeof(S) == sizeof(T) && wide) {
#pragma unroll
        for (int i = threadIdx.x; i < LINES * LENGTH / STEP; i += TILE_THREADS) {
            const int line = i / (LENGTH / STEP), at = i % (LENGTH / STEP) * STEP;
            uint4 x = {};

            if (line < lines && at < length) x = *(const uint4 *)(from + line * ld + at);
            *(uint4 *)(tile + line * STRIDE + at) = x;
        }
    } else {
        for (int i = threadIdx.x; i < LINES * LENGTH; i += TILE_THREADS) {
            const int line = i / LENGTH, at = i % LENGTH;

            tile[line * STRIDE + at] = to<T>(line < lines && at < length ? get(from[line * ld + at]) : 0.0f);
        }
    }
}

/* Where a thread's sums stand, and one step of the sums. */
template <class T, int BM, int BN> struct fragment;

/* Threads in a square of 16 x 16, each with every 16th row and column. */
template <int BM, int BN>
struct fragment<float, BM, BN> {
    static constexpr int M = BM / 16, N = BN / 16, COUNT = M * N;
    float sum[COUNT];

    __device__ __forceinline__ static int row(int e) { return threadIdx.x / 16 + 16 * (e / N); }
    __device__ __forceinline__ static int column(int e) { return threadIdx.x % 16 + 16 * (e % N); }

    template <order A, order B>
    __device__ __forceinline__ void step(const float *a, int a_stride, const float *b, int b_stride)
    {
        const int r = threadIdx.x / 16, c = threadIdx.x % 16;

#pragma unroll
        for (int k = 0; k < tile_shape<float>::DEPTH; k++) {
            float x[M], y[N];

#pragma unroll
            for (int i = 0; i < M; i++)
                x[i] = A == ALONG ? a[(r + 16 * i) * a_stride + k] : a[k * a_stride + r + 16 * i];
#pragma unroll
            for (int j = 0; j < N; j++)
                y[j] = B == ALONG ? b[(c + 16 * j) * b_stride + k] : b[k * b_stride + c + 16 * j];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < N; j++) sum[i * N + j] += x[i] * y[j];
        }
    }
};

__device__ __forceinline__ void read_matrices(uint32_t (&x)[4], const bf16 *at, bool transposed)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(at);

    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address));
}

__device__ __forceinline__ void multiply_add(float *sum, const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Warps 4 down and 2 across, each with M x N instructions of 16 x 8 sums. */
template <int BM, int BN>
struct fragment<bf16, BM, BN> {
    static constexpr int M = BM / 64, N = BN / 16, COUNT = M * N * 4;
    float sum[COUNT];

    __device__ __forceinline__ static int row(int e)
    {
        return threadIdx.x / 64 * (BM / 4) + e / 4 / N * 16 + threadIdx.x % 32 / 4 + (e % 4 / 2) * 8;
    }
    __device__ __forceinline__ static int column(int e)
    {
        return threadIdx.x / 32 % 2 * (BN / 2) + e / 4 % N * 8 + threadIdx.x % 4 * 2 + e % 2;
    }

    template <order A, order B>
    __device__ __forceinline__ void step(const bf16 *a, int a_stride, const bf16 *b, int b_stride)
    {
        const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
        const int r = threadIdx.x / 64 * (BM / 4), c = threadIdx.x / 32 % 2 * (BN / 2);

#pragma unroll
        for (int k = 0; k < tile_shape<bf16>::DEPTH; k += 16) {
            uint32_t x[M][4], y[4];

#pragma unroll
            for (int i = 0; i < M; i++)
                if (A == ALONG)
                    read_matrices(x[i], a + (r + 16 * i + low + second * 8) * a_stride + k + third * 8, false);
                else
                    read_matrices(x[i], a + (k + low + third * 8) * a_stride + r + 16 * i + second * 8, true);
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                if (B == ALONG)
                    read_matrices(y, b + (c + 8 * j + low + third * 8) * b_stride + k + second * 8, false);
                else
                    read_matrices(y, b + (k + low + second * 8) * b_stride + c + 8 * j + third * 8, true);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    multiply_add(sum + (i * N + j) * 4, x[i], y[0], y[1]);
                    multiply_add(sum + (i * N + j + 1) * 4, x[i], y[2], y[3]);
                }
            }
        }
    }
};

/* An operand in global memory from the tile's first element on; S may be another type than the product's. */
template <class S>
struct operand {
    const S *at;
    int64_t ld;
    int size;  /* rows or columns of the tile that exist */
    bool wide; /* see stage() */
};

/* The tile and its stages. A and B: how the operands lie. */
template <class T, int BM, int BN, order A, order B>
struct tile : fragment<T, BM, BN> {
    using base = fragment<T, BM, BN>;
    static constexpr int DEPTH = tile_shape<T>::DEPTH, PAD = tile_shape<T>::PAD;
    static constexpr int A_STRIDE = (A == ALONG ? DEPTH : BM) + PAD, A_LINES = A == ALONG ? BM : DEPTH;
    static constexpr int B_STRIDE = (B == ALONG ? DEPTH : BN) + PAD, B_LINES = B == ALONG ? BN : DEPTH;

    struct shared {
        alignas(16) T a[A_LINES * A_STRIDE];
        alignas(16) T b[B_LINES * B_STRIDE];
    };

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int e = 0; e < base::COUNT; e++) this->sum[e] = 0;
    }

    template <class S>
    __device__ __forceinline__ static void stage_b(T *to, const operand<S> &b, int64_t k, int64_t depth)
    {
        const int left = (int)min((int64_t)DEPTH, depth - k);

        if (B == ALONG)
            stage<T, BN, DEPTH, B_STRIDE>(to, b.at + k, b.ld, b.size, left, b.wide);
        else
            stage<T, DEPTH, BN, B_STRIDE>(to, b.at + k * b.ld, b.ld, left, b.size, b.wide);
    }

    template <class S>
    __device__ __forceinline__ static void stage_a(T *to, const operand<S> &a, int64_t k, int64_t depth)
    {
        const int left = (int)min((int64_t)DEPTH, depth - k);

        if (A == ALONG)
            stage<T, BM, DEPTH, A_STRIDE>(to, a.at + k, a.ld, a.size, left, a.wide);
        else
            stage<T, DEPTH, BM, A_STRIDE>(to, a.at + k * a.ld, a.ld, left, a.size, a.wide);
    }

    /* Adds the product over the whole depth. Begins with a barrier. */
    template <class S, class R>
    __device__ __forceinline__ void multiply(shared &s, const operand<S> &a, const operand<R> &b, int64_t depth)
    {
        for (int64_t k = 0; k < depth; k += DEPTH) {
            __syncthreads();
            stage_a(s.a, a, k, depth);
            stage_b(s.b, b, k, depth);
            __syncthreads();
            base::template step<A, B>(s.a, A_STRIDE, s.b, B_STRIDE);
        }
    }

    /* The same with a left operand that is in shared memory already, DEPTH or a multiple of it deep, 0 where it
     * ends. */
    template <class R>
    __device__ __forceinline__ void multiply_shared(shared &s, const T *a, int a_stride, const operand<R> &b,
                                                    int64_t depth)
    {
        for (int64_t k = 0; k < depth; k += DEPTH) {
            __syncthreads();
            stage_b(s.b, b, k, depth);
            __syncthreads();
            base::template step<A, B>(a + (A == ALONG ? k : k * a_stride), a_stride, s.b, B_STRIDE);
        }
    }

    /* f(row, column, sum) for each of the thread's sums. */
    template <class F>
    __device__ __forceinline__ void each(F f)
    {
#pragma unroll
        for (int e = 0; e < base::COUNT; e++) f(base::row(e), base::column(e), this->sum[e]);
    }
};
