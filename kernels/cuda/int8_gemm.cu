// The INT8 linear after quantization, for any M and N and K a multiple of 16 (32 with int4 weights):
//
//   out = ((q.int() @ weight.int().T).float() * row_scale * column_scale.T + bias).to(OUTPUT)
//
// A block computes TILE_M x TILE_N of the result in steps of DEPTH bytes of K, with STAGES tiles of
// both operands on their way in shared memory. Compiled with
//   OUTPUT                  Float32, Float16, BFloat16
//   WEIGHT_BITS             8 or 4
//   TILE_M, TILE_N, DEPTH   sides of the tile; DEPTH 64
//   WARPS_M, WARPS_N        warps along each side; each computes an equal part
//   STAGES                  tiles in flight, at least 2
//   PANELS                  see tile_order.cuh
#include "number.cuh"
#include "shared_tile.cuh"
#include "tile_order.cuh"
#include "weight_fragment.cuh"

constexpr int THREADS = WARPS_M * WARPS_N * WARP;
constexpr int WARP_M = TILE_M / WARPS_M;
constexpr int WARP_N = TILE_N / WARPS_N;
constexpr int FRAGMENTS_M = WARP_M / 16;
constexpr int FRAGMENTS_N = WARP_N / 8;
constexpr int INPUT_CHUNKS = DEPTH / static_cast<int>(sizeof(Chunk));
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && DEPTH == 64, "tiles do not fit fragments");

struct Sums {
    int32_t of[FRAGMENTS_M][FRAGMENTS_N][4];
};

// Adds the product of one tile of each operand.
__device__ inline void multiply_tiles(Sums& sums, const uint8_t* input, const uint8_t* weight,
                                      int warp_row, int warp_column) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth += 32) {
        uint32_t a[FRAGMENTS_M][4];
#pragma unroll
        for (int i = 0; i < FRAGMENTS_M; ++i) {
            const int row = warp_row + i * 16 + lane % 16;
            const int chunk = depth / 16 + lane / 16;
            load_matrices(a[i], input + chunk_offset<INPUT_CHUNKS>(row, chunk));
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; j += 2) {
            uint32_t b[2][2];
            load_weights(b, weight, warp_column + j * 8, depth);
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                multiply_accumulate(sums.of[i][j], a[i], b[0]);
                multiply_accumulate(sums.of[i][j + 1], a[i], b[1]);
            }
        }
    }
}

// One row's part of a fragment: two neighboring columns.
__device__ inline void store_pair(OUTPUT::Stored* out, const int32_t* sum, float row_scale,
                                  const float* column_scale, const float* bias, int column,
                                  int columns) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (column + i >= columns) return;
        const float product = static_cast<float>(sum[i] / CODE_SCALE);
        float value = multiply(multiply(product, row_scale), column_scale[column + i]);
        if (bias != nullptr) value = add(value, bias[column + i]);
        out[column + i] = OUTPUT::store(value);
    }
}

__device__ inline void store_tile(const Sums& sums, OUTPUT::Stored* out, const float* row_scale,
                                  const float* column_scale, const float* bias, int row,
                                  int column, int m, int n) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + i * 16 + half * 8 + lane / 4;
            if (at >= m) continue;
            OUTPUT::Stored* line = out + static_cast<int64_t>(at) * n;
            const float scale = row_scale[at];
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                const int first = column + j * 8 + lane % 4 * 2;
                store_pair(line, sums.of[i][j] + 2 * half, scale, column_scale, bias, first, n);
            }
        }
    }
}

// q: (m, k) int8. weight: (n, k) int8 or (n, k / 2). row_scale: (m). column_scale: (n). bias: (n) or
// null. out: (m, n). Rows of q and weight are 16-byte aligned.
extern "C" __global__ void __launch_bounds__(THREADS)
    int8_gemm(const uint8_t* q, const uint8_t* weight, const float* row_scale,
              const float* column_scale, const float* bias, OUTPUT::Stored* out, int m, int n,
              int k) {
    __shared__ Chunk input_tiles[STAGES][TILE_M * INPUT_CHUNKS];
    __shared__ Chunk weight_tiles[STAGES][TILE_N * WEIGHT_CHUNKS];
    const Tile tile = tile_of_block(blockIdx.x, (m + TILE_M - 1) / TILE_M, (n + TILE_N - 1) / TILE_N);
    const int first_row = tile.row * TILE_M;
    const int first_column = tile.column * TILE_N;
    const int64_t weight_row = static_cast<int64_t>(k) * WEIGHT_BITS / 8;
    const int steps = (k + DEPTH - 1) / DEPTH;

    auto fetch = [&](int step) {
        if (step < steps) {
            const int stage = step % STAGES;
            copy_tile<TILE_M, INPUT_CHUNKS, THREADS>(
                reinterpret_cast<uint8_t*>(input_tiles[stage]), q, first_row, m, k,
                static_cast<int64_t>(step) * DEPTH);
            copy_tile<TILE_N, WEIGHT_CHUNKS, THREADS>(
                reinterpret_cast<uint8_t*>(weight_tiles[stage]), weight, first_column, n, weight_row,
                static_cast<int64_t>(step) * DEPTH * WEIGHT_BITS / 8);
        }
        copies_commit();  // an empty group keeps the count of groups in step
    };

    const int warp = threadIdx.x / WARP;
    const int warp_row = warp / WARPS_N * WARP_M;
    const int warp_column = warp % WARPS_N * WARP_N;
    Sums sums = {};
    for (int step = 0; step < STAGES - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        copies_wait<STAGES - 2>();
        synchronize_block();  // everybody's copies are in, and everybody is done with the oldest tile
        fetch(step + STAGES - 1);
        const int stage = step % STAGES;
        multiply_tiles(sums, reinterpret_cast<const uint8_t*>(input_tiles[stage]),
                       reinterpret_cast<const uint8_t*>(weight_tiles[stage]), warp_row, warp_column);
    }
    store_tile(sums, out, row_scale, column_scale, bias, first_row + warp_row,
               first_column + warp_column, m, n);
}
