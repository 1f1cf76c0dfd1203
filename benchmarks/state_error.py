"""Error of states of 16 and 8 bits, in minutes on a CPU.

One request of a layer with slow decays is decoded token by token. Printed are relative norms against the same recurrence in
float64: of the outputs over the first and the last quarter of the request, and of the state behind it.

    python -m benchmarks.state_error [--tokens 4096]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product

import torch

from benchmarks.read_copy_error import layers
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.plugins.implementation import reference
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import FLOAT_STATES, QUANTISED_STATES, ReplayConfig
from trtllm_replayssm.tuning.drift import WEAK_DECAY, Request, weak_weights
from trtllm_replayssm.tuning.layer import Dtypes, signature

WINDOWS = (4, 16)
STATES = [ReplayConfig(state_dtype=name) for name in FLOAT_STATES + QUANTISED_STATES]
AT_RANDOM = ReplayConfig(state_dtype="float16", state_rounding="stochastic")


def main() -> None:
    parser = argparse.ArgumentParser(description="error of states of 16 and 8 bits")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the request, 4 or more")
    options = parser.parse_args()
    if options.tokens < 4:
        parser.error("--tokens must be 4 or more")
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(f"{options.tokens} tokens one at a time, log decay {WEAK_DECAY} a token")
    print(f"{'layer':<12} {'state':<19} {'window':>6} {'first quarter':>13} {'last quarter':>13} {'state':>9}")
    for layer in layers(ReplayConfig()):
        request = Request(layer, weak_weights(layer), torch.float32, options.tokens, 1, 1, cpu)
        own = [AT_RANDOM] if isinstance(layer, Mamba2Attributes) else []
        for replay, window in product(STATES + own, WINDOWS):
            state = StateOptions(replay, torch.float32, max_seq_len=0).state_dtype
            attributes = replace(layer, window=window, ring_rows=window)
            if isinstance(attributes, Mamba2Attributes):
                attributes = replace(attributes, stochastic_rounding=replay in own)
            drift = request.drift(attributes, Dtypes(torch.float32, state, torch.float32), reference())
            name = f"{replay.state_dtype}{' at random' if replay in own else ''}"
            errors = f"{drift.first:13.1e} {drift.last:13.1e} {drift.state:9.1e}"
            print(f"{signature(layer).kind:<12} {name:<19} {window:>6} {errors}", flush=True)


if __name__ == "__main__":
    main()
