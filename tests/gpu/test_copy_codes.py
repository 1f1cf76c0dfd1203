"""Codes and scales that folds write, for checkpoints whose quotients lie on the boundaries of rounding and beside them."""

from __future__ import annotations

import harness
import pytest
import torch
from torch import Tensor

from trtllm_replayssm.plugins.device import gated_delta as device_gated_delta
from trtllm_replayssm.plugins.device import kda as device_kda
from trtllm_replayssm.plugins.device import mamba2 as device_mamba2
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import E2M1_MAGNITUDES, E2M1_MAX, E4M3_MAX, FORMATS
from trtllm_replayssm.plugins.reference.read_copy import quantise

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = {
    "mamba2": lambda read: Mamba2Attributes(16, 64, 128, 2, 16, 16, read_dtype=read),
    "gated_delta": lambda read: GatedDeltaAttributes(2, 16, 128, 128, 16, 16, read_dtype=read),
    "gated_delta narrow": lambda read: GatedDeltaAttributes(2, 16, 64, 96, 16, 16, read_dtype=read),
    "kda": lambda read: KdaAttributes(16, 128, 128, 16, 16, read_dtype=read),
}
E4M3_MAGNITUDES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
#: Scales of nvfp4 heads: powers of two, others, the sizes where the kernels' fast way to a block's scale ends, zero.
HEAD_SCALES = (1.0, 0.37, 3e-5, 1e20, 2.0**-100, 2.0**-100 * (1 - 2**-24), 2.0**100, 2.0**101, 1e-36, 2.0**-133, 0.0)


def middles(magnitudes: Tensor) -> Tensor:
    return (magnitudes[1:] + magnitudes[:-1]) / 2


def beside(x: Tensor, generator: torch.Generator, most: int = 2) -> Tensor:
    """float32 ``x``, moved by up to ``most`` units in the last place."""
    steps = torch.randint(-most, most + 1, x.shape, generator=generator, dtype=torch.int32)
    return (x.contiguous().view(torch.int32) + steps * (x > 1e-40)).view(torch.float32)


def pick(values: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return values[torch.randint(len(values), shape, generator=generator)]


def edges(read_dtype: str, heads: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Checkpoints ``[heads, rows, columns]``.

    A block's largest magnitude asks for a scale, the middle of two, or what is beside it; the others lie at the middle of two
    codes, or beside it.
    """
    layout = FORMATS[read_dtype]
    blocks = (heads, rows * columns // layout.block)
    if read_dtype == "nvfp4":
        head = torch.tensor([HEAD_SCALES[i % len(HEAD_SCALES)] for i in range(heads)])[:, None]
        wanted = torch.cat((E4M3_MAGNITUDES, middles(E4M3_MAGNITUDES)))
        largest = beside(pick(wanted, blocks, generator) * head * E2M1_MAX, generator, 4)
        largest = largest.minimum(head * (E4M3_MAX * E2M1_MAX))
        largest[:, :1] = head * (E4M3_MAX * E2M1_MAX)
        scale = (largest / E2M1_MAX / head).nan_to_num(0).to(torch.float8_e4m3fn).float() * head
        codes = middles(torch.tensor(E2M1_MAGNITUDES))
    else:
        scale = torch.ldexp(torch.ones(blocks), torch.randint(-120, 110, blocks, generator=generator))
        largest = beside(scale * pick(torch.tensor([E4M3_MAX, E4M3_MAX / 2, 300.0]), blocks, generator), generator)
        codes = middles(E4M3_MAGNITUDES)
    x = beside(pick(codes, (*blocks, layout.block), generator) * scale[..., None], generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x.minimum(largest[..., None]))
    x.scatter_(2, torch.randint(layout.block, (*blocks, 1), generator=generator), largest[..., None])
    # The definition does not say what zero becomes where a scale has no finite inverse.
    tiny = (largest[:, :1, None] < 2.0**-100) & (largest[:, :1, None] > 0)
    x = torch.where(tiny, x.clamp(min=2.0**-133), x)
    signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
    return (x * signs).view(heads, rows, columns)


def fold(layer: str, read_dtype: str, state: torch.dtype, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The checkpoint before a flush whose entries change nothing, and the pools after it."""
    attributes = LAYERS[layer](read_dtype)
    generator = torch.Generator().manual_seed(seed)
    described = attributes.pools(BF16, state, BF16)
    plan = [harness.RowPlan(0, 105, 100, 105, 1)]
    # Entries that neither decay nor add anything.
    pools = harness.poisoned_pools(
        described,
        plan,
        1,
        lambda name, shape: (
            torch.randn(shape, generator=generator) if name in ("ring_k", "ring_b") else torch.zeros(shape)
        ),
    )
    pools["state"][0] = edges(read_dtype, *described["state"].shape, generator).to(state)
    for name in filter(harness.is_copy, pools):
        pools[name].zero_()
    before, moved, step = pools["state"].clone(), harness.to_device(pools), harness.step_tensor(plan).cuda()
    heads = described["state"].shape[0]
    zeros = torch.zeros(heads, device="cuda")

    def tokens(width: int) -> Tensor:
        return torch.randn(1, 1, width, generator=generator).to(BF16).cuda()

    if isinstance(attributes, Mamba2Attributes):
        width = heads * attributes.head_dim + 2 * attributes.n_groups * attributes.state_size
        device_mamba2.mamba2(attributes, tokens(width), tokens(heads), zeros, zeros, zeros, step, moved)
    elif isinstance(attributes, GatedDeltaAttributes):
        width = 2 * attributes.num_key_heads * attributes.key_dim + heads * attributes.value_dim
        device_gated_delta.gated_delta(
            attributes, tokens(width), tokens(heads), tokens(heads), zeros, zeros, step, moved
        )
    else:
        gates = heads * attributes.key_dim
        width = 2 * gates + heads * attributes.value_dim
        bias = torch.zeros(gates, device="cuda")
        device_kda.kda(attributes, tokens(width), tokens(gates), tokens(heads), zeros, bias, step, moved)
    torch.cuda.synchronize()
    return before, {name: pool.cpu() for name, pool in moved.items()}


@pytest.mark.parametrize("read_dtype", FORMATS)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_boundaries_of_rounding(layer, state, read_dtype):
    for seed in range(2):
        before, after = fold(layer, read_dtype, state, seed)
        assert torch.equal(after["state"], before)
        for name, expected in quantise(after["state"], read_dtype).items():
            differ = (after[name].view(torch.uint8) != expected.view(torch.uint8)).flatten(1).sum(1)
            assert not differ.any(), f"{name}: {differ.tolist()} bytes of each slot differ"
