// Weights on their way from shared memory to the tensor core: int8 as they are, int4 unpacked.
//
// WEIGHT_BITS 8: rows of int8. WEIGHT_BITS 4: two signed 4-bit codes a byte, the even column in the
// low half (ComfyUI's convrot_w4a4). A code unpacks to 16 times its value, which fits int8 exactly;
// the sums are divided by 16 at the end.
#pragma once
#include "shared_tile.cuh"

constexpr int CODE_SCALE = WEIGHT_BITS == 4 ? 16 : 1;
constexpr int WEIGHT_CHUNKS = DEPTH * WEIGHT_BITS / 8 / static_cast<int>(sizeof(Chunk));

// Four codes from two bytes, each in the high half of a byte.
__device__ inline uint32_t unpack_codes(uint32_t two_bytes) {
    const uint32_t low = two_bytes & 0xffu;
    const uint32_t high = two_bytes >> 8 & 0xffu;
    const uint32_t spread = low | low << 8 | high << 16 | high << 24;
    return (spread << 4 & 0x00f000f0u) | (spread & 0xf000f000u);
}

// Two fragments of `multiply_accumulate`: columns first ... first + 15 of the result, 32 deep from
// `depth` on (a multiple of 32).
__device__ inline void load_weights(uint32_t (&fragment)[2][2], const uint8_t* tile, int first,
                                    int depth) {
    const int lane = threadIdx.x % WARP;
#if WEIGHT_BITS == 8
    uint32_t matrices[4];
    const int row = first + lane % 8 + lane / 16 * 8;
    const int chunk = depth / 16 + lane / 8 % 2;
    load_matrices(matrices, tile + chunk_offset<WEIGHT_CHUNKS>(row, chunk));
    fragment[0][0] = matrices[0];
    fragment[0][1] = matrices[1];
    fragment[1][0] = matrices[2];
    fragment[1][1] = matrices[3];
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + half * 8 + lane / 4;
        const uint8_t* chunk = tile + chunk_offset<WEIGHT_CHUNKS>(row, depth / 32);
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(chunk) + lane % 4;
        fragment[half][0] = unpack_codes(pairs[0]);
        fragment[half][1] = unpack_codes(pairs[4]);
    }
#endif
}
