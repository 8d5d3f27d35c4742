// The regular Hadamard rotation of a group of 16, 64 or 256 values, in registers.
//
// H4 = ones - 2 * (reversed identity), so one radix-4 step is out[i] = (sum of the four) - 2 * x[3 - i].
// H16, H64 and H256 are two, three and four such steps over two bits of the index each. A thread
// holds 16 consecutive values; steps over higher bits go across the lanes of a warp.
#pragma once
#include "instructions.cuh"

constexpr int THREAD_VALUES = 16;

__device__ inline void radix_4(float& a, float& b, float& c, float& d) {
    float sum = add(add(a, b), add(c, d));
    float first = sum - 2.0f * d;  // exact products, so a fused subtraction rounds the same
    float second = sum - 2.0f * c;
    float third = sum - 2.0f * b;
    d = sum - 2.0f * a;
    a = first;
    b = second;
    c = third;
}

// Over lanes L, L ^ step, L ^ 2 * step, L ^ 3 * step; every lane gets the sum in the same order.
__device__ inline float radix_4_across(float value, int step) {
    float pair = add(value, shuffle_xor(value, step));
    float sum = add(pair, shuffle_xor(pair, 2 * step));
    return sum - 2.0f * shuffle_xor(value, 3 * step);
}

template <int SIZE>
__device__ inline void rotate(float (&value)[THREAD_VALUES]) {
    static_assert(SIZE == 16 || SIZE == 64 || SIZE == 256, "no rotation of this size");
#pragma unroll
    for (int i = 0; i < 16; i += 4) radix_4(value[i], value[i + 1], value[i + 2], value[i + 3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) radix_4(value[i], value[i + 4], value[i + 8], value[i + 12]);
    constexpr float SCALE = SIZE == 16 ? 0.25f : SIZE == 64 ? 0.125f : 0.0625f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (SIZE >= 64) value[i] = radix_4_across(value[i], 1);
        if (SIZE >= 256) value[i] = radix_4_across(value[i], 4);
        value[i] *= SCALE;  // a power of two: exact
    }
}
