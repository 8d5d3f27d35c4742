// A tile of int8 rows in shared memory, laid out so that eight rows read at once meet no bank twice.
//
// A row is CHUNKS chunks of 16 bytes. Chunk c of row r lies at c ^ swizzle(r) of that row: lines of
// 128 bytes hold 8 / CHUNKS rows, and rows that many apart get their chunks permuted differently.
#pragma once
#include "instructions.cuh"

template <int CHUNKS>
__device__ inline int chunk_offset(int row, int chunk) {
    constexpr int ROWS_PER_LINE = 8 / CHUNKS;
    return (row * CHUNKS + (chunk ^ (row / ROWS_PER_LINE % CHUNKS))) * static_cast<int>(sizeof(Chunk));
}

// Rows first ... first + ROWS - 1 of a matrix (rows, bytes_per_row), bytes from `byte` on; what lies
// outside of the matrix becomes zeros. bytes_per_row is a multiple of 16.
template <int ROWS, int CHUNKS, int BLOCK_THREADS>
__device__ inline void copy_tile(uint8_t* tile, const uint8_t* matrix, int first, int rows,
                                 int64_t bytes_per_row, int64_t byte) {
#pragma unroll
    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += BLOCK_THREADS) {
        const int row = index / CHUNKS;
        const int chunk = index % CHUNKS;
        const int64_t start = byte + chunk * static_cast<int>(sizeof(Chunk));
        const bool valid = first + row < rows && start < bytes_per_row;
        const uint8_t* source = valid ? matrix + (first + row) * bytes_per_row + start : matrix;
        copy_16_bytes(tile + chunk_offset<CHUNKS>(row, chunk), source, valid);
    }
}
