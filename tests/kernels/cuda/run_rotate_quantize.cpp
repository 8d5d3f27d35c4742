#include "rotate_quantize.cu"

// Null, or what went wrong.
extern "C" const char* run(const void* x, int8_t* q, float* scale, int m, int k, unsigned seed) {
    for (int row = 0; row < m; ++row) {
        blockIdx.x = row;
        auto kernel = [&] {
            rotate_quantize(static_cast<const INPUT::Stored*>(x), q, scale, k);
        };
        if (const char* fault = fibers::run_block(THREADS, seed + row, kernel)) return fault;
    }
    return nullptr;
}
