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
#include "delta_copy.cuh"
#include "delta_gram.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bulk_copy.cuh"
#include "shared_tile.cuh"

constexpr int COPY_ROWS = 16;  // of a tile
constexpr int LANE_COLUMNS = KEY_DIM / 4, UNITS_A_LANE = LANE_COLUMNS / 8;
// Of a lane's columns, those that share a scale, in units of 8.
constexpr int SCALE_UNITS = (LANE_COLUMNS < COPY_BLOCK ? LANE_COLUMNS : COPY_BLOCK) / 8;
constexpr int LANE_SCALES = SCALE_UNITS > 0 ? UNITS_A_LANE / SCALE_UNITS : 1;
constexpr int UNIT_WORDS = READ_BITS / 4 > 0 ? READ_BITS / 4 : 1;  // words of 8 codes
// Bytes of a state row. Small heads have no copy, and units and scales of none.
constexpr int CODE_ROW = KEY_DIM * (READ_BITS ? READ_BITS : 8) / 8, SCALE_ROW = KEY_DIM < COPY_BLOCK ? 1 : KEY_DIM / COPY_BLOCK;

constexpr int MOST_VALUES = 512;        // in a row, of which every thread that appends it has 16 bytes at most
constexpr int VALUE_PITCH = SLICE + 8;  // by which rows begin in different banks
struct CopyReadInputs {
    Either<GRAM, GramInputs, ChainAdjointInputs>::type adjoint;
    alignas(16) ACT v[HEADS][ENTRY_ROWS][VALUE_PITCH];  // ring rows, then tokens, then zeros
    Adjoint<ACT> results;
    u64 ready[16];
};

// Shared memory of a block of which BLOCKS_AN_SM fit: a multiprocessor has 228 KB, and a block takes one that it cannot use.
constexpr int SHARE_OF_SM = (228 * 1024 / BLOCKS_AN_SM - 1024) / 128 * 128;
constexpr int COPY_READ_LIMIT = SHARE_OF_SM < SHARED_LIMIT ? SHARE_OF_SM : SHARED_LIMIT;
// What is left of it for codes and scales. A part of a head's rows is one request: all of them, if those of all heads fit.
constexpr int PART_ROOM = COPY_READ_LIMIT - 128 - int(sizeof(CopyReadInputs));
constexpr int PART_ROWS = HEADS * SLICE * (CODE_ROW + SCALE_ROW) <= PART_ROOM || SLICE % (COPY_ROWS * WARPS) ? SLICE : COPY_ROWS * WARPS;
constexpr int PARTS = HEADS * (SLICE / PART_ROWS), PARTS_THAT_FIT = PART_ROOM > 0 ? PART_ROOM / (PART_ROWS * (CODE_ROW + SCALE_ROW)) : 0;
constexpr int COPY_STAGES = PARTS_THAT_FIT < PARTS ? PARTS_THAT_FIT : PARTS;
constexpr bool READS_COPY = COPIED && TOKENS > 0 && WIDE && NARROW_INPUTS && KEY_DIM % 64 == 0 && KEY_DIM <= 128 &&
                            VALUE_DIM % SPLIT == 0 && SLICE % COPY_ROWS == 0 && SLICE <= MOST_VALUES && COPY_STAGES > 0;

struct CopyPart {
    alignas(16) u8 codes[PART_ROWS * CODE_ROW];
    alignas(16) u8 scales[PART_ROWS * SCALE_ROW];
};
struct CopyReadShared {
    alignas(128) CopyPart parts[COPY_STAGES > 0 ? COPY_STAGES : 1];
    alignas(16) CopyReadInputs in;
};

template <typename T>
struct CopyRead {
    typedef typename Either<GRAM, Gram<T, Adjoint<T>>, ChainAdjoint>::type Form;

    const Work& w;
    CopyReadShared& shared;
    CopyReadInputs& in;
    Form adjoint;
    const int warp, lane, history, tokens;

    __device__ CopyRead(const Work& work, CopyReadShared& memory)
        : w(work), shared(memory), in(memory.in), adjoint(work, memory.in.adjoint, memory.in.results), warp(threadIdx.x / 32),
          lane(opaque(int(threadIdx.x)) & 31), history(work.row.history()), tokens(work.row.tokens) {}

    // ---- requests ----------------------------------------------------------------------------------------------------

    // By one thread.
    __device__ void request_part(int part) {
        constexpr int HEAD_PARTS = SLICE / PART_ROWS;
        const ReadCopy copy = w.of_head(part / HEAD_PARTS).copy();
        const int row = part % HEAD_PARTS * PART_ROWS;
        CopyPart& to = shared.parts[part % COPY_STAGES];
        u64* ready = &in.ready[part % COPY_STAGES];
        expect_bytes(ready, PART_ROWS * (CODE_ROW + SCALE_ROW));
        stream_to_shared(to.codes, copy.codes + row * CODE_ROW, PART_ROWS * CODE_ROW, ready);
        stream_to_shared(to.scales, copy.scales + row * SCALE_ROW, PART_ROWS * SCALE_ROW, ready);
    }

    // Zeros, for a state that has not been stored yet.
    __device__ void clear_parts() const {
        constexpr int UNITS = int(sizeof(shared.parts)) / 16;
#pragma unroll 1
        for (int at = threadIdx.x; at < UNITS; at += THREADS) reinterpret_cast<uint4*>(shared.parts)[at] = {0, 0, 0, 0};
    }

    static constexpr int VALUE_LANES = SLICE / 8;  // of 16 bytes
    // Values are loaded by the warps that do not load keys, if there are some of them that have lanes for a row.
    static constexpr int OTHER_WARPS = GRAM ? WARPS - KEY_WARPS : 0;
    static constexpr int VALUE_WARPS = OTHER_WARPS > 0 && VALUE_LANES <= 32 * OTHER_WARPS ? OTHER_WARPS : WARPS;
    static constexpr int VALUE_ROWS = 32 * VALUE_WARPS / VALUE_LANES;  // at a time
    static_assert(!READS_COPY || VALUE_ROWS > 0, "lanes for a row of values");

    // Keys, queries and values first, since the adjoint waits for them, then the first parts of the copy.
    __device__ void request() {
        adjoint.request();
        const int thread = int(threadIdx.x) - 32 * (WARPS - VALUE_WARPS);
        if (u32(thread) < VALUE_ROWS * VALUE_LANES) {
            const int column = thread % VALUE_LANES * 8;
            const T* ring = opaque(reinterpret_cast<const T*>(w.t.ring_v) + w.ring_v_at(0) + column);
#pragma unroll 1
            for (int j = thread / VALUE_LANES; j < history; j += VALUE_ROWS)
#pragma unroll
                for (int n = 0; n < HEADS; ++n)
                    copy_16_bytes(&in.v[n][j][column], ring + (n * RING_ROWS + w.history_row(j)) * VALUE_DIM);
            const T* values = opaque(w.v(0) + column);
#pragma unroll 1
            for (int i = thread / VALUE_LANES; i < tokens; i += VALUE_ROWS)
#pragma unroll
                for (int n = 0; n < HEADS; ++n) copy_16_bytes(&in.v[n][history + i][column], values + i * w.t.qkv_stride + n * VALUE_DIM);
            const int entries = history + tokens;
#pragma unroll 1
            for (int j = entries + thread / VALUE_LANES; j < padded_rows(entries); j += VALUE_ROWS)
#pragma unroll
                for (int n = 0; n < HEADS; ++n) *reinterpret_cast<uint4*>(&in.v[n][j][column]) = {0, 0, 0, 0};
        }
        if (w.row.folded == 0) return clear_parts();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int stage = 0; stage < COPY_STAGES; ++stage) init_barrier(&in.ready[stage]);
            publish_barriers();
#pragma unroll 1
            for (int part = 0; part < COPY_STAGES; ++part) request_part(part);
        }
    }

    // ---- the product -----------------------------------------------------------------------------------------------------

    // Eight codes as four pairs of float16; those of E2M1, without an instruction for it, times 2^-14: their lower three bits become
    // the lowest of the exponent and the highest of the fraction, even ones first.
    __device__ static void widen(const u32* words, u32 (&pairs)[4]) {
        if constexpr (READ_BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = from_e4m3_pair(u16(words[i / 2] >> i % 2 * 16));
        } else {
            const u32 word = words[0];
#if HAS_E2M1
            from_e2m1_word(pairs, word);
#else
            constexpr u32 MAGNITUDES = 0x0e0e0e0eu;
            const u32 signs = select_bits(0x88888888u, word, 0);  // for both: an operator would be repeated behind the shift
            const u32 even = select_bits(MAGNITUDES, word << 1, signs << 4), odd = select_bits(MAGNITUDES, word >> 3, signs);
            pairs[0] = __byte_perm(even, 0, 0x1404), pairs[1] = __byte_perm(even, 0, 0x3424);
            pairs[2] = __byte_perm(odd, 0, 0x1404), pairs[3] = __byte_perm(odd, 0, 0x3424);
#endif
        }
    }
    static constexpr float CODE_UNIT = READ_BITS == 4 && !HAS_E2M1 ? 16384.0f : 1.0f;

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

    __device__ static float scale_of(u8 code) {
        if constexpr (READ_BITS == 8) return fp8_scale_value(code);
        else return from_e4m3(code);
    }
    // A row's E4M3 scales as float16, of which both halves of a pair are multiplied by one.
    __device__ static u32 widen_scales(const vec<u8, LANE_SCALES>& codes) {
        return from_e4m3_pair(LANE_SCALES == 2 ? *reinterpret_cast<const u16*>(codes.v) : u16(codes.v[0]));
    }
    __device__ static u32 times_half(u32 pair, u32 factors, int s) {
        return multiply_halves(pair, __byte_perm(factors, 0, s ? 0x3232 : 0x1010));
    }
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
            if (stored) wait_barrier(&in.ready[stage], part / COPY_STAGES % 2);
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

    // The step's v to the ring, by the first threads.
    static constexpr int APPENDING = GRAM ? KEY_THREADS : THREADS, APPENDED_ROWS = APPENDING / VALUE_LANES;
    static_assert(!READS_COPY || APPENDED_ROWS > 0, "threads for a row of values");
    __device__ void append_values() const {
        if (!adjoint.appends()) return;
        const int column = threadIdx.x % VALUE_LANES * 8, first = threadIdx.x / VALUE_LANES;
        if (first >= APPENDED_ROWS) return;
#pragma unroll 1
        for (int token = first; token < tokens; token += APPENDED_ROWS)
#pragma unroll
            for (int n = 0; n < HEADS; ++n)
                *reinterpret_cast<uint4*>(w.t.ring_v_out + w.of_head(n).ring_v_at(w.append_row(token)) + column) =
                    *reinterpret_cast<const uint4*>(&in.v[n][history + token][column]);
    }
};

template <typename T>
__device__ __forceinline__ void copy_read_step(const Work& w, CopyReadShared& shared) {
    CopyRead<T> read(w, shared);
    read.request();
    float head_scale = 1.0f;
    if (READ_BITS == 4 && read.adjoint.solves() && w.row.folded > 0) head_scale = *w.of_head(read.adjoint.solved_head()).copy().head_scale;
    read.adjoint.run(head_scale, [&] { read.append_values(); });
    __syncthreads();  // x, c
    read.read();
}
