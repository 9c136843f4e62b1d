/* The --bench half of sparse_mla.cu: random data, every row with 2048 random distinct keys of the
 * whole set in ascending order. */

__global__ static void fill_random(bf16 *p, size_t n, uint32_t salt, float by)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + salt;
        float sum = 0;

        for (int j = 0; j < 4; j++) { /* four uniforms: close to normal */
            x ^= x >> 16;
            x *= 0x7feb352du;
            x ^= x >> 15;
            x *= 0x846ca68bu;
            x ^= x >> 16;
            sum += (float)x * (1 / 4294967296.0f) - 0.5f;
        }
        p[i] = __float2bfloat16(by * sum * 1.7320508f);
    }
}

/* selection sampling: each row k of n keys, ascending, every subset equally likely */
__global__ static void fill_selected(int32_t *selected, int64_t rows, int n, int k)
{
    const int64_t row = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    uint64_t x = (uint64_t)(row + 1) * 0x9e3779b97f4a7c15ull;
    int need = k;

    if (row >= rows)
        return;
    for (int key = 0; key < n && need; key++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        if ((uint32_t)(x >> 33) % (uint32_t)(n - key) < (uint32_t)need)
            selected[row * k + k - need--] = key;
    }
}

struct times {
    double spaced, sustained; /* ms */
};

static double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

static times time_both(const std::function<void()> &launch, void *flush)
{
    cudaEvent_t a, b;
    std::vector<float> each;
    times t;
    float ms;

    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    CHECK(cudaDeviceSynchronize());
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    for (int i = 0; i < 8; i++) {
        CHECK(cudaMemsetAsync(flush, i, 512 << 20));
        CHECK(cudaEventRecord(a));
        launch();
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i > 1)
            each.push_back(ms);
    }
    CHECK(cudaGetLastError());
    std::sort(each.begin(), each.end());
    t.spaced = each[each.size() / 2];
    const int half = std::max(2, (int)(400 / t.spaced));
    for (int part = 0; part < 2; part++) {
        if (part)
            CHECK(cudaEventRecord(a));
        for (int i = 0; i < half; i++)
            launch();
    }
    CHECK(cudaEventRecord(b));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, a, b));
    t.sustained = ms / half;
    CHECK(cudaEventDestroy(a));
    CHECK(cudaEventDestroy(b));
    return t;
}

static times gemm_rate(void *flush) /* TFLOP/s in the two modes */
{
    static bf16 *x = nullptr, *y, *z;
    static cublasHandle_t handle;
    const int n = 8192;
    const float one = 1, zero = 0;

    if (!x) {
        CHECK(cudaMalloc(&x, (size_t)n * n * 2));
        CHECK(cudaMalloc(&y, (size_t)n * n * 2));
        CHECK(cudaMalloc(&z, (size_t)n * n * 2));
        fill_random<<<1056, 256>>>(x, (size_t)n * n, 1, 1);
        fill_random<<<1056, 256>>>(y, (size_t)n * n, 2, 1);
        cublasCreate(&handle);
    }
    times t = time_both(
        [&] {
            cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, x, CUDA_R_16BF, n, y,
                         CUDA_R_16BF, n, &zero, z, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT);
        },
        flush);
    const double flop = 2.0 * n * n * n;
    return {flop / t.spaced / 1e9, flop / t.sustained / 1e9};
}

static void report(const char *name, int n, const times &t, double flop, const times &gemm)
{
    const double a = flop / t.spaced / 1e9, c = flop / t.sustained / 1e9;

    std::printf("%-24s %6d | A %8.3f ms %6.1f TF %.3f | C %8.3f ms %6.1f TF %.3f\n", name, n,
                t.spaced, a, a / gemm.spaced, t.sustained, c, c / gemm.sustained);
}

/* dq and dkv of the two modes agree, the deterministic one with itself bit by bit */
static void compare_modes(const std::function<void(int)> &backward, void *dq, size_t dq_bytes,
                          float *dkv, size_t number)
{
    std::vector<float> fast(number), first(number), second(number);
    std::vector<uint8_t> dq1(dq_bytes), dq2(dq_bytes);
    double d = 0, s = 0;

    backward(0);
    CHECK(cudaMemcpy(fast.data(), dkv, number * 4, cudaMemcpyDeviceToHost));
    backward(1);
    CHECK(cudaMemcpy(first.data(), dkv, number * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(dq1.data(), dq, dq_bytes, cudaMemcpyDeviceToHost));
    backward(1);
    CHECK(cudaMemcpy(second.data(), dkv, number * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(dq2.data(), dq, dq_bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < number; i++) {
        d += ((double)fast[i] - first[i]) * ((double)fast[i] - first[i]);
        s += (double)fast[i] * fast[i];
    }
    std::printf("deterministic: dkv %s, dq %s; distance to the fast mode %.2e\n",
                memcmp(first.data(), second.data(), number * 4) ? "DIFFERS" : "repeats",
                dq1 != dq2 ? "DIFFERS" : "repeats", std::sqrt(d / s));
}

static void bench_size(int n, const char *what, void *flush, const times &gemm)
{
    sparse_mla s = {n, n, 64, 512, 64, 2048, 1 / 24.0f, 0, SPARSE_MLA_BF16};
    const size_t nq = (size_t)n * 64 * 576, no = (size_t)n * 64 * 512;
    const double pairs = (double)n * 64 * 2048;
    bf16 *q, *kv, *out, *dout, *dq;
    float *lse, *dkv, *target;
    int32_t *selected;
    void *workspace;
    const bool fwd = strchr(what, 'f'), bwd = strchr(what, 'b'), det = strchr(what, 'd');

    s.deterministic = 1;
    CHECK(cudaMalloc(&workspace, std::max(sparse_mla_cuda_forward_bytes(&s),
                                          sparse_mla_cuda_backward_bytes(&s))));
    CHECK(cudaMalloc(&q, nq * 2));
    CHECK(cudaMalloc(&dq, nq * 2));
    CHECK(cudaMalloc(&out, no * 2));
    CHECK(cudaMalloc(&dout, no * 2));
    CHECK(cudaMalloc(&kv, (size_t)n * 576 * 2));
    CHECK(cudaMalloc(&dkv, (size_t)n * 576 * 4));
    CHECK(cudaMalloc(&lse, (size_t)n * 64 * 4));
    CHECK(cudaMalloc(&selected, (size_t)n * 2048 * 4));
    CHECK(cudaMalloc(&target, (size_t)n * 2048 * 4));
    fill_random<<<1056, 256>>>(q, nq, 11, 1);
    fill_random<<<1056, 256>>>(kv, (size_t)n * 576, 12, 1);
    fill_random<<<1056, 256>>>(dout, no, 13, 1);
    fill_selected<<<(n + 63) / 64, 64>>>(selected, n, n, 2048);
    auto forward = [&] {
        CHECK(sparse_mla_cuda_forward(0, &s, q, kv, selected, out, lse, workspace));
    };
    auto backward = [&](float *with_target) {
        CHECK(sparse_mla_cuda_backward(0, &s, q, kv, selected, out, lse, dout, dq, dkv, with_target,
                                       workspace));
    };
    s.deterministic = 0;
    forward();
    if (fwd)
        report("forward", n, time_both(forward, flush), 2 * pairs * (576 + 512), gemm);
    const double flop = 2 * pairs * (3 * 576 + 2 * 512);
    if (bwd) {
        report("backward", n, time_both([&] { backward(nullptr); }, flush), flop, gemm);
    }
    if (det) {
        report("backward, KL target", n, time_both([&] { backward(target); }, flush), flop, gemm);
        s.deterministic = 1;
        report("backward, deterministic", n, time_both([&] { backward(nullptr); }, flush), flop,
               gemm);
        if (n <= 8192)
            compare_modes(
                [&](int d) {
                    s.deterministic = d;
                    backward(target);
                },
                dq, nq * 2, dkv, (size_t)n * 576);
    }
    for (void *p : {(void *)q, (void *)dq, (void *)out, (void *)dout, (void *)kv, (void *)dkv,
                    (void *)lse, (void *)selected, (void *)target, workspace})
        CHECK(cudaFree(p));
}

/* what: of f(orward), b(ackward), d(eterministic and KL); size 0: all three */
static int bench(const char *what, int size)
{
    void *flush;

    CHECK(cudaMalloc(&flush, 512 << 20));
    times first = gemm_rate(flush);
    std::printf("GEMM 8192^3: A %.1f TF, C %.1f TF\n", first.spaced, first.sustained);
    for (int n : {4096, 8192, 32768})
        if (!size || n == size)
            bench_size(n, what, flush, first);
    times last = gemm_rate(flush);
    std::printf("GEMM 8192^3: A %.1f TF, C %.1f TF\n", last.spaced, last.sustained);
    return 0;
}
