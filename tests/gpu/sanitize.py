"""One small case of every kernel, for compute-sanitizer; sanitize.sh runs it under each tool."""

from __future__ import annotations

from itertools import product

import torch
from test_delta_rule import FORMATS
from test_delta_rule import Case as DeltaCase
from test_delta_rule import run_case as run_delta
from test_mamba2 import BF16, FP32, NANO
from test_mamba2 import run_case as run_mamba2
from test_materialise import Case as MaterialiseCase
from test_shared import test_advance_equals_reference, test_causal_conv


def main() -> None:
    for dtypes in ((BF16, FP32), (BF16, BF16), (FP32, FP32)):
        for tokens, draft in ((1, 0), (4, 3), (40, 0)):
            run_mamba2(NANO, tokens, 16, dtypes, rows=6, draft=draft)
    for layer in ("gated_delta", "kda"):
        for state in (FP32, BF16):
            for tokens, draft in ((1, 0), (4, 3), (40, 0)):
                run_delta(DeltaCase(layer, tokens, draft=draft, state=state, rows=6))
    for layer, read in product(("gated_delta", "kda"), FORMATS):
        for tokens, draft in ((1, 0), (4, 3), (20, 0)):
            run_delta(DeltaCase(layer, tokens, draft=draft, rows=6, read=read))
    # The ordinary recurrences.
    for state in (FP32, BF16):
        run_mamba2(NANO, 1, 1, (BF16, state), rows=6)
        for layer in ("gated_delta", "kda"):
            run_delta(DeltaCase(layer, 1, window=1, state=state, rows=6))
    for layer in ("mamba2", "gated_delta", "kda", "gated_delta-nvfp4", "kda-fp8"):
        MaterialiseCase(layer, FP32, 1001, 15).compare(1013)
    test_advance_equals_reference(4, 16)
    for tokens in (1, 5, 40):
        test_causal_conv(BF16, tokens, 4, 96, True)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
