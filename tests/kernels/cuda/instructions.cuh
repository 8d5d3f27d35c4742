// Stands in for kernels/cuda/instructions.cuh on a CPU: a block's threads run as fibers in a seeded
// random order, one at a time, switching at every barrier, shuffle, warp-wide instruction and wait.
//
// What a missing barrier or wait would break shows: copies to shared memory land at a random moment
// between their start and the wait for them, and other threads may be far ahead or behind.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

constexpr int WARP = 32;

struct alignas(16) Chunk {
    uint32_t word[4];
};

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace fibers {

enum class Wait { none, warp, block };

struct Published {
    int operation;
    uint32_t word[8];
    const void* pointer;
};

struct Copy {
    void* shared;
    const void* global;
    bool valid;
    int group;
};

struct Range {
    const char* first;
    const char* last;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Wait wait;
    bool done;
    int turn;  // which of the two slots of `published` is next
    Published published[2];
    std::deque<Copy> copies;
    int groups;
};

static std::vector<Fiber> all;
static ucontext_t scheduler;
static int current;
static std::mt19937 random;
static unsigned landing;  // a copy lands with a chance of 1 in this at every switch
static bool favoring;     // whether one warp at a time runs as far as it can
static unsigned favorite;
static const char* fault;
static std::function<void()> body;
static std::vector<Range> readable;  // what asynchronous copies may read

static void allow(const void* first, size_t bytes) {
    readable.push_back({static_cast<const char*>(first), static_cast<const char*>(first) + bytes});
}

static void land(const Copy& copy) {
    if (copy.valid)
        std::memcpy(copy.shared, copy.global, sizeof(Chunk));
    else
        std::memset(copy.shared, 0, sizeof(Chunk));
}

static void land_some() {
    auto& copies = all[current].copies;
    for (auto copy = copies.begin(); copy != copies.end();)
        if (random() % landing == 0) {
            land(*copy);
            copy = copies.erase(copy);
        } else {
            ++copy;
        }
}

static void pause(Wait wait) {
    land_some();
    all[current].wait = wait;
    swapcontext(&all[current].context, &scheduler);
}

static void enter() {
    body();
    all[current].done = true;
}

// All threads of [first, last) wait for `wait`, or have ended: then they go on.
static bool release(int first, int last, Wait wait) {
    for (int i = first; i < last; ++i)
        if (!all[i].done && all[i].wait != wait) return false;
    bool any = false;
    int operation = -1;
    for (int i = first; i < last; ++i) {
        if (all[i].done) continue;
        any = true;
        if (wait == Wait::warp) {
            int mine = all[i].published[all[i].turn].operation;
            if (operation >= 0 && mine != operation) fault = "lanes of a warp disagree";
            operation = mine;
        }
        all[i].wait = Wait::none;
    }
    return any;
}

// One warp may run far ahead of the others before they get their turn, or all mix.
static int choose(const std::vector<int>& ready, int threads) {
    if (favoring) {
        if (random() % 4096 == 0) favorite = random() % ((threads + WARP - 1) / WARP);
        static std::vector<int> favored;
        favored.clear();
        for (int i : ready)
            if (i / WARP == static_cast<int>(favorite)) favored.push_back(i);
        if (!favored.empty()) return favored[random() % favored.size()];
    }
    return ready[random() % ready.size()];
}

static const char* run_block(int threads, unsigned seed, std::function<void()> kernel) {
    random.seed(seed);
    landing = 1 << seed % 3 * 4;
    favoring = seed % 4 != 3;
    favorite = random() % ((threads + WARP - 1) / WARP);
    fault = nullptr;
    body = kernel;
    all = std::vector<Fiber>(threads);
    for (auto& fiber : all) {
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.wait = Wait::none;
        fiber.done = false;
        fiber.turn = 0;
        fiber.groups = 0;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<int> ready;
    while (fault == nullptr) {
        ready.clear();
        bool left = false;
        for (int i = 0; i < threads; ++i) {
            left = left || !all[i].done;
            if (!all[i].done && all[i].wait == Wait::none) ready.push_back(i);
        }
        if (!left) break;
        if (ready.empty()) {
            bool released = release(0, threads, Wait::block);
            for (int first = 0; first < threads; first += WARP)
                released = release(first, min(first + WARP, threads), Wait::warp) || released;
            if (!released) fault = "deadlock: threads wait at different barriers";
            continue;
        }
        current = choose(ready, threads);
        threadIdx.x = current;
        swapcontext(&scheduler, &all[current].context);
        // A warp whose lanes have all arrived goes on, whatever the other warps do.
        if (all[current].wait == Wait::warp) {
            int first = current / WARP * WARP;
            release(first, min(first + WARP, threads), Wait::warp);
        }
    }
    return fault;
}

static Published& publish(int operation) {
    Fiber& me = all[current];
    me.published[me.turn].operation = operation;
    return me.published[me.turn];
}

// After `exchange` all lanes have published; slots alternate, so that none is overwritten too early.
static int exchange() {
    int turn = all[current].turn;
    pause(Wait::warp);
    threadIdx.x = current;
    all[current].turn = 1 - turn;
    return turn;
}

static const Published& of_lane(int lane, int turn) {
    return all[current / WARP * WARP + lane].published[turn];
}

}  // namespace fibers

static inline void synchronize_block() { fibers::pause(fibers::Wait::block); }

static inline float divide(float a, float b) { return a / b; }
static inline int round_to_even(float value) { return static_cast<int>(std::nearbyintf(value)); }
static inline float multiply(float a, float b) { return a * b; }
static inline float add(float a, float b) { return a + b; }

static inline float float_of_half(uint16_t bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

static inline uint16_t half_of_float(float value) {
    _Float16 half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

static inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float shuffle_xor(float value, int mask) {
    fibers::publish(1).word[0] = bits_of_float(value);
    int lane = fibers::current % WARP;
    int turn = fibers::exchange();
    return float_of_bits(fibers::of_lane(lane ^ mask, turn).word[0]);
}

static inline void copy_16_bytes(void* shared, const void* global, bool valid) {
    auto& me = fibers::all[fibers::current];
    bool inside = !valid;
    for (const auto& range : fibers::readable)
        inside = inside || (global >= range.first && static_cast<const char*>(global) + 16 <= range.last);
    if (!inside) fibers::fault = "a copy reads outside of its matrix";
    me.copies.push_back({shared, global, valid, me.groups});
}

static inline void copies_commit() { ++fibers::all[fibers::current].groups; }

template <int PENDING>
static inline void copies_wait() {
    auto& me = fibers::all[fibers::current];
    while (!me.copies.empty() && me.copies.front().group < me.groups - PENDING) {
        fibers::land(me.copies.front());
        me.copies.pop_front();
    }
    fibers::pause(fibers::Wait::none);
}

static inline void load_matrices(uint32_t (&out)[4], const void* row) {
    fibers::publish(2).pointer = row;
    int lane = fibers::current % WARP;
    int turn = fibers::exchange();
    for (int matrix = 0; matrix < 4; ++matrix) {
        auto source = static_cast<const char*>(fibers::of_lane(8 * matrix + lane / 4, turn).pointer);
        std::memcpy(&out[matrix], source + 4 * (lane % 4), 4);
    }
}

static inline void multiply_accumulate(int32_t (&sum)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[2]) {
    auto& mine = fibers::publish(3);
    std::memcpy(mine.word, a, 16);
    std::memcpy(mine.word + 4, b, 8);
    int lane = fibers::current % WARP;
    int turn = fibers::exchange();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const int owner = k % 16 / 4, byte = k % 4, depth = k / 16;
            const auto& left = fibers::of_lane(4 * row + owner, turn);
            const auto& right = fibers::of_lane(4 * column + owner, turn);
            const auto x = static_cast<int8_t>(left.word[half + 2 * depth] >> 8 * byte);
            const auto y = static_cast<int8_t>(right.word[4 + depth] >> 8 * byte);
            sum[i] += x * y;
        }
    }
}
