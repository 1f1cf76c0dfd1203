"""Times the grouped products of a mixture of experts with blocks of several shapes, which is what ``tile_for`` is based on.

    python -m benchmarks.expert_tiles --model nano --tokens 1 32 256 1024

``of floor``: the time in which the matrices of the chosen experts are read at the copy bandwidth of the same run, over the
measured time of both products. The shape that ``tile_for`` takes is marked.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch

from trtllm_replayssm.plugins.compiler import architecture, compile_kernel
from trtllm_replayssm.plugins.device.experts import NO_LIMITS, Tile, experts, linear_kernel, tile_for
from trtllm_replayssm.tuning.timing import Timer

#: experts, chosen of them, hidden size, inner size, activation
MODELS = {"nano": (128, 6, 2688, 1856, "relu2"), "qwen": (256, 8, 2048, 512, "swiglu")}
#: Layers of weights that are read in turn.
LAYERS = 3


def tiles(columns: int) -> list[Tile]:
    """Shapes worth a try for so many columns."""
    shapes = product((4, 8), (3, 4, 6), (1, 2))
    found = [Tile(warps, columns, stages, tall) for warps, stages, tall in shapes]
    return [
        t for t in found if t.shared <= 113 << 10 and t.rows <= 128 and (columns < 96 or t.rows == 128 or t.tall == 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["nano"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 256, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    timer, bf16 = Timer(options.repeats), torch.bfloat16
    bandwidth = timer.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.2f} TB/s")
    arch = architecture(*torch.cuda.get_device_capability())
    for model in options.model:
        count, top_k, width, inner, activation = MODELS[model]
        rows = 2 * inner if activation == "swiglu" else inner
        layers = [
            (
                torch.empty(count, rows, width, dtype=bf16, device="cuda").normal_(0, width**-0.5),
                torch.empty(count, width, inner, dtype=bf16, device="cuda").normal_(0, inner**-0.5),
            )
            for _ in range(LAYERS)
        ]
        for tokens in options.tokens:
            usual = tile_for(tokens * top_k, count)
            tried = list(dict.fromkeys((usual, *tiles(usual.columns))))
            with ThreadPoolExecutor(16) as pool:
                for tile in tried:
                    pool.submit(
                        compile_kernel,
                        linear_kernel(bf16, inner, width, tile, activation, NO_LIMITS, top_k, True),
                        arch,
                    )
                    pool.submit(
                        compile_kernel, linear_kernel(bf16, width, inner, tile, "none", NO_LIMITS, top_k, False), arch
                    )
            x = torch.randn(tokens, width, device="cuda").to(bf16)
            indices = torch.rand(tokens, count, device="cuda").topk(top_k, -1).indices.int()
            weights = torch.rand(tokens, top_k, device="cuda")
            read = len(indices.unique()) * (rows + inner) * width * 2
            for tile in tried:
                given = [(x, indices, weights, up, down, activation, NO_LIMITS, tile) for up, down in layers]
                runs = [partial(experts, *arguments) for arguments in given]
                time = timer.captured(runs)()
                floor = read / bandwidth * 1e-6
                mark = "*" if tile == usual else " "
                print(
                    f"{model} {tokens:5} tokens {mark} {time:8.1f} us, {floor / time:4.0%} of floor  {tile}", flush=True
                )


if __name__ == "__main__":
    main()
