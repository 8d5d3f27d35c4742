// The float types that tensors come in, converted without NVIDIA's headers, which users may lack.
#pragma once
#include "instructions.cuh"

struct Float32 {
    typedef float Stored;
    static __device__ inline float load(Stored value) { return value; }
    static __device__ inline Stored store(float value) { return value; }
};

struct Float16 {
    typedef uint16_t Stored;
    static __device__ inline float load(Stored value) { return float_of_half(value); }
    static __device__ inline Stored store(float value) { return half_of_float(value); }
};

struct BFloat16 {
    typedef uint16_t Stored;
    static __device__ inline float load(Stored value) {
        return float_of_bits(static_cast<uint32_t>(value) << 16);
    }
    static __device__ inline Stored store(float value) {
        uint32_t bits = bits_of_float(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN stays NaN
        return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);  // to even
    }
};
