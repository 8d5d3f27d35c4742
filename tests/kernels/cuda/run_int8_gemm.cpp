#include "int8_gemm.cu"

// Null, or what went wrong. Blocks run one after the other, in a seeded order.
extern "C" const char* run(const uint8_t* q, const uint8_t* weight, const float* row_scale,
                           const float* column_scale, const float* bias, void* out, int m, int n,
                           int k, unsigned seed) {
    int rows = (m + TILE_M - 1) / TILE_M, columns = (n + TILE_N - 1) / TILE_N;
    int blocks = rows * columns;
    fibers::readable.clear();
    fibers::allow(q, static_cast<size_t>(m) * k);
    fibers::allow(weight, static_cast<size_t>(n) * k * WEIGHT_BITS / 8);
    for (int i = 0; i < blocks; ++i) {
        blockIdx.x = (i + seed) % blocks;
        auto kernel = [&] {
            int8_gemm(q, weight, row_scale, column_scale, bias, static_cast<OUTPUT::Stored*>(out), m,
                      n, k);
        };
        if (const char* fault = fibers::run_block(THREADS, seed + i, kernel)) return fault;
    }
    return nullptr;
}
