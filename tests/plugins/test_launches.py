"""What launches ask of a GPU, at sizes that no test runs. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.device import attention, elementwise, experts
from trtllm_replayssm.plugins.launch import Kernel, Launch

KERNEL = Kernel("advance.cu", "advance", 32)
#: More than a grid's second axis has blocks for.
TOKENS = 70_000


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Records of what is launched, which is not."""
    records: list[Launch] = []
    for module in (attention, elementwise, experts):
        monkeypatch.setattr(module, "launch", lambda record, *_: records.append(record))
    return records


def test_prompts_may_be_longer_than_the_second_axis_of_a_grid(launches):
    x, angles = torch.empty(TOKENS, 8, device="meta"), torch.empty(2, TOKENS // 2, 4, device="meta")
    elementwise.relu2(x)
    elementwise.gated(x, x, True)
    experts.weighted_sum(x, torch.empty(TOKENS, 1, device="meta"))
    attention.rope(x.view(2, -1, 1, 8), angles, angles, False)
    assert [record.grid[0] for record in launches] == [TOKENS] * 4


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)])
def test_grids_that_no_gpu_takes_are_refused(grid):
    with pytest.raises(EngineError, match="the kernel advance needs") as error:
        Launch(KERNEL, grid)
    assert "--max_batch_size" in error.value.hint


def test_integers_that_would_wrap_are_refused():
    assert Launch(KERNEL, (1, 1, 1), (2**31 - 1,)).integers == (2**31 - 1,)
    with pytest.raises(EngineError, match="advance counts up to 2147483647, and is given 2147483648"):
        Launch(KERNEL, (1, 1, 1), (1, 2**31))


def test_caches_too_large_for_a_kernel_are_refused(launches):
    """Slots 2^31 elements apart: a kernel would read those of other requests."""
    cache = torch.empty_strided((2, 1, 4, 64), (2**31, 256, 64, 1), dtype=torch.bfloat16, device="meta")
    q, step = torch.empty(2, 1, 1, 64, dtype=torch.bfloat16, device="meta"), torch.empty(2, 8, device="meta")
    with pytest.raises(EngineError, match="decode_attention counts up to"):
        attention.decode_attention(attention.AttentionShape(1, 1, 64, 64, 0.125), q, cache, cache, step, 4)
    assert not launches
