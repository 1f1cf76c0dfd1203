"""One small case of every kernel, for compute-sanitizer; sanitize.sh runs it under each tool, whose name is the argument.

Racecheck loses its way where warps have roles, and so barriers of their own: it reports hazards of a program that has none
(roles.cu). Of the delta rule's kernels, prefills and the gated delta rule's steps with 16-bit inputs are like that. They are
left out under it; steps with float32 activations are not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from test_delta_rule import FORMATS
from test_delta_rule import Case as DeltaCase
from test_delta_rule import run_case as run_delta
from test_dense import (
    test_cache_update_of_blocks,
    test_cache_update_writes_valid_tokens_and_nothing_else,
    test_decode_attention,
    test_experts,
    test_gates,
    test_rms_norm,
    test_rope,
    test_route,
    test_row_linear,
)
from test_mamba2 import BF16, FP32, NANO
from test_mamba2 import run_case as run_mamba2
from test_materialise import Case as MaterialiseCase
from test_quantised_state import FP8, INT8, test_a_prefix_in_another_slot, test_steps
from test_shared import test_advance_equals_reference, test_causal_conv

from trtllm_replayssm.plugins.device import norms
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS


def check(case: Callable[..., Any], *arguments: object, **options: object) -> None:
    """Runs a case whose call is printed first, so that a failure, or what a tool reports, can be told to be of it."""
    values = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
    print(f"{case.__module__}.{case.__name__}({', '.join(values)})", flush=True)
    case(*arguments, **options)
    torch.cuda.synchronize()


def materialise(layer: str) -> None:
    MaterialiseCase(layer, FP32, 1001, 15).compare(1013)


def has_roles(case: DeltaCase) -> bool:
    return case.tokens > MAX_VERIFY_TOKENS or (case.layer == "gated_delta" and case.activation.itemsize == 2)


def delta_rule(roles: bool) -> None:
    cases = [
        DeltaCase(layer, tokens, draft=draft, state=state, rows=6, activation=activation)
        for layer in ("gated_delta", "kda")
        for activation, state in ((BF16, FP32), (BF16, BF16), (FP32, FP32))
        for tokens, draft in ((1, 0), (4, 3), (40, 0))
    ]
    cases += [
        DeltaCase(layer, tokens, draft=draft, rows=6, read=read)
        for layer, read in product(("gated_delta", "kda"), FORMATS)
        for tokens, draft in ((1, 0), (4, 3), (20, 0))
    ]
    for case in cases:
        if roles or not has_roles(case):
            check(run_delta, case)


def recurrences() -> None:
    for dtypes in ((BF16, FP32), (BF16, BF16), (FP32, FP32)):
        for tokens, draft in ((1, 0), (4, 3), (40, 0)):
            check(run_mamba2, NANO, tokens, 16, dtypes, rows=6, draft=draft)
    for read in FORMATS:
        for tokens, draft in ((1, 0), (4, 3), (20, 0)):
            check(run_mamba2, NANO, tokens, 16, (BF16, FP32), rows=6, draft=draft, read_dtype=read)
    for state in (INT8, FP8):
        for tokens in (1, 4, 40):
            check(test_steps, "nano", tokens, BF16, state)
        check(test_a_prefix_in_another_slot, 16, state)
    # The ordinary recurrences.
    for state in (FP32, BF16):
        check(run_mamba2, NANO, 1, 1, (BF16, state), rows=6)
        for layer in ("gated_delta", "kda"):
            check(run_delta, DeltaCase(layer, 1, window=1, state=state, rows=6))
    for layer in ("mamba2", "gated_delta", "kda", "gated_delta-nvfp4", "kda-fp8"):
        check(materialise, layer)
    check(test_advance_equals_reference, 4, 16)
    for tokens in (1, 5, 40):
        check(test_causal_conv, BF16, tokens, 4, 96, True)


def dense() -> None:
    for mode in norms.MODES:
        check(test_rms_norm, BF16, 130, 2, mode)
    check(test_gates, BF16, 7)
    check(test_row_linear, 3, 1000, 7, True)
    for dtype in (BF16, FP32):
        for rows, positions in ((5, 150), (2, 700)):
            check(test_decode_attention, dtype, 4, "many", rows, positions)
        check(test_cache_update_writes_valid_tokens_and_nothing_else, dtype, 3, 5)
    check(test_cache_update_of_blocks)
    check(test_rope, True, 64, 64)
    check(test_route, "sigmoid", 8, 3, 4, 2)
    for tokens, count, top_k in ((1, 128, 6), (300, 16, 2)):
        check(test_experts, tokens, count, top_k, "swiglu", (None, None), BF16)


def main(tool: str = "") -> None:
    delta_rule(roles=tool != "racecheck")
    recurrences()
    dense()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
