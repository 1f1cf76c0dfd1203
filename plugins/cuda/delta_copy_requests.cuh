// What a step that answers from the read copy (delta_copy_read.cuh) requests, and what of its tokens it appends to the ring.
#pragma once
#include "delta_copy_shape.cuh"
#include "ptx/bulk_copy.cuh"

// T: of keys, queries and values.
template <typename T>
struct CopyRequests {
    typedef typename Either<KDA_TOKEN, KdaCopyAdjoint, ChainAdjoint>::type Walk;
    typedef typename Either<GRAM, Gram<T, Adjoint<T>>, Walk>::type Form;

    const Work& w;
    CopyReadShared& shared;
    CopyReadInputs& in;
    PartBarriers& ready;
    Form adjoint;
    const int warp, lane, history, tokens;

    __device__ CopyRequests(const Work& work, CopyReadShared& memory, PartBarriers& barriers)
        : w(work), shared(memory), in(memory.in), ready(barriers), adjoint(work, memory.in.adjoint, memory.in.results),
          warp(threadIdx.x / 32), lane(opaque(int(threadIdx.x)) & 31), history(work.row.history()), tokens(work.row.tokens) {}

    // By one thread.
    __device__ void request_part(int part) {
        constexpr int HEAD_PARTS = SLICE / PART_ROWS;
        const ReadCopy copy = w.of_head(part / HEAD_PARTS).copy();
        const int row = part % HEAD_PARTS * PART_ROWS;
        CopyPart& to = shared.parts[part % COPY_STAGES];
        u64* arrived = &ready[part % COPY_STAGES];
        expect_bytes(arrived, PART_ROWS * (CODE_ROW + SCALE_ROW));
        stream_to_shared(to.codes, copy.codes + row * CODE_ROW, PART_ROWS * CODE_ROW, arrived);
        stream_to_shared(to.scales, copy.scales + row * SCALE_ROW, PART_ROWS * SCALE_ROW, arrived);
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

    // The thread that requests the copy: another than those that request the ring's keys.
    static constexpr int PARTS_FROM = KDA_TOKEN ? THREADS - 64 : 0;
    __device__ void init_parts() const {
        if ((!KDA_TOKEN && w.row.folded == 0) || threadIdx.x != PARTS_FROM) return;
#pragma unroll
        for (int stage = 0; stage < COPY_STAGES + KDA_TOKEN; ++stage) init_barrier(&ready[stage]);
        publish_barriers();
    }
    __device__ void request_parts() {
        if (w.row.folded == 0) return clear_parts();
        if (threadIdx.x != PARTS_FROM) return;
#pragma unroll 1
        for (int part = 0; part < COPY_STAGES; ++part) request_part(part);
    }

    // Keys, queries and values first, since the adjoint waits for them, then the first parts of the copy. A fence behind loads into
    // registers would wait for them: where keys and queries are loaded so, barriers come first.
    __device__ void request() {
        if constexpr (KDA_TOKEN) {
            init_parts();
            adjoint.request();
            request_parts();
            request_token_values();
        } else {
            adjoint.request();
            request_values();
            init_parts();
            request_parts();
        }
    }

    // A single token's are those of one more ring row. Slices of rows are no neighbours.
    static constexpr bool WHOLE_VALUES = KDA_TOKEN && SPLIT == 1;
    __device__ void request_token_values() {
        if constexpr (!WHOLE_VALUES)
#pragma unroll 1
            for (int j = warp; j <= history; j += WARPS)
                request_row<SLICE>(in.v[0][j],
                                   j < history ? reinterpret_cast<const ACT*>(w.t.ring_v + w.ring_v_at(w.history_row(j))) : w.v(0), lane);
        if (!WHOLE_VALUES || threadIdx.x != PARTS_FROM) return;
        u64* arrived = &ready[COPY_STAGES];
        constexpr u32 BYTES = sizeof(in.v[0][0]);
        expect_bytes(arrived, (history + 1) * BYTES);
        for_ring_spans(w, [&](int to, int row, int count) {
            stream_to_shared(in.v[0][to], w.t.ring_v + w.ring_v_at(row), count * BYTES, arrived);
        });
        stream_to_shared(in.v[0][history], w.v(0), BYTES, arrived);
    }
    // Behind a barrier of all threads.
    __device__ void wait_for_values() const {
        if (WHOLE_VALUES) wait_barrier(&ready[COPY_STAGES], 0);
    }

    __device__ void request_values() {
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
    }

    // The step's v to the ring, by the first threads, or by the last where the first warp has other work.
    static constexpr int APPENDING = GRAM ? KEY_THREADS : THREADS, APPENDED_ROWS = APPENDING / VALUE_LANES;
    static_assert(!READS_COPY || APPENDED_ROWS > 0, "threads for a row of values");
    __device__ void append_values() const {
        if (!adjoint.appends()) return;
        const int thread = KDA_TOKEN ? THREADS - 1 - int(threadIdx.x) : int(threadIdx.x);
        const int column = thread % VALUE_LANES * 8, first = thread / VALUE_LANES;
        if (first >= (KDA_TOKEN ? 1 : APPENDED_ROWS)) return;
        wait_for_values();
#pragma unroll 1
        for (int token = first; token < tokens; token += APPENDED_ROWS)
#pragma unroll
            for (int n = 0; n < HEADS; ++n)
                *reinterpret_cast<uint4*>(w.t.ring_v_out + w.of_head(n).ring_v_at(w.append_row(token)) + column) =
                    *reinterpret_cast<const uint4*>(&in.v[n][history + token][column]);
    }
};
