// Outputs from the read copy: y_i = exp(c_e) S0 C_i + sum_j M_ij x_j (names in mamba2_replay.cuh), S0 being the copy's values.
//
// A warp takes a whole head. Codes become float16, in which they are exact, times what their block's scale leaves to the
// operand; they are the first operand of products of 16 rows, 16 columns and 8 tokens.
#pragma once
#include "mamba2_weights.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/memory.cuh"
#include "read_copy.cuh"

constexpr int TILES = HEAD_DIM / 16;  // of 16 rows
// Tokens of a tile that a lane can have: one column of an accumulator when there is one token.
constexpr int LANE_TOKENS = TOKENS == 1 ? 1 : 2;

// Words of codes of a lane in one row: eight or four adjacent columns each.
constexpr int CODE_WORDS = STATE_SIZE * READ_BITS / 128, WORD_COLUMNS = 32 / READ_BITS;
constexpr int ROW_CODES = STATE_SIZE * READ_BITS / 8, ROW_SCALES = STATE_SIZE / COPY_BLOCK;
// nvfp4: a lane has a quarter of a row, LANE_SCALES whole blocks or a part of one. fp8: eight columns of each block of 32.
constexpr int LANE_SCALES = READ_BITS == 8 ? ROW_SCALES : ROW_SCALES < 4 ? 1 : ROW_SCALES / 4;

constexpr int divisor_up_to(int n, int limit) {
    int best = 1;
    for (int i = 1; i <= n && i <= limit; ++i)
        if (n % i == 0) best = i;
    return best;
}
// Tiles whose codes are in registers or on their way: what CODE_REGISTERS hold. Many outputs leave room for fewer; fp8 takes twice
// the registers, which decode steps are given (plugins/device/mamba2_copy.py).
constexpr int CODE_REGISTERS = TILES > 4 || STATE_SIZE > 128 || TOKENS > 8 ? 16 : READ_BITS == 8 && TOKENS == 1 ? 64 : 32;
constexpr int SLOTS = divisor_up_to(TILES, CODE_REGISTERS / (2 * CODE_WORDS));

// First column of word w of lane t.
__device__ __forceinline__ int code_column(int t, int w) {
    return READ_BITS == 8 ? 32 * (w / 2) + 8 * t + 4 * (w % 2) : t * (STATE_SIZE / 4) + 8 * w;
}

// N words that lie together, in accesses as wide as they may be aligned.
template <int N>
struct Words {
    static constexpr int STEP = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
    u32 v[N];

    __device__ __forceinline__ void load(const void* from) {
#pragma unroll
        for (int i = 0; i < N; i += STEP) {
            const auto part = static_cast<const vec<u32, STEP>*>(from)[i / STEP];
#pragma unroll
            for (int k = 0; k < STEP; ++k) v[i + k] = part.v[k];
        }
    }
};

// Codes that are read once.
__device__ __forceinline__ void load_codes(u32 (&v)[CODE_WORDS], const u8* row) {
    if constexpr (READ_BITS == 4 && CODE_WORDS % 4 == 0) {
#pragma unroll
        for (int w = 0; w < CODE_WORDS; w += 4) {
            const uint4 part = stream_16_bytes(row + 4 * w);
            v[w] = part.x, v[w + 1] = part.y, v[w + 2] = part.z, v[w + 3] = part.w;
        }
    } else if constexpr (CODE_WORDS % 2 == 0) {
        // fp8: eight bytes of each 32.
#pragma unroll
        for (int w = 0; w < CODE_WORDS; w += 2) {
            const uint2 part = stream_8_bytes(row + (READ_BITS == 8 ? 16 : 4) * w);
            v[w] = part.x, v[w + 1] = part.y;
        }
    } else {
        v[0] = stream_4_bytes(row);
    }
}

// A lane's scales of one row: LANE_SCALES bytes, the first in the lowest place.
struct LaneScales {
    static constexpr int WORDS = (LANE_SCALES + 3) / 4;
    u32 v[WORDS];

    __device__ __forceinline__ void load(const u8* from) {
        if constexpr (LANE_SCALES >= 4)
            for (int i = 0; i < WORDS; ++i) v[i] = reinterpret_cast<const u32*>(from)[i];
        else if constexpr (LANE_SCALES == 2)
            v[0] = *reinterpret_cast<const u16*>(from);
        else
            v[0] = *from;
    }
    // fp8: 2^e of block i.
    __device__ __forceinline__ float power_of_two(int i) const { return fp8_scale_value(v[i / 4] >> 8 * (i % 4) & 0xffu); }
    // nvfp4: the scale of block i twice, as float16.
    __device__ __forceinline__ u32 halves(int i) const {
        return __byte_perm(from_e4m3_pair(u16(v[i / 4] >> 16 * (i % 4 / 2))), 0, i % 2 ? 0x3232 : 0x1010);
    }
};

// Where a lane's share of a head's copy lies.
struct CopyRows {
    const u8 *codes, *scales;

    __device__ __forceinline__ CopyRows(const ReadCopy& copy, int head, int lane) {
        const int g = lane / 4, t = lane % 4;
        const i64 row = i64(head) * HEAD_DIM + g;
        codes = copy.codes + row * ROW_CODES + code_column(t, 0) * READ_BITS / 8;
        scales = copy.scales + row * ROW_SCALES + (READ_BITS == 8 ? 0 : t * (STATE_SIZE / 4) / COPY_BLOCK);
    }
    __device__ __forceinline__ void advance(int heads) {
        codes += i64(heads) * HEAD_DIM * ROW_CODES, scales += i64(heads) * HEAD_DIM * ROW_SCALES;
    }
};

// Rows g and g + 8 of a tile.
struct CopyTile {
    u32 codes[2][CODE_WORDS];
    LaneScales scales[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int w = 0; w < CODE_WORDS; ++w) codes[h][w] = 0;
#pragma unroll
            for (int i = 0; i < LaneScales::WORDS; ++i) scales[h].v[i] = 0;
        }
    }
    __device__ __forceinline__ void load(const CopyRows& rows, int tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            load_codes(codes[h], rows.codes + (16 * tile + 8 * h) * ROW_CODES);
            scales[h].load(rows.scales + (16 * tile + 8 * h) * ROW_SCALES);
        }
    }
    // Keeps the compiler from converting codes where they are loaded: it would wait for memory there.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int w = 0; w < CODE_WORDS; ++w) codes[h][w] = opaque(codes[h][w]);
    }
};

// ---- codes to float16 ------------------------------------------------------------------------------------------------

// What a pair of float16 stands for: E2M1 without an instruction of its own comes out as E4M3 does whose bits it becomes.
constexpr float CODE_UNIT = READ_BITS == 4 && !HAS_E2M1 ? 64.0f : 1.0f;
// Pairs of columns in the order in which they come out of a word: (0, 2), (4, 6), (1, 3), (5, 7), or as they lie.
constexpr bool SPREAD_PAIRS = READ_BITS == 4 && !HAS_E2M1;
constexpr int WORD_PAIRS = WORD_COLUMNS / 2;

__device__ __forceinline__ void decode(u32 (&pairs)[WORD_PAIRS], u32 word) {
    if constexpr (READ_BITS == 8) {
        from_e4m3_word(pairs[0], pairs[1], word);
    } else {
#if HAS_E2M1
        from_e2m1_word(pairs, word);
#else
        // Sign, the lower two bits of the exponent and the highest of the fraction.
        const u32 even = word << 4 & 0x80808080u | word << 2 & 0x1c1c1c1cu, odd = word & 0x80808080u | word >> 2 & 0x1c1c1c1cu;
        from_e4m3_word(pairs[0], pairs[1], even);
        from_e4m3_word(pairs[2], pairs[3], odd);
#endif
    }
}

// ---- C ---------------------------------------------------------------------------------------------------------------

// C of tokens 8 n + g in the columns of lane t, in float16, for all warps of the block. bfloat16 has a wider range: a token's C
// is brought near the upper end of float16's by a power of two, where elements 2^-40 times the largest still count.
struct CopyC {
    static constexpr int STEPS = CODE_WORDS * WORD_PAIRS / 2;  // products of 16 columns in a row

    uint2 v[TOKEN_TILES][STEPS][32];
    float unit[TOKEN_TILES][8];  // what one is, of token 8 n + i

    // The second operand of a product. Volatile, or the compiler would keep it in registers.
    __device__ __forceinline__ uint2 get(int n, int step) const {
        return load_shared_8_bytes(&v[n][step][threadIdx.x % 32]);
    }
    // Token tile n, by one warp.
    __device__ __forceinline__ void fill(int n, const Sequence& seq, int group, int tokens, int lane) {
        const int t = lane % 4, i = 8 * n + lane / 4;
        const ACT* row = seq.c(i < tokens ? i : 0, group);
        Words<WORD_PAIRS> words[CODE_WORDS];
        float largest = 0.0f;
#pragma unroll
        for (int w = 0; w < CODE_WORDS; ++w) {
            words[w].load(row + code_column(t, w));
#pragma unroll
            for (int m = 0; m < WORD_PAIRS; ++m) {
                if (i >= tokens) words[w].v[m] = 0;
#pragma unroll
                for (int e = 0; e < 2; ++e) largest = fmaxf(largest, fabsf(half_to_float<ACT>(words[w].v[m], e)));
            }
        }
        u32 power = 127;
        if constexpr (same_type<ACT, bf16>::value) {
#pragma unroll
            for (int offset = 1; offset < 4; offset <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
            power = min(268 - int(__float_as_uint(largest) >> 23), 253);
        }
        const float scale = __uint_as_float(power << 23);
        if (t == 0) unit[n][lane / 4] = CODE_UNIT * __uint_as_float((254 - power) << 23);
        const auto half = [&](int w, int column) { return scale * half_to_float<ACT>(words[w].v[column / 2], column % 2); };
        const auto pair = [&](int w, int m) {
            constexpr int FIRST[4] = {0, 4, 1, 5};
            return SPREAD_PAIRS ? pack_pair<fp16>(half(w, FIRST[m]), half(w, FIRST[m] + 2))
                                : pack_pair<fp16>(half(w, 2 * m), half(w, 2 * m + 1));
        };
#pragma unroll
        for (int w = 0; w < CODE_WORDS; ++w)
#pragma unroll
            for (int m = 0; m < WORD_PAIRS; m += 2) v[n][(w * WORD_PAIRS + m) / 2][lane] = {pair(w, m), pair(w, m + 1)};
    }
};

// ---- outputs ---------------------------------------------------------------------------------------------------------

// A head's outputs as they form: of tile i, rows g and g + 8, tokens 8 n + 2 t and 8 n + 2 t + 1.
struct HeadOutputs {
    Accumulator v[TILES][TOKEN_TILES];
};

// Sets the outputs of a tile to S0 C, but for the scale of an nvfp4 head and the unit of C.
__device__ __forceinline__ void multiply_tile(Accumulator (&out)[TOKEN_TILES], const CopyTile& tile, const CopyC& c) {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) out[n] = {};
    Accumulator block[TOKEN_TILES] = {};
#pragma unroll
    for (int w = 0; w < CODE_WORDS; ++w) {
        u32 pairs[2][WORD_PAIRS];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            decode(pairs[h], tile.codes[h][w]);
            if constexpr (READ_BITS == 4) {
                const u32 scale = tile.scales[h].halves(w * LANE_SCALES / CODE_WORDS);
#pragma unroll
                for (int m = 0; m < WORD_PAIRS; ++m) pairs[h][m] = multiply_halves(pairs[h][m], scale);
            }
        }
#pragma unroll
        for (int m = 0; m < WORD_PAIRS; m += 2) {
            const u32 a[4] = {pairs[0][m], pairs[1][m], pairs[0][m + 1], pairs[1][m + 1]};
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                const uint2 b = c.get(n, (w * WORD_PAIRS + m) / 2);
                mma_16bit<fp16>(READ_BITS == 8 ? block[n] : out[n], a, b.x, b.y);
            }
        }
        if (READ_BITS == 8 && w % 2 == 1) {
            // The block's powers of two span more than float16's range.
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int e = 0; e < LANE_TOKENS; ++e)
                        out[n].v[2 * h + e] = fmaf(tile.scales[h].power_of_two(w / 2), block[n].v[2 * h + e], out[n].v[2 * h + e]);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) block[n] = {};
        }
    }
}

// Turns the products of the codes of head h of the block into outputs.
__device__ __forceinline__ void finish(HeadOutputs& out, const CopyC& c, const BlockWeights& block, const Extent& seq,
                                       float head_scale, int h, int lane) {
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < LANE_TOKENS; ++e) {
            const int i = 2 * (lane % 4) + e;
            const float factor = block.decay[h][8 * n + i] * c.unit[n][i] * head_scale;
#pragma unroll
            for (int k = 0; k < TILES; ++k) out.v[k][n].v[e] *= factor, out.v[k][n].v[2 + e] *= factor;
        }
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, seq.length)) continue;
        Parts<WEIGHT_PARTS> m[TOKEN_TILES][2];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 parts = block.m[h][b][n][lane];
            m[n][0] = {{parts.x, parts.z}}, m[n][1] = {{parts.y, parts.w}};
        }
#pragma unroll
        for (int k = 0; k < TILES; ++k) {
            const Matrices x = load_entries<X_UNITS>(block.x[h], b, 2 * k, lane);
            const Parts<EXACT_PARTS<ACT>> a[4] = {exact_parts<ACT>(x.v[0]), exact_parts<ACT>(x.v[2]), exact_parts<ACT>(x.v[1]),
                                                  exact_parts<ACT>(x.v[3])};
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) mma_parts<0, WEIGHT_PARTS>(out.v[k][n], a, m[n][0], m[n][1]);
        }
    }
}

// Stores y; `y` is at token 0 and the head's first channel. Tokens that do not exist become zero.
__device__ __forceinline__ void store_outputs(const HeadOutputs& out, int tokens, int lane, ACT* y) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int k = 0; k < TILES; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Transposed, a lane has two neighbouring channels of token 8 n + g.
                const u32 channels = transpose_8x8(pack_pair<ACT>(out.v[k][n].v[2 * half], out.v[k][n].v[2 * half + 1]));
                const int i = 8 * n + g, channel = 16 * k + 8 * half + 2 * t;
                if (i < TOKENS) *reinterpret_cast<u32*>(y + i64(i) * INNER + channel) = i < tokens ? channels : 0;
            }
}
