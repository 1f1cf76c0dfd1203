// The answer of a step from the checkpoint's read copy, the ring and the step's tokens (delta_gram.cuh has the formulas).
//
// The product of the copy with x runs on tensor cores, of which the codes are the left operand: as float16, exactly, without
// their scales. Lane 4 g + t has rows g and g + 8 of a tile of 16 and a quarter of their columns, those from t K / 4 on, so that the
// code blocks of a lane are its own. x is a block diagonal: of the eight columns of the right operand, 2 t and 2 t + 1 hold both
// parts of x in the columns of lane t and zeros elsewhere. So lane 4 g + t receives the products of its own codes, and
// multiplies them by its own scales.
#pragma once
#include "bulk_copy.cuh"
#include "delta_copy.cuh"
#include "delta_gram.cuh"

constexpr int COPY_ROWS = 16;
constexpr int LANE_COLUMNS = KEY_DIM / 4, UNITS_A_LANE = LANE_COLUMNS / 8;
// Of a lane's columns, those that share a scale, in units of 8.
constexpr int SCALE_UNITS = (LANE_COLUMNS < COPY_BLOCK ? LANE_COLUMNS : COPY_BLOCK) / 8;
constexpr int LANE_SCALES = SCALE_UNITS > 0 ? UNITS_A_LANE / SCALE_UNITS : 1;
constexpr int UNIT_WORDS = READ_BITS / 4 > 0 ? READ_BITS / 4 : 1;  // words of 8 codes

struct CopyTile {
    alignas(16) u8 codes[COPY_ROWS * KEY_DIM * (READ_BITS ? READ_BITS : 8) / 8];
    alignas(16) u8 scales[COPY_ROWS * KEY_DIM / COPY_BLOCK];
};

constexpr int SLICE_TILES = SLICE / COPY_ROWS > 0 ? SLICE / COPY_ROWS : 1, MOST_TILES = HEADS * ((SLICE_TILES + WARPS - 1) / WARPS);

struct CopyReadInputs {
    union {
        GramInputs gram;
        float o[HEADS][READ_TOKENS][SLICE];
    };
    alignas(16) ACT v[HEADS][GRAM_ROWS][SLICE];  // ring rows, then tokens
    alignas(16) GramResults results;
    u64 ready[WARPS][MOST_TILES];
};

// Tiles of a warp that are in shared memory at a time.
constexpr int copy_stages(int stages) {
    return stages == 0 || WARPS * stages * int(sizeof(CopyTile)) + int(sizeof(CopyReadInputs)) + 256 <= SHARED_LIMIT
               ? stages
               : copy_stages(stages - 1);
}
constexpr int COPY_STAGES = copy_stages(MOST_TILES);
constexpr bool READS_COPY = COPIED && HAS_BULK_COPY && GRAM && VALUE_DIM % SPLIT == 0 && SLICE % COPY_ROWS == 0 && COPY_STAGES > 0;

struct CopyReadShared {
    alignas(128) CopyTile tiles[WARPS][COPY_STAGES > 0 ? COPY_STAGES : 1];
    alignas(16) CopyReadInputs in;
};

template <typename T>
struct CopyRead {
    const Work& w;
    CopyReadShared& shared;
    CopyReadInputs& in;
    Gram<T> gram;
    const int warp, lane, history, tokens;

    __device__ CopyRead(const Work& work, CopyReadShared& memory)
        : w(work), shared(memory), in(memory.in), gram(work, memory.in.gram, memory.in.results), warp(threadIdx.x / 32),
          lane(threadIdx.x % 32), history(work.row.history()), tokens(work.row.tokens) {}

    // ---- requests ----------------------------------------------------------------------------------------------------

    // Tiles of the warp in each head, of which it takes every fourth.
    __device__ int head_tiles() const {
        return SLICE_TILES % WARPS == 0 ? SLICE_TILES / WARPS : (SLICE_TILES - warp + WARPS - 1) / WARPS;
    }
    __device__ int first_row(int tile) const { return COPY_ROWS * (warp + WARPS * (tile % head_tiles())); }

    __device__ void request_tile(int tile) {
        const ReadCopy copy = w.of_head(tile / head_tiles()).copy();
        CopyTile& to = shared.tiles[warp][tile % COPY_STAGES];
        u64* ready = &in.ready[warp][tile % COPY_STAGES];
        expect_bytes(ready, sizeof(to.codes) + sizeof(to.scales));
        stream_to_shared(to.codes, copy.codes + first_row(tile) * (KEY_DIM * READ_BITS / 8), sizeof(to.codes), ready);
        stream_to_shared(to.scales, copy.scales + first_row(tile) * (KEY_DIM / COPY_BLOCK), sizeof(to.scales), ready);
    }

    // Keys, queries and values first, since the adjoint waits for them, then every warp's first tiles.
    __device__ void request() {
        if (lane == 0) {
            for (int stage = 0; stage < COPY_STAGES; ++stage) init_barrier(&in.ready[warp][stage]);
            publish_barriers();
        }
        gram.request();
        constexpr int UNITS = SLICE / 8;
        for (int at = threadIdx.x; at < HEADS * (history + tokens) * UNITS; at += THREADS) {
            const int column = at % UNITS * 8, j = at / UNITS % (history + tokens), n = at / UNITS / (history + tokens);
            const Work head = w.of_head(n);
            copy_16_bytes(&in.v[n][j][column], j < history ? w.t.ring_v + head.ring_v_at(w.history_row(j)) + column
                                                           : reinterpret_cast<const RING*>(head.v(j - history)) + column);
        }
        if (lane == 0 && w.row.folded > 0)
            for (int tile = 0; tile < min(COPY_STAGES, HEADS * head_tiles()); ++tile) request_tile(tile);
    }

    // ---- the product -----------------------------------------------------------------------------------------------------

    // Where a column of x belongs, so that a lane's eight columns follow each other as their codes' float16 values do.
    __device__ static int place(int column) {
        const int at = column % 8;
        return column - at + (READ_BITS == 4 && !HAS_E2M1 ? at % 2 * 4 + at / 2 : at);
    }

    // Eight codes as four pairs of float16; those of E2M1, without an instruction for it, times 2^-14: their lower three bits become
    // the lowest of the exponent and the highest of the fraction, even ones first.
    __device__ static void widen(const u32* words, u32 (&pairs)[4]) {
        if constexpr (READ_BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = from_e4m3_pair(u16(words[i / 2] >> i % 2 * 16));
        } else {
            const u32 word = words[0];
#if HAS_E2M1
            asm("{\n"
                ".reg .b8 codes<4>;\n"
                "mov.b32 {codes0, codes1, codes2, codes3}, %4;\n"
                "cvt.rn.f16x2.e2m1x2 %0, codes0;\n"
                "cvt.rn.f16x2.e2m1x2 %1, codes1;\n"
                "cvt.rn.f16x2.e2m1x2 %2, codes2;\n"
                "cvt.rn.f16x2.e2m1x2 %3, codes3;\n"
                "}\n"
                : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                : "r"(word));
#else
            const u32 even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
            const u32 odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
            pairs[0] = __byte_perm(even, 0, 0x1404), pairs[1] = __byte_perm(even, 0, 0x3424);
            pairs[2] = __byte_perm(odd, 0, 0x1404), pairs[3] = __byte_perm(odd, 0, 0x3424);
#endif
        }
    }
    static constexpr float CODE_UNIT = READ_BITS == 4 && !HAS_E2M1 ? 16384.0f : 1.0f;

    // A lane's share of x for eight of its columns: zero unless they are those of the operand's column g.
    __device__ vec<u32, 4> load_x(int n, int token, int unit) const {
        vec<u32, 4> x = {};
        if (lane / 8 == lane % 4)
            x = *reinterpret_cast<const vec<u32, 4>*>(&in.results.x[n][token][lane / 4 % 2][LANE_COLUMNS * (lane % 4) + 8 * unit]);
        return x;
    }
    // Small heads have no copy, and units of none.
    static constexpr bool KEEPS_X = UNITS_A_LANE > 0 && READ_TOKENS * UNITS_A_LANE <= 8;
    static constexpr int KEPT_X = KEEPS_X ? READ_TOKENS * UNITS_A_LANE : 1;

    __device__ static float scale_of(u8 code) {
        if constexpr (READ_BITS == 8) return fp8_scale_value(code);
        else return from_e4m3(code);
    }

    // Products of a tile's rows with the x of all tokens.
    __device__ void multiply(const CopyTile& tile, const vec<u32, 4> (&kept)[KEPT_X], int n, int row) {
        constexpr int WORDS = UNITS_A_LANE * UNIT_WORDS;
        const int g = lane / 4, t = lane % 4;
        vec<u32, WORDS> codes[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            codes[r] = *reinterpret_cast<const vec<u32, WORDS>*>(tile.codes + (g + 8 * r) * (KEY_DIM * READ_BITS / 8) + 4 * WORDS * t);
        float sums[2 * READ_TOKENS] = {};
#pragma unroll
        for (int s = 0; s < LANE_SCALES; ++s) {
            Accumulator products[READ_TOKENS] = {};
#pragma unroll
            for (int unit = s * SCALE_UNITS; unit < (s + 1) * SCALE_UNITS; ++unit) {
                u32 pairs[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r) widen(codes[r].v + unit * UNIT_WORDS, pairs[r]);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i) {
                    const vec<u32, 4> x = KEEPS_X ? kept[(i * UNITS_A_LANE + unit) % KEPT_X] : load_x(n, i, unit);
#pragma unroll
                    for (int half = 0; half < 4; half += 2)
                        mma_16bit<fp16>(products[i], {pairs[0][half], pairs[1][half], pairs[0][half + 1], pairs[1][half + 1]},
                                        x.v[half], x.v[half + 1]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float scale = scale_of(tile.scales[((g + 8 * r) * KEY_DIM + LANE_COLUMNS * t) / COPY_BLOCK + s]);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    sums[2 * i + r] = fmaf(scale, products[i].v[2 * r] + products[i].v[2 * r + 1], sums[2 * i + r]);
            }
        }
        sum_scattered<4>(sums, lane);
        if (t % COPIES<4, 2 * READ_TOKENS> == 0) {
#pragma unroll
            for (int m = 0; m < KEPT<4, 2 * READ_TOKENS>; ++m) {
                const int at = first_kept<4, 2 * READ_TOKENS>(lane) + m;
                in.o[n][at / 2][row + g + at % 2 * 8] = sums[m];
            }
        }
    }

    __device__ void read() {
        vec<u32, 4> kept[KEPT_X] = {};
        const int tiles = head_tiles();
#pragma unroll 1
        for (int tile = 0; tile < HEADS * tiles; ++tile) {
            const int n = tile / tiles, stage = tile % COPY_STAGES;
            if (KEEPS_X && tile % tiles == 0) {
#pragma unroll
                for (int m = 0; m < KEPT_X; ++m) kept[m] = load_x(n, m / UNITS_A_LANE, m % UNITS_A_LANE);
            }
            wait_barrier(&in.ready[warp][stage], tile / COPY_STAGES % 2);
            multiply(shared.tiles[warp][stage], kept, n, first_row(tile));
            if (COPY_STAGES < MOST_TILES) {
                __syncwarp();
                if (lane == 0 && tile + COPY_STAGES < HEADS * tiles) request_tile(tile + COPY_STAGES);
            }
        }
    }

    // o += sum_j c_j v_j, a thread for a value row; appends the step's v.
    __device__ void finish() const {
        const bool appends = gram.appends();
#pragma unroll 1
        for (int m = threadIdx.x; m < HEADS * SLICE; m += THREADS) {
            const int n = m / SLICE, row = m % SLICE;
            const Work head = w.of_head(n);
            float o[READ_TOKENS];
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                o[i] = w.row.folded > 0 && i < tokens ? in.o[n][i][row] * in.results.unit[n][i] : 0.0f;
#pragma unroll 4
            for (int j = 0; j < history + tokens; ++j) {
                const float v = to_float(in.v[n][j][row]);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    if (j <= history + i && i < tokens) o[i] = fmaf(in.results.c[n][i][j], v, o[i]);
            }
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i) {
                if (i >= tokens) break;
                head.o(i)[row] = from_float<ACT>(o[i]);
                if (appends) w.t.ring_v_out[head.ring_v_at(w.append_row(i)) + row] = in.v[n][history + i][row];
            }
        }
    }
};

template <typename T>
__device__ __forceinline__ void copy_read_step(const Work& w, CopyReadShared& shared) {
    CopyRead<T> read(w, shared);
    read.request();
    // What the head's products are to be multiplied by, read before it is needed.
    float unit = CopyRead<T>::CODE_UNIT;
    if (READ_BITS == 4 && w.row.folded > 0) unit *= *w.of_head(read.gram.warp_head()).copy().head_scale;
    read.gram.load_gates();
    wait_copies();
    __syncthreads();  // keys, queries, values, barriers
    read.gram.append_keys();
    read.gram.multiply();
    __syncthreads();
    read.gram.solve(unit);
    __syncthreads();
    read.gram.combine(CopyRead<T>::place);
    __syncthreads();
    if (w.row.folded > 0) read.read();
    __syncthreads();  // o
    read.finish();
}
