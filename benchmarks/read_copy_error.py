"""Error of outputs that are read from a narrow copy of the state: seconds on a GPU, a minute on a CPU.

One request of a layer with slow decays is decoded token by token at window 16. Printed are relative norms against the same
recurrence in float64: of the outputs over the first and the last quarter of the request, and of the state behind it, which
does not know of the copy.

    python -m benchmarks.read_copy_error [--tokens 4096] [--step 1] [--device cuda]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.implementation import implementation
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReadDtype, ReplayConfig
from trtllm_replayssm.runtime.devices import resolve_device
from trtllm_replayssm.tuning.drift import WEAK_DECAY, Request, weak_weights
from trtllm_replayssm.tuning.layer import Attributes, Dtypes, signature

READ_DTYPES: tuple[ReadDtype, ...] = ("same", "fp8", "nvfp4")
DTYPES = Dtypes(*(torch.float32,) * 3)


def layers(replay: ReplayConfig) -> tuple[Attributes, ...]:
    """Two heads each, as large as in released models."""
    window, rows = replay.window, replay.ring_rows
    return (
        Mamba2Attributes(2, 64, 128, 1, window, rows),
        GatedDeltaAttributes(1, 2, 128, 128, window, rows),
        KdaAttributes(2, 128, 128, window, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="error of outputs that are read from a narrow copy of the state")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the request")
    parser.add_argument("--step", type=int, default=1, help="tokens of a step, all kept")
    parser.add_argument("--device", help="cuda, with the kernels, or cpu; by default the GPU where there is one")
    options = parser.parse_args()
    if not 1 <= options.step <= MAX_VERIFY_TOKENS or options.tokens < 4 * options.step:
        parser.error(f"--step must be 1 to {MAX_VERIFY_TOKENS}, and --tokens four steps or more")
    torch.set_num_threads(1)
    try:
        device = resolve_device(options.device)
    except UserError as error:
        parser.error(f"{error.message}; {error.hint}")
    replay = ReplayConfig(max_draft_len=options.step - 1)
    print(f"{options.tokens} tokens in steps of {options.step}, window {replay.window}, log decay {WEAK_DECAY} a token")
    print(f"{'layer':<12} {'read':<6} {'first quarter':>13} {'last quarter':>13} {'state':>9}")
    plugins = implementation("auto", device)
    for layer in layers(replay):
        request = Request(layer, weak_weights(layer), torch.float32, options.tokens, options.step, 1, device)
        for read_dtype in READ_DTYPES:
            drift = request.drift(replace(layer, read_dtype=read_dtype), DTYPES, plugins)
            errors = f"{drift.first:13.1e} {drift.last:13.1e} {drift.state:9.1e}"
            print(f"{signature(layer).kind:<12} {read_dtype:<6} {errors}", flush=True)


if __name__ == "__main__":
    main()
