// The step of a delta-rule layer: one block a batch row and some of its value heads, or a slice of one head's value rows.
#pragma once
#include "delta_chunk.cuh"
#include "delta_copy_read.cuh"
#include "delta_fold.cuh"
#include "delta_fold_step.cuh"
#include "delta_read.cuh"
#include "delta_recurrent.cuh"
#include "delta_token_read.cuh"
#include "kda_fold.cuh"
#include "kda_read.cuh"
#include "ptx/bulk_copy.cuh"

// The recurrence token by token: with a window of 1, and for what the chunk form does not take.
constexpr bool RECURS = !CHUNKED || (TOKENS == 1 && WINDOW == 1);
// Folds of 16-bit states that stream take a single chunk, and so do those of KDA's verify steps. Rows that have more entries, which only
// some that are absorbed have, take them token by token.
constexpr bool LONG_ROWS_RECUR = KDA_VERIFIES || (STREAMS && SINGLE_CHUNK && !ONE_CHUNK);
// Steps that answer from the read copy; prefills do not.
constexpr bool ANSWERS_FROM_COPY = COPIED && TOKENS > 0;

static_assert(!ANSWERS_FIRST || (READS && (STREAMS || KDA_FOLDS)), "no other way is compiled");
static_assert(!FOLD_ANSWERS || (READS && STREAMS), "no other way is compiled");
static_assert(!KDA_FOLDS || HEADS_A_BLOCK == 1, "such a fold takes one head");

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int READ_BYTES = KDA_READS_TOKEN     ? sizeof(KdaTokenShared)
                           : READS_TOKEN       ? sizeof(TokenShared)
                           : READS             ? sizeof(ReadShared)
                           : READS_COPY        ? sizeof(CopyReadShared)
                           : ANSWERS_FROM_COPY ? sizeof(RecurrentShared)
                                               : 0;
constexpr int REPLAY_BYTES = RECURS || KDA_VERIFIES ? sizeof(RecurrentShared) : STREAMS ? sizeof(FoldShared) : sizeof(ChunkShared);
constexpr int OTHER_FOLD_BYTES = KDA_FOLDS ? larger(sizeof(KdaFoldShared), ONE_CHUNK ? sizeof(RecurrentShared) : 0)
                                 : LONG_ROWS_RECUR ? sizeof(RecurrentShared)
                                                   : 0;
constexpr int SHARED_BYTES = larger(larger(READ_BYTES, REPLAY_BYTES), OTHER_FOLD_BYTES);

// All entries of a row, which the checkpoint takes up if the plan says so, and its copy after it.
template <Pass PASS>
__device__ __forceinline__ void replay(const Work& block, unsigned char* memory) {
    // Heads need no order; that from the last one down saves the registers that compute capability 10 lacks.
    constexpr bool DOWN = __CUDA_ARCH__ >= 1000;
#pragma unroll 1
    for (int n = DOWN ? HEADS_A_BLOCK - 1 : 0; DOWN ? n >= 0 : n < HEADS_A_BLOCK; n += DOWN ? -1 : 1) {
        const Work w = block.of_head(n);
        float largest;
        if constexpr (RECURS || PASS == Pass::ANSWER || LONG_ROWS_RECUR)
            largest = recurrent_step<PASS>(w, *reinterpret_cast<RecurrentShared*>(memory));
        else
            largest = chunk_step<PASS != Pass::FOLD>(w, *reinterpret_cast<ChunkShared*>(memory));
        if constexpr (COPIED && PASS != Pass::ANSWER)
            if (w.row.folds()) renew_copy(w, largest, reinterpret_cast<u32*>(memory));
    }
}

// For folds that keep nothing of what was there before (kda_fold).
struct KeepNothing {
    __device__ void operator()() const {}
};
// What kda_folds names. Behind it the plan comes from memory again: no register holds it meanwhile.
template <bool ANSWERS, typename Keep = KeepNothing>
__device__ __forceinline__ void fold_channels(Work& block, const int* step, unsigned char* memory, Keep keep = Keep()) {
    static_cast<Row&>(block.row) = load_row(step, block.batch(), block.t.tokens);
    if (KDA_VERIFIES || !block.row.absorbs()) block.row.tokens = 0;
    KdaFoldShared& shared = *reinterpret_cast<KdaFoldShared*>(memory);
    const float largest = kda_fold<ANSWERS>(block, shared, keep);
    block.row.number = shared.number;
    static_cast<Row&>(block.row) = load_row(step, block.batch(), block.t.tokens);
    if constexpr (COPIED) renew_copy(block, largest, reinterpret_cast<u32*>(memory));
}

// The answer that needs no fold, from the checkpoint or its copy.
template <typename T>
__device__ __forceinline__ void answer(Work& block, const HeldInputs& held, unsigned char* memory) {
    if constexpr (ANSWERS_FIRST) {
        __shared__ ReadBarriers barriers;
        read_step(block, *reinterpret_cast<ReadShared*>(memory), barriers);
    } else if constexpr (READS_COPY && sizeof(T) == 2) {
        __shared__ PartBarriers barriers;
        copy_read_step<T>(block, held, *reinterpret_cast<CopyReadShared*>(memory), barriers);
    } else {
        replay<Pass::ANSWER>(block, memory);
    }
}

// A verify step of Kimi Delta Attention that takes up the ring, from which its tokens are answered.
template <typename T>
__device__ __forceinline__ void fold_channels_and_answer(Work& block, const int* step, unsigned char* memory) {
    KdaFoldShared& shared = *reinterpret_cast<KdaFoldShared*>(memory);
    float x[READ_TOKENS];
    block.row.folded = block.row.fold_to;
    prepare_step(block, reinterpret_cast<ReadShared*>(memory)->in, *shared.coefficients, x);
    const auto keep = [&] {
#pragma unroll
        for (int token = 0; token < READ_TOKENS; ++token) shared.x()[token][threadIdx.x] = x[token];
    };
    if (!READS_PLANES) keep();
    fold_channels<sizeof(T) != 0>(block, step, memory, [&] {
        if (READS_PLANES) keep();
    });
}

// A step with a read copy, or of several tokens without one. Beside a copy what it answers does not depend on whether it folds.
template <typename T>
__device__ __forceinline__ void answer_and_fold(Work& block, const HeldInputs& held, const int* step, unsigned char* memory) {
    Row& row = block.row;
    if constexpr (KDA_FOLD_ANSWERS_STEP && sizeof(T) > 0)
        if (row.folds() && !row.absorbs()) return fold_channels_and_answer<T>(block, step, memory);
    if (fold_answers_step(row)) {
        if constexpr (FOLD_ANSWERS_STEP && sizeof(T) > 0) {
            row.folded = row.fold_to;
            prepare_step(block, reinterpret_cast<ReadShared*>(memory)->in, *reinterpret_cast<FoldShared*>(memory)->chunk.coefficients);
            // The plan comes from memory again: no register holds it meanwhile.
            row = load_row(step, block.batch(), block.t.tokens);
        }
    } else {
        answer<T>(block, held, memory);
        if (!row.folds()) return;
        __syncthreads();
        if constexpr (FOLD_ANSWERS_STEP && sizeof(T) > 0)
            if (threadIdx.x == 0) reinterpret_cast<FoldShared*>(memory)->chunk.coefficients->tokens = 0;  // they have been answered
    }
    if constexpr (KDA_VERIFIES && sizeof(T) > 0) {
        if (KDA_FOLD_ANSWERS_STEP || row.absorbs()) return replay<Pass::FOLD>(block, memory);
        return fold_channels<false>(block, step, memory);
    }
    if (!row.absorbs()) row.tokens = 0;
    if constexpr (KDA_FOLDS && sizeof(T) > 0) {
        if (ONE_CHUNK || kda_folds(row)) return fold_channels<false>(block, step, memory);
    }
    if constexpr (STREAMS && !RECURS && sizeof(T) > 0) {
        const Fold fold{block, *reinterpret_cast<FoldShared*>(memory)};
        if (!LONG_ROWS_RECUR || fold.single()) return fold.run();
    }
    if constexpr (!STREAMS || RECURS || LONG_ROWS_RECUR) replay<Pass::FOLD>(block, memory);
}

// Behind a flush: what the block has stored, to its threads and to the copy engine.
__device__ __forceinline__ void find_folded(Row& row) {
    row.folded = row.fold_to;
    __threadfence_block();
    fence_async_proxy();
    __syncthreads();
}

// What does not need a row's plan.
struct AheadOfRead {
    __device__ __forceinline__ void operator()() const {
        if constexpr (READS_TOKEN) TokenRead<STATE>::init();
    }
};

__device__ __forceinline__ void delta_step(const Tensors& t, const int* step) {
    constexpr int BARRIER_BYTES = READS_TOKEN     ? int(sizeof(ReadBarriers) + sizeof(u64))
                                  : READS_ALL       ? BARRIER_ROOM
                                  : READS && !GRAM ? sizeof(u64)
                                                    : 0;
    static_assert(SHARED_BYTES + BARRIER_BYTES <= SHARED_LIMIT, "the block needs too much shared memory");
    __shared__ __align__(128) unsigned char memory[SHARED_BYTES];
    const int turn = block_turn();
    Work block{t, IN_TURN ? load_row_in_turn(step, turn, t.tokens, AheadOfRead()) : RowInTurn{load_row(step, turn, t.tokens), turn}, 0};
    if constexpr (READS_TOKEN && !IN_TURN) TokenRead<STATE>::init();
    Row& row = block.row;
    // On their way before the plan is there: of padding, too, which has inputs that count for nothing. Without a copy a fold that comes
    // before the answer has no registers for them.
    HeldInputs held;
    if constexpr (READS_COPY && KDA_TOKEN) held.request(block);
    if (row.slot < 0) row.tokens = 0;
    zero_padding(block, row.tokens);
    if (!row.tokens) return;
    if constexpr (ANSWERS_FROM_COPY || ANSWERS_FIRST) return answer_and_fold<ACT>(block, held, step, memory);
    // Of KDA's rows whose ring has one chunk, all that do not fold are read, but for a ring that the token fills: no cursor of the
    // engine's leaves it as it is.
    constexpr bool ALL_READ = KDA_FOLDS && ONE_CHUNK && READS;
    if constexpr (ALL_READ) {
        if (!row.folds() && row.history() > READ_HISTORY) {
            recurrent_step<Pass::BOTH>(block, *reinterpret_cast<RecurrentShared*>(memory));
            return;
        }
    }
    // A flush folds the ring; then the tokens find an empty one.
    if (row.folds() && !row.absorbs()) row.tokens = 0;
    if constexpr (FOLD_ANSWERS) {
        if (row.folds()) {
            Fold{block, *reinterpret_cast<FoldShared*>(memory)}.run();
            if (row.absorbs()) return;
            row.tokens = 1;
            find_folded(row);
        }
    }
    if constexpr (KDA_FOLDS) {
        if (kda_folds(row)) {
            fold_channels<TOKENS == 1>(block, step, memory);
            if (row.absorbs()) return;
            find_folded(row);
        }
    }
#pragma unroll 1
    while (true) {
        if constexpr (READS) {
            if (FOLD_ANSWERS || ALL_READ || (!row.folds() && row.history() <= READ_HISTORY && row.tokens <= TOKENS &&
                                             (!GRAM || row.history() + row.tokens <= ENTRY_ROWS))) {
                if constexpr (KDA_READS_TOKEN) {
                    return KdaTokenRead<STATE>(block, *reinterpret_cast<KdaTokenShared*>(memory)).run();
                } else if constexpr (READS_TOKEN) {
                    return TokenRead<STATE>(block, *reinterpret_cast<TokenShared*>(memory)).run();
                } else {
                    ReadShared& shared = *reinterpret_cast<ReadShared*>(memory);
                    return read_step(block, shared, shared.barriers);
                }
            }
        }
        replay<Pass::BOTH>(block, memory);
        if (row.tokens) return;
        // The number of tokens comes from memory again: no register holds it meanwhile. A single token is known, but registers of
        // compute capability 10 suffice for a longer ring only if it comes from there as well.
        constexpr bool KNOWN = TOKENS == 1 && (ONE_CHUNK || __CUDA_ARCH__ < 1000);
        row.tokens = KNOWN ? 1 : load_row(step, block.batch(), t.tokens).tokens;
        find_folded(row);
    }
}
