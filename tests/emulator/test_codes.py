"""What codes of read copies rest on, for all values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulator.launcher import Emulation, can_emulate, load_from, run
from trtllm_replayssm.plugins.compiler import sources
from trtllm_replayssm.plugins.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs a C++ compiler on Linux")


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_inverses_are_rounded_once_whatever_their_approximation(off: int) -> None:
    """PTX promises approximations with one unit in the last place of error at most."""
    texts = sources("copy_codes.cuh", {"codes.cu": Path(__file__).with_name("codes.cu").read_bytes()})
    kernel = Kernel("codes.cu", "wrong_inverses", 32, (("READ_BITS", 4),))
    steps, wrong = torch.tensor([off], dtype=torch.int32), torch.ones(32, dtype=torch.int32)
    launch = Launch(kernel, (1, 1, 1), ())
    run(load_from(kernel, "sm_90a", texts), launch, [steps.data_ptr()], [wrong.data_ptr()], Emulation(seed=0))
    assert wrong.sum() == 0
