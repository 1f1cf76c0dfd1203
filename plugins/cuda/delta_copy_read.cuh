// The answer of a step from the checkpoint's read copy, the ring and the step's tokens (delta_gram.cuh has the formulas).
//
// The product of the copy with x runs on tensor cores, of which the codes are the left operand: as float16, exactly, without
// their scales. Lane 4 g + t has rows g and g + 8 of a tile of 16 and a quarter of their columns, those from t K / 4 on, so that the
// code blocks of a lane are its own. x is a block diagonal: of the eight columns of the right operand, 2 t and 2 t + 1 hold both
// parts of x in the columns of lane t and zeros elsewhere. So lane 4 g + t receives the products of its own codes, and
// multiplies them by its own scales.
//
// What the updates of the ring and of the tokens add, sum_j c_j v_j, is a product of 16 entries at a time, of which the values are the
// left operand and both parts of c two columns of the right one.
//
// Of several tokens and nvfp4, which has few enough bits, codes are multiplied by their scales in float16, exactly: then the
// eight columns are both parts of four tokens' x, and lane 4 g + t receives the products of token t.
#pragma once
#include "delta_copy_operand.cuh"
#include "delta_copy_requests.cuh"
#include "shared_tile.cuh"

template <typename T>
struct CopyRead : CopyRequests<T> {
    typedef CopyRequests<T> Requests;
    using Requests::history, Requests::in, Requests::lane, Requests::ready, Requests::request_part, Requests::shared, Requests::tokens,
        Requests::w, Requests::wait_for_values, Requests::warp;

    __device__ CopyRead(const Work& work, CopyReadShared& memory, PartBarriers& barriers) : Requests(work, memory, barriers) {}

    // ---- the product -----------------------------------------------------------------------------------------------------

    static constexpr bool DENSE = READ_BITS == 4 && READ_TOKENS > 1;
    // Right operands of a unit of columns: one a token, or one for four tokens.
    static constexpr int OPERANDS = DENSE ? (READ_TOKENS + 3) / 4 : READ_TOKENS;

    // A lane's share of x for eight of its columns, in column g of operand i; what is zero remains as it is.
    __device__ void load_x(vec<u32, 4>& x, int n, int i, int unit) const {
        const int g = lane / 4, t = lane % 4, token = DENSE ? min(4 * i + g / 2, READ_TOKENS - 1) : i;
        if (DENSE || g / 2 == t) x = *reinterpret_cast<const vec<u32, 4>*>(&in.results.x[n][token][g % 2][LANE_COLUMNS * t + 8 * unit]);
    }
    // Tiles of a warp that are worked on together: two of few tokens, whose stages wait for each other less. Of one token, their sums
    // fill the lanes.
    static constexpr int TILES = (DENSE ? READ_TOKENS <= 4 : READ_TOKENS == 1) && PART_ROWS % (2 * WARPS * COPY_ROWS) == 0 ? 2 : 1;
    static constexpr int TILE_DISTANCE = WARPS * COPY_ROWS;
    static constexpr bool KEEPS_X = UNITS_A_LANE > 0 && OPERANDS * UNITS_A_LANE <= 8;
    static constexpr int KEPT_X = KEEPS_X ? OPERANDS * UNITS_A_LANE : 1;

    // Where a lane's codes and scales lie in a tile, and its unit of block s of the values that load_transposed_matrices reads.
    __device__ int code_at() const { return lane / 4 * CODE_ROW + lane % 4 * (LANE_COLUMNS * READ_BITS / 8); }
    __device__ int scale_at() const { return (lane / 4 * KEY_DIM + LANE_COLUMNS * (lane % 4)) / COPY_BLOCK; }
    __device__ int value_at(int s) const { return lane_entry(lane, s) * VALUE_PITCH + lane / 8 % 2 * 8; }

    // What a lane has in the end: of a tile, rows g and g + 8 of token lane_token(i) in 2 i and 2 i + 1, or one of them; of two tiles
    // of one token, one row of one of them.
    static constexpr bool ONE_ROW = !DENSE && READ_TOKENS <= 2;
    static constexpr int RESULTS = ONE_ROW ? 1 : DENSE ? 2 * OPERANDS : READ_TOKENS / 2, RESULT_TOKENS = (RESULTS + 1) / 2;
    __device__ static int lane_token(int i, int t) {
        return min(DENSE ? 4 * i + t : ONE_ROW ? t * READ_TOKENS / 4 : t * READ_TOKENS / 4 + i, READ_TOKENS - 1);
    }
    __device__ int lane_tile() const { return !DENSE && TILES == 2 ? lane % 4 / 2 : 0; }
    __device__ bool has_lower_row() const { return ONE_ROW && (TILES == 1 && READ_TOKENS == 1 ? lane % 4 > 1 : lane % 2 == 1); }
    __device__ int lane_row() const { return lane / 4 + (has_lower_row() ? 8 : 0) + lane_tile() * TILE_DISTANCE; }
    // Whether no other lane has the same.
    __device__ bool owns(int i) const {
        const int t = lane % 4;
        return DENSE ? 4 * i + t < tokens : lane_token(i, t) < tokens && (READ_TOKENS * TILES > 1 || t % 2 == 0);
    }

    // A lane's sums of rows g and g + 8 of a tile, of all tokens; where DENSE, of those that it has in the end.
    static constexpr int SUMS = DENSE ? RESULTS : 2 * READ_TOKENS;
    // Products of a tile's rows with the x of all tokens.
    __device__ void multiply(const u8* own_codes, const u8* own_scales, const vec<u32, 4> (&kept)[KEPT_X], int n, float* sums) const {
        constexpr int WORDS = UNITS_A_LANE * UNIT_WORDS;
        vec<u32, WORDS> codes[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            codes[r] = *reinterpret_cast<const vec<u32, WORDS>*>(own_codes + 8 * r * CODE_ROW);
        vec<u8, LANE_SCALES> scales[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) scales[r] = *reinterpret_cast<const vec<u8, LANE_SCALES>*>(own_scales + 8 * r * SCALE_ROW);
#pragma unroll
        for (int m = 0; m < SUMS; ++m) sums[m] = 0.0f;
        static_assert(!READS_COPY || !DENSE || LANE_SCALES <= 2, "scales of a lane that are widened together");
        u32 factors[2];
        if constexpr (DENSE)
#pragma unroll
            for (int r = 0; r < 2; ++r) factors[r] = widen_scales(scales[r]);
        Accumulator products[OPERANDS] = {};
#pragma unroll
        for (int s = 0; s < LANE_SCALES; ++s) {
            const u8 scale[2] = {scales[0].v[s], scales[1].v[s]};
#pragma unroll
            for (int unit = s * SCALE_UNITS; unit < (s + 1) * SCALE_UNITS; ++unit) {
                u32 pairs[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    widen(codes[r].v + unit * UNIT_WORDS, pairs[r]);
                    if constexpr (DENSE)
#pragma unroll
                        for (int p = 0; p < 4; ++p) pairs[r][p] = times_half(pairs[r][p], factors[r], s);
                }
#pragma unroll
                for (int i = 0; i < OPERANDS; ++i) {
                    vec<u32, 4> x = {};
                    if constexpr (KEEPS_X)
                        x = kept[i * UNITS_A_LANE + unit];
                    else
                        load_x(x, n, i, unit);
#pragma unroll
                    for (int half = 0; half < 4; half += 2)
                        mma_16bit<fp16>(products[i], {pairs[0][half], pairs[1][half], pairs[0][half + 1], pairs[1][half + 1]},
                                        x.v[half], x.v[half + 1]);
                }
            }
            if constexpr (!DENSE) {
#pragma unroll
                for (int i = 0; i < OPERANDS; ++i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        sums[2 * i + r] = fmaf(scale_of(scale[r]), products[i].v[2 * r] + products[i].v[2 * r + 1], sums[2 * i + r]);
                    products[i] = {};
                }
            }
        }
        if constexpr (DENSE) {
#pragma unroll
            for (int i = 0; i < OPERANDS; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) sums[2 * i + r] = products[i].v[2 * r] + products[i].v[2 * r + 1];
        }
    }

    // The right operand of the updates: of block s of 16 entries, both parts of c of the tokens of every lane.
    struct Updates {
        u32 c[RESULT_TOKENS][ENTRIES / 16][2];
        float unit[RESULT_TOKENS];
        ACT* o;  // of the head, in the lane's row of the first tile
    };
    __device__ void load_updates(Updates& to, int n) const {
        const int g = lane / 4, t = lane % 4;
        to.o = opaque(w.of_head(n).o(0) + lane_row());
#pragma unroll
        for (int i = 0; i < RESULT_TOKENS; ++i) {
            const T* c = reinterpret_cast<const T*>(in.results.c[n][lane_token(i, g / 2)][g % 2]) + 2 * t;
#pragma unroll
            for (int s = 0; s < 2 * (ENTRIES / 16); ++s) to.c[i][s / 2][s % 2] = *reinterpret_cast<const u32*>(c + 8 * s);
            to.unit[i] = CODE_UNIT * in.results.unit[n][lane_token(i, t)];
        }
    }
    // Sums of block s of them for a tile.
    __device__ void add_updates(const Updates& updates, const ACT* own_values, int s, Accumulator (&sums)[RESULT_TOKENS]) const {
        const Matrices block = load_transposed_matrices(own_values);
#pragma unroll
        for (int i = 0; i < RESULT_TOKENS; ++i) mma_16bit<T>(sums[i], block.v, updates.c[i][s][0], updates.c[i][s][1]);
    }
    __device__ void store(const Updates& updates, const Accumulator (&sums)[TILES][RESULT_TOKENS], const float* results, int row) const {
        const int t = lane % 4;
        ACT* o = updates.o + row;
#pragma unroll
        for (int i = 0; i < RESULT_TOKENS; ++i) {
            if (!owns(i)) continue;
            ACT* to = o + lane_token(i, t) * (VALUE_HEADS * VALUE_DIM);
            constexpr float SUM_FACTOR = 1.0f / Adjoint<T>::SUM_UNIT;
            if constexpr (ONE_ROW) {
                float own[4];  // both parts of row g, then of row g + 8
#pragma unroll
                for (int e = 0; e < 4; ++e) own[e] = TILES == 2 && lane_tile() ? sums[TILES - 1][i].v[e] : sums[0][i].v[e];
                const float update = has_lower_row() ? own[2] + own[3] : own[0] + own[1];
                to[0] = from_float<ACT>(fmaf(updates.unit[i], results[0], update * SUM_FACTOR));
            } else {
#pragma unroll
                for (int m = 0; m < TILES; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float update = (sums[m][i].v[2 * r] + sums[m][i].v[2 * r + 1]) * SUM_FACTOR;
                        to[m * TILE_DISTANCE + 8 * r] = from_float<ACT>(fmaf(updates.unit[i], results[m * SUMS + 2 * i + r], update));
                    }
            }
        }
    }

    __device__ void read() {
        constexpr int HEAD_PARTS = SLICE / PART_ROWS;
        const bool stored = w.row.folded > 0;
        vec<u32, 4> kept[KEPT_X] = {};
        Updates updates;
        const int code = opaque(code_at()), scale = opaque(scale_at());
        int own_values[ENTRIES / 16];
#pragma unroll
        for (int s = 0; s < ENTRIES / 16; ++s) own_values[s] = opaque(value_at(s));
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            const int n = part / HEAD_PARTS, stage = part % COPY_STAGES, row = part % HEAD_PARTS * PART_ROWS;
            if (part % HEAD_PARTS == 0) {
                load_updates(updates, n);
                if constexpr (KEEPS_X)
#pragma unroll
                    for (int m = 0; m < KEPT_X; ++m) load_x(kept[m], n, m / UNITS_A_LANE, m % UNITS_A_LANE);
            }
            if (stored) wait_barrier(&ready[stage], part / COPY_STAGES % 2);
            const CopyPart& from = shared.parts[stage];
#pragma unroll 1
            for (int at = warp * COPY_ROWS; at < PART_ROWS; at += TILES * TILE_DISTANCE) {
                float results[TILES * SUMS] = {};
                Accumulator sums[TILES][RESULT_TOKENS] = {};
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    const int first = at + m * TILE_DISTANCE;
                    add_updates(updates, in.v[n][0] + row + first + own_values[0], 0, sums[m]);
                    multiply(from.codes + first * CODE_ROW + code, from.scales + first * SCALE_ROW + scale, kept, n, results + m * SUMS);
                }
#pragma unroll
                for (int s = 1; s < ENTRIES / 16; ++s) {
                    if (16 * s >= history + tokens) continue;
#pragma unroll
                    for (int m = 0; m < TILES; ++m)
                        add_updates(updates, in.v[n][0] + row + at + m * TILE_DISTANCE + own_values[s], s, sums[m]);
                }
                if constexpr (!DENSE) sum_scattered<4>(results, lane);
                store(updates, sums, results, row + at);
            }
            if constexpr (COPY_STAGES < PARTS) {
                __syncthreads();
                if (threadIdx.x == 0 && stored && part + COPY_STAGES < PARTS) request_part(part + COPY_STAGES);
            }
        }
    }

    // The same for a single token of KDA: a lane has one row, to which it adds sum_j c_j v_j itself.
    __device__ void read_token() {
        const bool stored = w.row.folded > 0;
        vec<u32, 4> kept[KEPT_X] = {};
        if constexpr (KEEPS_X)
#pragma unroll
            for (int m = 0; m < KEPT_X; ++m) load_x(kept[m], 0, 0, m);
        const float unit = CODE_UNIT * in.results.unit[0][0];
        const int code = opaque(code_at()), scale = opaque(scale_at());
        wait_for_values();
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            const int stage = part % COPY_STAGES;
            const CopyPart& from = shared.parts[stage];
            if (stored) wait_barrier(&ready[stage], part / COPY_STAGES % 2);
#pragma unroll 1
            for (int at = warp * COPY_ROWS; at < PART_ROWS; at += TILES * TILE_DISTANCE) {
                const int row = part * PART_ROWS + at + lane_row();
                float update = 0.0f, results[TILES * SUMS];
                for (int j = 0; j <= history; ++j) update = fmaf(in.adjoint.c[j], to_float(in.v[0][j][row]), update);
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    const int first = at + m * TILE_DISTANCE;
                    multiply(from.codes + first * CODE_ROW + code, from.scales + first * SCALE_ROW + scale, kept, 0, results + m * SUMS);
                }
                sum_scattered<4>(results, lane);
                if (owns(0)) w.o(0)[row] = from_float<ACT>(fmaf(unit, results[0], update));
            }
            if constexpr (COPY_STAGES < PARTS) {
                __syncthreads();
                if (threadIdx.x == 0 && stored && part + COPY_STAGES < PARTS) request_part(part + COPY_STAGES);
            }
        }
    }
};

// `held`: of a single token of KDA, requested already.
template <typename T>
__device__ __forceinline__ void copy_read_step(const Work& w, const HeldInputs& held, CopyReadShared& shared, PartBarriers& barriers) {
    CopyRead<T> read(w, shared, barriers);
    if constexpr (KDA_TOKEN) read.adjoint.own = held;
    read.request();
    float head_scale = 1.0f;
    if (READ_BITS == 4 && read.adjoint.solves() && w.row.folded > 0) head_scale = *w.of_head(read.adjoint.solved_head()).copy().head_scale;
    read.adjoint.run(head_scale, [&] { read.append_values(); });
    __syncthreads();  // x, c
    if constexpr (KDA_TOKEN)
        read.read_token();
    else
        read.read();
}
