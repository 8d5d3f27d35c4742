// The order in which blocks take the tiles of the result.
//
// Blocks that run at the same time share panels of both operands: PANELS columns of tiles are walked
// row by row, so that their weights stay in the L2 cache while all rows of the activations pass by.
// With very many rows nothing changes but the length of the walk: there is no row count at which the
// speed falls off.
#pragma once
#include "instructions.cuh"

struct Tile {
    int row;
    int column;
};

__device__ inline Tile tile_of_block(int64_t block, int rows, int columns) {
    const int64_t whole = static_cast<int64_t>(rows) * PANELS;
    const int group = static_cast<int>(block / whole);
    const int first = group * PANELS;
    const int width = min(PANELS, columns - first);
    const int64_t inside = block - group * whole;
    return {static_cast<int>(inside / width), first + static_cast<int>(inside % width)};
}
