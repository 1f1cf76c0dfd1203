// Products of rows with the matrices of their experts: y[pair] = act(W[expert] x[row]) for pairs sorted by expert.
//
// A block takes WEIGHT_ROWS rows of one expert's matrix, 16 * TALL for each warp, and all of the expert's pairs, COLUMNS at a
// time; SHARES neighbouring blocks divide them, so that an expert with many pairs has its rows read from memory once, and from
// the cache by the others. The matrix is the left operand of the tensor cores, so that few pairs waste little: a decode step has a handful
// of them for each expert and is bound by reading the matrices. Tiles of DEPTH_TILE contracted elements pass through a ring
// of STAGES; every row of a tile is 128 bytes, of which the 16-byte pieces are swapped by the row's number, so that neither
// the copies nor ldmatrix meet bank conflicts. With GATED half of a block's rows are gates and half are their factors.
//
// Macros: ACT (16 bits), OUTER (rows of y: those of W, or half of them), DEPTH, WARPS, TALL, COLUMNS, STAGES, SHARES,
// ACTIVATION (0 none, 1 relu2; of network/gated.py 2 swiglu, 3 clamped_swiglu, 4 situ), GATE_LIMIT, LIMIT (of gates and of their
// factors; infinite where they have none), TOP_K, GATHER (x has a row for each token, of which a pair is token * TOP_K + choice;
// otherwise for each sorted pair), SCATTER (y has a row for each pair, otherwise each sorted pair).
#include "mma.cuh"
#include "ptx/async_copy.cuh"
#include "scalars.cuh"

constexpr bool GATED = ACTIVATION >= 2;
constexpr int THREADS = 32 * WARPS, WEIGHT_ROWS = 16 * TALL * WARPS, OUT_ROWS = GATED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int DEPTH_TILE = 64, PIECES = 8;  // 16-byte pieces of a row of a tile
constexpr int TILES = (DEPTH + DEPTH_TILE - 1) / DEPTH_TILE;
// Bounds a thread's registers; what more columns need is worth more than a second block.
constexpr int BLOCKS_AN_SM = (COLUMNS * TALL > 96 ? 1 : 2) * (WARPS > 4 ? 1 : 2);
constexpr int STAGE = (WEIGHT_ROWS + COLUMNS) * DEPTH_TILE, OUT_STRIDE = WEIGHT_ROWS + 8;
static_assert(COLUMNS % 16 == 0 && DEPTH % 8 == 0 && OUTER % 8 == 0, "pieces of 16 bytes");
static_assert(COLUMNS * OUT_STRIDE <= STAGES * STAGE, "results are staged where the tiles were");

// Element offset of a 16-byte piece within a tile.
__device__ __forceinline__ int piece_at(int row, int piece) { return row * DEPTH_TILE + ((piece ^ row) & (PIECES - 1)) * 8; }

// The row of W that a block's row stands for, -1 beyond the last.
__device__ __forceinline__ int weight_row(int first, int row) {
    const bool factor = GATED && row >= OUT_ROWS;
    const int at = first + (factor ? row - OUT_ROWS : row);
    return at >= OUTER ? -1 : factor ? OUTER + at : at;
}

__device__ __forceinline__ float activated(float x) {
    const float positive = positive_part(x);
    return ACTIVATION == 1 ? positive * positive : x;
}

// Near x around 0, and within -limit and limit.
__device__ __forceinline__ float softened(float x, float limit) { return isinf(limit) ? x : limit * tanhf(x / limit); }

__device__ __forceinline__ float gated(float gate, float factor) {
    if (ACTIVATION == 4) return softened(gate, GATE_LIMIT) * sigmoid(gate) * softened(factor, LIMIT);
    const float open = ACTIVATION == 3 ? silu(min_or_nan(gate, GATE_LIMIT)) : min_or_nan(silu(gate), GATE_LIMIT);
    return open * clamped(factor, -LIMIT, LIMIT);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
    grouped_linear(const ACT* x, const ACT* weight, const int* order, const int* ends, const int* active, ACT* y) {
    extern __shared__ __align__(128) ACT tiles[];
    __shared__ i64 x_rows[COLUMNS];
    const int expert = active[blockIdx.y];
    if (expert < 0) return;
    const int begin = expert ? ends[expert - 1] : 0, end = ends[expert], first = blockIdx.x / SHARES * OUT_ROWS;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const ACT* matrix = weight + i64(expert) * (GATED ? 2 : 1) * OUTER * DEPTH;

    for (int base = begin + blockIdx.x % SHARES * COLUMNS; base < end; base += SHARES * COLUMNS) {
        const int columns = min(COLUMNS, end - base);
        __syncthreads();
        for (int c = thread; c < COLUMNS; c += THREADS)
            x_rows[c] = c < columns ? i64(GATHER ? order[base + c] / TOP_K : base + c) * DEPTH : -1;
        __syncthreads();

        const auto load = [&](int tile) {
            ACT* stage = tiles + tile % STAGES * STAGE;
            const int depth = tile * DEPTH_TILE + thread % PIECES * 8;
            const bool inside = tile < TILES && depth < DEPTH;
#pragma unroll
            for (int row = thread / PIECES; row < WEIGHT_ROWS; row += THREADS / PIECES) {
                const int at = weight_row(first, row);
                const bool there = inside && at >= 0;
                copy_16_bytes(stage + piece_at(row, thread % PIECES), there ? matrix + i64(at) * DEPTH + depth : matrix,
                              there);
            }
            for (int c = thread / PIECES; c < COLUMNS; c += THREADS / PIECES) {
                if (c >= columns) break;
                copy_16_bytes(stage + piece_at(WEIGHT_ROWS + c, thread % PIECES), inside ? x + x_rows[c] + depth : x, inside);
            }
            end_copies();
        };

        Accumulator sums[TALL][COLUMNS / 8] = {};
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; ++tile) load(tile);
        for (int tile = 0; tile < TILES; ++tile) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            load(tile + STAGES - 1);
            const ACT* stage = tiles + tile % STAGES * STAGE;
#pragma unroll
            for (int k = 0; k < DEPTH_TILE / 16; ++k) {
                Matrices a[TALL];
#pragma unroll
                for (int r = 0; r < TALL; ++r)
                    a[r] = load_matrices(stage + piece_at((warp * TALL + r) * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 16) {
                    // Columns beyond the last pair hold what was there before: it stays in their own sums.
                    if (c >= columns) break;
                    const Matrices b = load_matrices(stage + piece_at(WEIGHT_ROWS + c + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
                    for (int r = 0; r < TALL; ++r) {
                        mma_16bit<ACT>(sums[r][c / 8], a[r].v, b.v[0], b.v[1]);
                        mma_16bit<ACT>(sums[r][c / 8 + 1], a[r].v, b.v[2], b.v[3]);
                    }
                }
            }
        }
        wait_copies();
        __syncthreads();

        // Through shared memory, so that a pair's results are written in pieces of 16 bytes.
#pragma unroll
        for (int r = 0; r < TALL; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    tiles[(c * 8 + 2 * t + i % 2) * OUT_STRIDE + (warp * TALL + r) * 16 + g + i / 2 * 8] =
                        from_float<ACT>(activated(sums[r][c].v[i]));
        __syncthreads();
        for (int piece = thread; piece < columns * (OUT_ROWS / 8); piece += THREADS) {
            const int c = piece / (OUT_ROWS / 8), at = piece % (OUT_ROWS / 8) * 8;
            if (first + at >= OUTER) continue;
            auto result = *reinterpret_cast<const vec<ACT, 8>*>(tiles + c * OUT_STRIDE + at);
            if (GATED) {
                const auto factors = *reinterpret_cast<const vec<ACT, 8>*>(tiles + c * OUT_STRIDE + OUT_ROWS + at);
#pragma unroll
                for (int v = 0; v < 8; ++v)
                    result.v[v] = from_float<ACT>(gated(to_float(result.v[v]), to_float(factors.v[v])));
            }
            const i64 row = SCATTER ? order[base + c] : base + c;
            *reinterpret_cast<vec<ACT, 8>*>(y + row * OUTER + first + at) = result;
        }
    }
}
