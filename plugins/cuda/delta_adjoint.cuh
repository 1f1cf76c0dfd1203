// What the adjoint of a step (delta_read.cuh) leaves behind: for products with the checkpoint, or with its copy.
#pragma once
#include "delta_chains.cuh"
#include "ptx/mma.cuh"

// Where a column of x belongs, so that a lane's eight columns follow each other as their codes' float16 values do
// (delta_copy_read.cuh): E2M1 codes that are widened without an instruction for it come out even ones first.
__device__ __forceinline__ int x_place(int column) {
    const int at = column % 8;
    return column - at + (READ_BITS == 4 && !HAS_E2M1 ? at % 2 * 4 + at / 2 : at);
}

// A power of two that brings a number to at least 2^EXPONENT and below twice that, unless it is next to nothing.
struct Rescaling {
    float factor, inverse;

    __device__ __forceinline__ Rescaling(float x, int exponent) {
        const u32 biased = __float_as_uint(x) >> 23;
        factor = __uint_as_float((biased > 16 ? 254 + exponent - biased : 127) << 23);
        inverse = __uint_as_float((biased > 16 ? biased - exponent : 127) << 23);
    }
};

template <bool, typename A, typename B>
struct Either {
    typedef A type;
};
template <typename A, typename B>
struct Either<false, A, B> {
    typedef B type;
};

// In an upper and a lower part of 16 bits.
template <typename T, int N>
__device__ __forceinline__ void store_parts(T (*to)[N], int at, float value) {
    const T upper = round_quickly<T>(value);
    to[0][at] = upper;
    to[1][at] = round_quickly<T>(value - to_float(upper));
}

// In float32, as the checkpoint's products take it, but for those of HALF_STATES.
struct FloatAdjoint {
    union {
        alignas(16) float x[HEADS][READ_TOKENS][KEY_PADDED];
        STATE parts[HEADS][HALF_STATES ? 2 : 1][KEY_DIM];
    };
    alignas(16) StepSums c;
    float unit[HEADS][READ_TOKENS];  // by which products with x are to be multiplied

    __device__ __forceinline__ void store(int n, int token, int column, float value) {
        if constexpr (HALF_STATES)
            store_parts(parts[n], column, value);
        else
            x[n][token][column] = value;
    }
    __device__ __forceinline__ void store_sum(int n, int token, int entry, float value) { c[n][entry][token] = value; }
};

// Products pass through tensor cores, with x and with c in two parts of 16 bits. x has been multiplied by a power of two that keeps
// its float16 parts from vanishing; c has the type T of the values, and is multiplied by SUM_UNIT: |c| <= 2 K^-1/2, and gates that
// hardly open leave much less of it than float16's smallest normal number.
template <typename T>
struct Adjoint {
    static constexpr float SUM_UNIT = same_type<T, fp16>::value ? 4096.0f : 1.0f;
    alignas(16) fp16 x[HEADS][READ_TOKENS][2][KEY_DIM + 8];  // in the order of x_place; tokens begin in different banks
    alignas(16) T c[HEADS][READ_TOKENS][2][ENTRIES];         // zero for entries behind the token's
    float unit[HEADS][READ_TOKENS];                          // by which products with x are to be multiplied

    __device__ __forceinline__ void store(int n, int token, int column, float value) {
        store_parts(x[n][token], x_place(column), value);
    }
    __device__ __forceinline__ void store_sum(int n, int token, int entry, float value) {
        store_parts(c[n][token], entry, value * SUM_UNIT);
    }
};

// Powers of two that keep a warp's x, which decays make small, within float16's range.
__device__ __forceinline__ Rescaling rescaling(const float (&x)[LANE_COLS]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < LANE_COLS; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    return Rescaling(__uint_as_float(__reduce_max_sync(~0u, largest)), 4);
}

// By chains (delta_chains.cuh), whose x stay in registers until the last.
struct HeldChains {
    Chains chains;
    float x[CHAINS][LANE_COLS];

    __device__ HeldChains(const Work& work, ChainInputs& inputs, StepSums& sums) : chains(work, inputs, sums) {}

    __device__ bool appends() const { return chains.appends(); }
    __device__ int solved_head() const { return chains.chain_head(); }
    __device__ bool solves() const { return chains.has_tokens(); }

    __device__ void request() const { chains.request(); }
    // From inputs that have been requested. Calls append(), then keep(head, token, x) for the warp's tokens.
    // LATER: groups of copies requested after them, which need not have arrived.
    template <int LATER, typename Append, typename Keep>
    __device__ void run(Append append, Keep keep) {
        chains.load_queries(x);
        chains.load_gates();
        wait_for_copies<LATER>();
        __syncthreads();
        chains.wait_for_ring();
        append();
        chains.append_keys();
        chains.multiply_keys();
        __syncthreads();
        if (!chains.has_tokens()) return;
        chains.run(x);
        __syncwarp();
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int token = chains.chain_token(chain);
            if (token < chains.tokens) keep(chains.chain_head(), token, x[chain]);
        }
    }
};

// x of several tokens meets float16 states in parts of their type (delta_read_matrix.cuh).
constexpr bool SCALED_CHAINS = READ_TOKENS >= 2 && same_type<STATE, fp16>::value;

struct FloatChains : HeldChains {
    FloatAdjoint& out;

    __device__ FloatChains(const Work& work, ChainInputs& inputs, FloatAdjoint& results)
        : HeldChains(work, inputs, results.c), out(results) {}

    // As Gram's (delta_gram.cuh).
    template <int LATER, typename Append>
    __device__ void run(float, Append append) {
        HeldChains::run<LATER>(append, [this](int n, int token, float (&x)[LANE_COLS]) {
            if constexpr (SCALED_CHAINS) {
                const Rescaling to = rescaling(x);
#pragma unroll
                for (float& column : x) column *= to.factor;
                if (chains.lane == 0) out.unit[n][token] = to.inverse;
            }
            store_columns(out.x[n][token], chains.lane, x);
        });
    }
};

struct ChainAdjointInputs : ChainInputs {
    StepSums sums;
};
struct ChainAdjoint : HeldChains {
    StepSums& sums;
    Adjoint<ACT>& out;

    __device__ ChainAdjoint(const Work& work, ChainAdjointInputs& inputs, Adjoint<ACT>& results)
        : HeldChains(work, inputs, inputs.sums), sums(inputs.sums), out(results) {}

    template <typename Append>
    __device__ void run(float unit, Append append) {
        HeldChains::run<0>(append, [this, unit](int n, int token, const float (&x)[LANE_COLS]) {
            const int lane = chains.lane;
            const Rescaling to = rescaling(x);
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) out.store(n, token, lane_column(lane, i), x[i] * to.factor);
            if (lane == 0) out.unit[n][token] = unit * to.inverse;
#pragma unroll
            for (int j = lane; j < ENTRIES; j += 32) out.store_sum(n, token, j, j <= chains.history + token ? sums[n][j][token] : 0.0f);
        });
    }
};
