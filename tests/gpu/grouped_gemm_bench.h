/* The --bench half of grouped_gemm.cu: ragged counts, random data, sampled elements checked against
 * double sums on the device. Mode B: each call after 25 ms of rest and an overwrite of L2, median;
 * mode C: back to back for 0.6 s, second half. */

__global__ static void fill_random(__nv_bfloat16 *p, size_t n, uint32_t salt)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + (uint32_t)(i >> 32) * 97u + salt;
        float sum = 0;

        for (int j = 0; j < 4; j++) { /* four uniforms: close to normal */
            x ^= x >> 16;
            x *= 0x7feb352du;
            x ^= x >> 15;
            x *= 0x846ca68bu;
            x ^= x >> 16;
            sum += (float)x * (1 / 4294967296.0f) - 0.5f;
        }
        p[i] = __float2bfloat16(sum * 1.7320508f);
    }
}

/* Sample s: one element of the output, one block; *worst: the largest error against the size of the
 * terms and the rounding of the output, as in one_case::compare. */
__global__ static void sample(grouped_gemm_shape g, int op, const int32_t *offsets,
                              const __nv_bfloat16 *a, const __nv_bfloat16 *b, const void *c,
                              unsigned *worst)
{
    __shared__ double value[128], size[128];
    const uint64_t bits = (blockIdx.x + 1) * 0x9e3779b97f4a7c15ull;
    const int64_t width = op == FORWARD ? g.n : g.k, depth = op == FORWARD ? g.k : g.n;
    int64_t at, from = 0, to = depth, a0, a1, b0, b1;
    int e = 0;

    if (op == BACKWARD_WEIGHT) {
        e = (int)(bits >> 33) % g.groups;
        const int64_t i = (bits >> 20) % (uint64_t)(g.n * g.k);
        at = e * g.stride + i;
        from = offsets[e], to = offsets[e + 1];
        a0 = i / g.k, a1 = g.n, b0 = i % g.k, b1 = g.k;
    } else {
        const int64_t row = (bits >> 33) % offsets[g.groups], j = (bits >> 13) % width;
        while (offsets[e + 1] <= row)
            e++;
        at = row * width + j;
        a0 = row * depth, a1 = 1;
        b0 = e * g.stride + (op == FORWARD ? j * g.k : j), b1 = op == FORWARD ? 1 : g.k;
    }
    double v = 0, s = 0;
    for (int64_t i = from + threadIdx.x; i < to; i += 128) {
        const double p =
            (double)__bfloat162float(a[a0 + i * a1]) * __bfloat162float(b[b0 + i * b1]);
        v += p, s += fabs(p);
    }
    value[threadIdx.x] = v, size[threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.x)
        return;
    for (int i = 1; i < 128; i++)
        v += value[i], s += size[i];
    const bool narrow = op != BACKWARD_WEIGHT || g.weight_type == GROUPED_GEMM_BF16;
    const double is = narrow ? (double)__bfloat162float(((const __nv_bfloat16 *)c)[at])
                             : (double)((const float *)c)[at];
    const double limit = fabs(v) * (narrow ? 0.51 / 128 : 1e-7) + s * 1e-6 + 1e-30;
    const double error = fabs(is - v) / limit;
    atomicMax(worst, error <= 1e6 ? (unsigned)(error * 1000) : 1000000000u);
}

struct times {
    double rested, sustained; /* ms */
};

static times time_both(const std::function<void()> &launch, void *flush)
{
    cudaEvent_t a, b;
    std::vector<float> each;
    times t;
    float ms;

    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 9; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(25));
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
    t.rested = each[each.size() / 2];
    const int half = std::max(2, (int)(300 / t.rested));
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
    const int n = 8192;
    const float one = 1, zero = 0;
    __nv_bfloat16 *m[3];
    cublasHandle_t handle;

    for (auto &p : m) {
        CHECK(cudaMalloc(&p, (size_t)n * n * 2));
        fill_random<<<1056, 256>>>(p, (size_t)n * n, (uint32_t)(uintptr_t)p);
    }
    cublasCreate(&handle);
    const times t = time_both(
        [&] {
            cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, m[0], CUDA_R_16BF, n,
                         m[1], CUDA_R_16BF, n, &zero, m[2], CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT);
        },
        flush);
    cublasDestroy(handle);
    for (auto &p : m)
        CHECK(cudaFree(p));
    const double flop = 2.0 * n * n * n;
    std::printf("cuBLAS 8192^3: B %.1f TF, C %.1f TF\n", flop / t.rested / 1e9,
                flop / t.sustained / 1e9);
    return {flop / t.rested / 1e9, flop / t.sustained / 1e9};
}

/* rows dealt to the experts by chance, with weights exp(0.3 N(0,1)) */
static std::vector<int32_t> ragged_offsets(int experts, int rows)
{
    std::vector<double> edge(experts);
    std::vector<int32_t> offsets(experts + 1, 0);
    double total = 0;

    for (double &e : edge)
        e = total += std::exp(0.3 * normal());
    for (int i = 0; i < rows; i++) {
        const double u = uniform() * total;
        offsets[1 + std::min<size_t>(experts - 1, std::upper_bound(edge.begin(), edge.end(), u) -
                                                      edge.begin())]++;
    }
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    return offsets;
}

struct bench_case {
    int experts, average, k, n;
};

static void bench_shape(const bench_case &s, const char *what, const times &gemm, void *flush)
{
    const int64_t rows = (int64_t)s.experts * s.average;
    grouped_gemm_shape g = {rows, s.n, s.k, (int64_t)s.n * s.k, s.experts, 0, 0, 0};
    const size_t nx = rows * s.k, ny = rows * s.n, nw = (size_t)s.experts * s.n * s.k;
    const std::vector<int32_t> host = ragged_offsets(s.experts, (int)rows);
    __nv_bfloat16 *x, *y, *w;
    float *dw;
    int32_t *offsets;
    unsigned *worst;
    void *workspace;

    CHECK(cudaMalloc(&x, nx * 2));
    CHECK(cudaMalloc(&y, ny * 2));
    CHECK(cudaMalloc(&w, nw * 2));
    CHECK(cudaMalloc(&dw, nw * 4)); /* also any other output */
    CHECK(cudaMalloc(&offsets, host.size() * 4));
    CHECK(cudaMalloc(&worst, 4));
    CHECK(cudaMalloc(&workspace, grouped_gemm_cuda_bytes(&g)));
    CHECK(cudaMemcpy(offsets, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    fill_random<<<1056, 256>>>(x, nx, 1);
    fill_random<<<1056, 256>>>(y, ny, 2);
    fill_random<<<1056, 256>>>(w, nw, 3);

    auto one = [&](const char *name, operation op, int add, int weight_type) {
        const void *a = op == FORWARD ? x : y, *b = op == BACKWARD_WEIGHT ? x : w;
        const double flop = 2.0 * rows * s.n * s.k;
        unsigned error = 0;

        g.add = add, g.weight_type = weight_type;
        CHECK(cudaMemset(dw, add ? 0 : 0xff, nw * 4));
        CHECK(cudaMemset(worst, 0, 4));
        CHECK(call(op, g, offsets, a, b, dw, workspace));
        sample<<<4096, 128>>>(g, op, offsets, (const __nv_bfloat16 *)a, (const __nv_bfloat16 *)b,
                              dw, worst);
        CHECK(cudaMemcpy(&error, worst, 4, cudaMemcpyDeviceToHost));
        const times t = time_both([&] { CHECK(call(op, g, offsets, a, b, dw, workspace)); }, flush);
        const double r = flop / t.rested / 1e9, c = flop / t.sustained / 1e9;
        std::printf(
            "%4d x %4d K %4d N %4d %-18s B %7.3f ms %6.1f TF %.3f | C %7.3f ms %6.1f TF %.3f"
            " | %s %.2f\n",
            s.experts, s.average, s.k, s.n, name, t.rested, r, r / gemm.rested, t.sustained, c,
            c / gemm.sustained, error <= 1000 ? "right" : "WRONG", error / 1000.0);
        std::fflush(stdout);
    };
    if (strchr(what, 'f'))
        one("forward", FORWARD, 0, 0);
    if (strchr(what, 'b'))
        one("backward_rows", BACKWARD_ROWS, 0, 0);
    if (strchr(what, 'w')) {
        one("weight fp32 +=", BACKWARD_WEIGHT, 1, GROUPED_GEMM_F32);
        one("weight fp32 =", BACKWARD_WEIGHT, 0, GROUPED_GEMM_F32);
        one("weight bf16 +=", BACKWARD_WEIGHT, 1, GROUPED_GEMM_BF16);
        one("weight bf16 =", BACKWARD_WEIGHT, 0, GROUPED_GEMM_BF16);
    }
    for (void *p :
         {(void *)x, (void *)y, (void *)w, (void *)dw, (void *)offsets, (void *)worst, workspace})
        CHECK(cudaFree(p));
}

/* what a call costs the host: small problem, no wait */
static void host_time()
{
    const grouped_gemm_shape g = {64, 64, 64, 4096, 4, 0, 0, 0};
    const int32_t offsets[5] = {0, 16, 32, 48, 64};
    uint8_t *all;
    const int calls = 300;

    CHECK(cudaMalloc(&all, 1 << 20));
    CHECK(cudaMemset(all, 0, 1 << 20));
    CHECK(cudaMemcpy(all, offsets, sizeof offsets, cudaMemcpyHostToDevice));
    for (int op = FORWARD; op <= BACKWARD_WEIGHT; op++) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; i++)
            CHECK(call((operation)op, g, (int32_t *)all, all + (128 << 10), all + (256 << 10),
                       all + (512 << 10), all + 1024));
        const std::chrono::duration<double> d = std::chrono::steady_clock::now() - start;
        CHECK(cudaDeviceSynchronize());
        std::printf("host: %.1f us a call of %s\n", d.count() / calls * 1e6, NAMES[op]);
    }
    CHECK(cudaFree(all));
}

/* what: of f(orward), b(ackward_rows), w(eight); with q(uick): the first two shapes */
static int bench(const char *what)
{
    void *flush;
    int left = strchr(what, 'q') ? 2 : 6;

    CHECK(cudaMalloc(&flush, 512 << 20));
    host_time();
    const times gemm = gemm_rate(flush);
    for (const bench_case &s : {bench_case{256, 256, 6144, 4096}, bench_case{256, 512, 2048, 6144},
                                bench_case{256, 512, 6144, 4096}, bench_case{256, 256, 2048, 6144},
                                bench_case{32, 2048, 6144, 4096}, bench_case{32, 2048, 2048, 6144}})
        if (left-- > 0)
            bench_shape(s, what, gemm, flush);
    gemm_rate(flush);
    CHECK(cudaFree(flush));
    return 0;
}
