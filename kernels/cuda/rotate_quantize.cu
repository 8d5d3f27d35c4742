// Activations, rotated and quantized row by row in one pass: one read, one write.
//
//   q, scale = quantize_int8_rowwise(rotate(activation(x).float(), G))
//
// A block takes one row and holds it in registers, 16 values a thread and pass: it needs the largest
// value of the rotated row before it can round any. Compiled with
//   INPUT       Float32, Float16, BFloat16
//   GROUP       0 (not rotated), 16, 64, 256
//   THREADS     threads of a block, a multiple of 32
//   PASSES      16 * THREADS * PASSES >= K
//   ACTIVATION  Identity, Silu, GeluTanh
#include "activation.cuh"
#include "hadamard.cuh"
#include "number.cuh"

constexpr float SCALE_FLOOR = 1e-30f;  // a row of zeros gets codes 0, not 0 / 0
constexpr int WARPS = THREADS / WARP;

__device__ inline float larger(float a, float b) {
    return a > b || a != a ? a : b;  // NaN wins, so that it shows in the row's scale
}

__device__ inline void load_values(float (&value)[THREAD_VALUES], const INPUT::Stored* row,
                                   int column, int k) {
    if (column >= k) {
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; ++i) value[i] = 0.0f;
        return;
    }
    constexpr int PER_CHUNK = sizeof(Chunk) / sizeof(INPUT::Stored);
    const Chunk* source = reinterpret_cast<const Chunk*>(row + column);
#pragma unroll
    for (int chunk = 0; chunk < THREAD_VALUES / PER_CHUNK; ++chunk) {
        union {
            Chunk bytes;
            INPUT::Stored stored[PER_CHUNK];
        } loaded;
        loaded.bytes = source[chunk];
#pragma unroll
        for (int i = 0; i < PER_CHUNK; ++i)
            value[chunk * PER_CHUNK + i] = ACTIVATION::apply(INPUT::load(loaded.stored[i]));
    }
}

// The largest of `mine` over the block, known to every thread.
__device__ inline float block_maximum(float mine, float* of_warp) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) mine = larger(mine, shuffle_xor(mine, step));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = mine;
    synchronize_block();
    float largest = of_warp[0];
    for (int warp = 1; warp < WARPS; ++warp) largest = larger(largest, of_warp[warp]);
    return largest;
}

// x: (M, K), K a multiple of 16 and of GROUP, rows 16-byte aligned. q: (M, K). scale: (M).
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_quantize(const INPUT::Stored* x, int8_t* q, float* scale, int k) {
    __shared__ float of_warp[WARPS];
    const int64_t row = blockIdx.x;
    float value[PASSES][THREAD_VALUES];
    float largest = 0.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int column = (pass * THREADS + threadIdx.x) * THREAD_VALUES;
        load_values(value[pass], x + row * k, column, k);
#if GROUP > 0
        rotate<GROUP>(value[pass]);
#endif
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; ++i) largest = larger(fabsf(value[pass][i]), largest);
    }
    largest = block_maximum(largest, of_warp);
    const float unit = fmaxf(divide(largest, 127.0f), SCALE_FLOOR);
    const bool finite = largest <= 3.4028234664e38f;  // false for NaN, too
    const float row_scale = finite ? unit : largest;
    if (threadIdx.x == 0) scale[row] = row_scale;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int column = (pass * THREADS + threadIdx.x) * THREAD_VALUES;
        if (column >= k) continue;
        Chunk packed;
#pragma unroll
        for (int i = 0; i < THREAD_VALUES; ++i) {
            const int code = finite ? round_to_even(divide(value[pass][i], unit)) : 0;
            const uint32_t byte = static_cast<uint8_t>(max(-128, min(127, code)));
            packed.word[i / 4] = i % 4 ? packed.word[i / 4] | byte << 8 * (i % 4) : byte;
        }
        *reinterpret_cast<Chunk*>(q + row * k + column) = packed;
    }
}
