/* The table of operations, and the one symbol that the library looks for. */
#include "device/entry.cuh"

const struct ops *whole_table(void)
{
    static const struct ops *table = [] {
        static struct ops t;

        t.name = "cuda";
        fill_device(&t);
        fill_graph(&t);
        fill_timing(&t);
        fill_dense(&t);
        fill_norm(&t);
        fill_latent(&t);
        fill_rope(&t);
        fill_embed(&t);
        fill_indexer(&t);
        fill_index_kl_selected(&t);
        fill_index_kl_dense(&t);
        fill_sparse_mla(&t);
        fill_dense_attention(&t);
        fill_route(&t);
        fill_dispatch(&t);
        fill_swiglu(&t);
        fill_grouped(&t);
        fill_head(&t);
        fill_head_tv(&t);
        fill_arithmetic(&t);
        fill_quantise(&t);
        fill_adamw(&t);
        fill_guard(&t);
        fill_muon(&t);
        return &t;
    }();

    return table;
}

extern "C" __attribute__((visibility("default"))) const struct cuda_backend *glm52_cuda_backend(
    const struct cuda_services *services)
{
    static const struct cuda_backend backend = {GLM52_VERSION, sizeof(struct ops), count_devices, describe_device,
                                                  open_device, plan_device};

    use_services(services);
    return &backend;
}
