// The machine instructions that have no C++ spelling, one function each.
//
// The tests replace this file by one that computes the same on a CPU; everything else in this folder
// is compiled there as it is.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;

constexpr int WARP = 32;

struct alignas(16) Chunk {  // what one thread moves at once
    uint32_t word[4];
};

__device__ inline void synchronize_block() { __syncthreads(); }

__device__ inline float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Division and conversion by the rules of IEEE 754, whatever the compiler's options are.
__device__ inline float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline int round_to_even(float value) { return __float2int_rn(value); }
__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }

__device__ inline float float_of_half(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline uint16_t half_of_float(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline uint32_t bits_of_float(float value) { return __float_as_uint(value); }

// 16 bytes from global to shared memory, zeros where `valid` is false. From sm_80 on the copy runs
// while the thread goes on; `copies_commit` closes a group and `copies_wait<N>` waits until at most N
// groups are under way.
__device__ inline void copy_16_bytes(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(bytes)
                 : "memory");
#else
    Chunk chunk = {{0, 0, 0, 0}};
    if (valid) chunk = *static_cast<const Chunk*>(global);
    *static_cast<Chunk*>(shared) = chunk;
#endif
}

__device__ inline void copies_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ inline void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Four 8x16-byte matrices from shared memory. Lane L gives the address of row L % 8 of matrix L / 8,
// and gets of every matrix the four bytes 4 * (L % 4) ... of row L / 4.
__device__ inline void load_matrices(uint32_t (&out)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// sum (16 x 8) += a (16 x 32) * b (32 x 8), int8 with int32 sums, on the tensor cores.
//
// Lane L holds, with row = L / 4 and column = L % 4: of a the bytes 4 * column ... of rows row and
// row + 8 (a[0], a[1]) and 16 bytes further on (a[2], a[3]); of b, by columns, the bytes
// 4 * column ... of column `row` (b[0]) and 16 further on (b[1]); of the sums columns 2 * column and
// 2 * column + 1 of row `row` (sum[0], sum[1]) and of row + 8 (sum[2], sum[3]).
__device__ inline void multiply_accumulate(int32_t (&sum)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // Turing multiplies 8 x 16 by 16 x 8; its fragments are quarters of these.
    for (int half = 0; half < 2; ++half)
        for (int depth = 0; depth < 2; ++depth)
            asm volatile(
                "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(sum[2 * half]), "+r"(sum[2 * half + 1])
                : "r"(a[half + 2 * depth]), "r"(b[depth]));
#endif
}
