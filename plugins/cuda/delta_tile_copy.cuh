// The read copy of a warp's 16 rows of a head, which lie in shared memory as they are stored.
//
// A lane takes two pieces of 16 columns of a row: two blocks of nvfp4, or halves of two blocks of fp8, whose other halves another
// lane has. Eight neighbouring lanes have as many rows, which the pitch puts into different banks. Codes leave in accesses of 16
// bytes that fill sectors of memory.
#pragma once
#include "delta_copy.cuh"

struct TileCopy {
    static constexpr int COLUMNS = 16, PIECES = 2;                     // of a piece, and of a lane
    static constexpr int WORDS = COLUMNS / WORD_CODES;                  // of a piece
    static constexpr int ROW_LANES = KEY_DIM >= 64 ? KEY_DIM / 32 : 2;  // that a row takes; Fold takes no narrower ones
    static constexpr int PASS_ROWS = 32 / ROW_LANES, PASSES = 16 / PASS_ROWS;
    ReadCopy to;  // of the head's slice
    HeadScale head;
    int first_row, lane;  // `first_row`: of the slice, that the first of the 16 is

    __device__ __forceinline__ int lane_row() const { return lane % PASS_ROWS; }
    // The lane's piece i of a row. nvfp4's two are neighbours, since their codes are half as wide.
    __device__ __forceinline__ int piece(int i) const {
        return READ_BITS == 4 ? lane / PASS_ROWS * PIECES + i : lane / PASS_ROWS + i * ROW_LANES;
    }

    // Rows PASS_ROWS * pass ... of those at `rows`; for all lanes of a warp.
    __device__ __forceinline__ void store(const STATE (*rows)[STAGED_PITCH], int pass) const {
        const int row = pass * PASS_ROWS + lane_row();
        float x[PIECES][COLUMNS];
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int n = 0; n < COLUMNS; n += 4) load_vector<4>(rows[row] + (opaque(staged_column(row, piece(i) * COLUMNS)) ^ n), x[i] + n);
        const float amax[PIECES] = {block_magnitude(x[0]), block_magnitude(x[1])};
        BlockScale scales[PIECES] = {{amax[0], head}, {amax[1], head}};
        if (!scales[0].settled || !scales[1].settled)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) scales[i].settle(x[i], amax[i], head);
        u32 words[PIECES * WORDS];
#pragma unroll
        for (int i = 0; i < PIECES * WORDS; ++i)
            words[i] = code_word(x[i / WORDS] + i % WORDS * WORD_CODES, scales[i / WORDS].factor);
        store_scales(first_row + row, scales[0].stored, scales[1].stored);
        store_codes(first_row + row, words);
    }

private:
    __device__ __forceinline__ float block_magnitude(const float (&x)[COLUMNS]) const {
        const float amax = largest_magnitude(x);
        return READ_BITS == 4 ? amax : larger_magnitude(amax, __shfl_xor_sync(~0u, amax, PASS_ROWS));
    }
    __device__ __forceinline__ void store_scales(int row, u32 first, u32 second) const {
        u8* of_row = to.scales + row * (KEY_DIM / COPY_BLOCK);
        if constexpr (READ_BITS == 4)
            *reinterpret_cast<u16*>(of_row + piece(0)) = u16(first | second << 8);
        else if (piece(0) % 2 == 0)
            of_row[piece(0) / 2] = u8(first), of_row[piece(1) / 2] = u8(second);
    }
    __device__ __forceinline__ void store_codes(int row, const u32 (&words)[PIECES * WORDS]) const {
        u32* of_row = reinterpret_cast<u32*>(to.codes + row * (KEY_DIM * READ_BITS / 8));
#pragma unroll
        for (int i = 0; i < PIECES * WORDS; i += 4)
            *reinterpret_cast<uint4*>(of_row + piece(i / WORDS) * WORDS) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    }
};
