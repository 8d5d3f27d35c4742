// Activation functions that can be applied to the input on the way in.
#pragma once
#include "instructions.cuh"

struct Identity {
    static __device__ inline float apply(float x) { return x; }
};

struct Silu {
    static __device__ inline float apply(float x) { return divide(x, 1.0f + expf(-x)); }
};

struct GeluTanh {
    static __device__ inline float apply(float x) {
        float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return 0.5f * x * (1.0f + tanhf(inner));
    }
};
