"""Tensor-parallel cuts: the ranks' shards of every kind of parameter put the original together again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.parallel import Parameter, Segment, column, divide, row
from trtllm_replayssm.errors import UserError

HIDDEN = 16
LAYERS = [
    Mamba2(8, 4, 4, 4, 4, 1e-5, proj_bias=True),
    GatedDelta(4, 8, 4, 6, 4, 1e-6),
    Kda(4, 8, 4, 1e-6, -5.0),
    Kda(8, 4, 4, 1e-6, None, 4),
    Attention(8, 2, 4, 0.5, bias=True, output_gate=True, qk_norm_epsilon=1e-6),
    Attention(8, 1, 4, 0.5),
    Mla(4, 8, 4, 4, 8, 1e-6, q_rank=8, gate="head"),
    Mla(8, 8, 4, 4, 8, 1e-6, gate="element"),
    Mlp(24, "swiglu", bias=True),
    Mlp(24, "relu2"),
    Moe(3, 2, 12, "swiglu", "sigmoid", shared=Mlp(8, "swiglu"), shared_gate=True),
    Moe(3, 2, 12, "relu2", "sigmoid", latent_size=8),
]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements all differ, so that no cut can be mistaken for another."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def reassembled(parameter: Parameter, shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor from the ranks' shards, segment by segment; copies of shared units must agree.

    Written without Segment.cut: unit u of a segment lies with the ranks whose share of the units contains it.
    """
    if parameter.axis is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0]
    tp_size, axis, whole = len(shards), parameter.axis, []
    starts = [0] * tp_size
    for segment in parameter.segments:
        per_rank = max(segment.units // tp_size, 1)
        copies = max(tp_size // segment.units, 1)
        length = segment.size // segment.units * per_rank
        parts = [shard.narrow(axis, starts[rank], length) for rank, shard in enumerate(shards)]
        starts = [start + length for start in starts]
        for rank in range(0, tp_size, copies):
            assert all(torch.equal(part, parts[rank]) for part in parts[rank : rank + copies])
            whole.append(parts[rank])
    assert starts == [shard.shape[axis] for shard in shards], "a shard holds more than its segments"
    return torch.cat(whole, axis)


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[Parameter, int]:
    """A parameter of 1 to 3 axes with 1 to 6 segments, some with fewer replicated units than ranks, and a tp_size."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    segments = []
    for _ in range(draw(st.integers(1, 6))):
        divisors = [n for n in range(1, tp_size) if tp_size % n == 0]
        replicate = bool(divisors) and draw(st.booleans())
        units = draw(st.sampled_from(divisors)) if replicate else tp_size * draw(st.integers(1, 3))
        segments.append(Segment(units * draw(st.integers(1, 4)), units, replicate))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = sum(segment.size for segment in segments)
    return Parameter(tuple(shape), axis, tuple(segments)), tp_size


@given(cut_parameters())
def test_shards_of_any_segments_put_the_original_together(case: tuple[Parameter, int]) -> None:
    parameter, tp_size = case
    whole = numbered(parameter.shape)
    shards = [parameter.shard(whole, rank, tp_size) for rank in range(tp_size)]
    assert {tuple(shard.shape) for shard in shards} == {parameter.local_shape(tp_size)}
    assert torch.equal(reassembled(parameter, shards), whole)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.kind)
def test_shards_of_every_layer_fit_its_divided_self(layer: Layer, tp_size: int) -> None:
    """A divided layer must ask for exactly the shapes that the converter writes for a rank."""
    local = layer.divided(tp_size).parameters(HIDDEN)
    for name, parameter in layer.parameters(HIDDEN).items():
        whole = numbered(parameter.shape)
        shards = [parameter.shard(whole, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {local[name].shape}, name
        assert torch.equal(reassembled(parameter, shards), whole), name


def test_key_value_heads_are_shared_by_neighbouring_ranks() -> None:
    kv = column(6, 1, 2, replicate=True)
    whole = numbered((6, 1))
    owners = [kv.shard(whole, rank, 4)[0].item() // 3 for rank in range(4)]
    assert owners == [0, 0, 1, 1]


def test_a_segment_without_units_is_whole_on_every_rank() -> None:
    parameter = Parameter((7,), 0, (Segment(4, 4), Segment(3, 0)))
    assert parameter.local_shape(2) == (5,)
    assert parameter.shard(numbered((7,)), 1, 2).tolist() == [2, 3, 4, 5, 6]


def test_row_parallel_products_add_up() -> None:
    parameter, x = row(3, 8, 4), torch.randn(2, 8)
    weight = torch.randn(3, 8)
    parts = [
        x[:, rank * 4 : rank * 4 + 4] @ parameter.shard(weight, rank, 2).T  # inputs are cut as the weight is
        for rank in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.T)


def test_segments_must_cover_the_axis() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        Parameter((5, 2), 0, (Segment(4, 2),))


@pytest.mark.parametrize(
    ("layer", "tp_size"),
    [
        (replace(LAYERS[0], n_groups=1, num_heads=6), 4),
        (replace(LAYERS[0], n_groups=2), 4),
        (replace(LAYERS[1], num_key_heads=3), 2),
        (replace(LAYERS[1], num_value_heads=6), 4),
        (LAYERS[2], 3),
        (LAYERS[4], 3),
        (Attention(8, 3, 4, 0.5), 2),
        (LAYERS[6], 8),
        (LAYERS[8], 5),
        (LAYERS[10], 5),
        (replace(LAYERS[10], shared=Mlp(9, "swiglu")), 2),
    ],
    ids=str,
)
def test_parts_that_must_stay_whole_are_not_torn(layer: Layer, tp_size: int) -> None:
    with pytest.raises(UserError, match=f"tp_size {tp_size}") as caught:
        layer.divided(tp_size)
    assert "choose a tp_size" in caught.value.hint


@pytest.mark.parametrize(
    ("count", "tp_size", "replicate", "expected"),
    [(8, 2, False, 4), (8, 8, False, 1), (2, 4, True, 1), (2, 8, True, 1), (4, 2, True, 2), (0, 2, False, 0)],
)
def test_divide(count: int, tp_size: int, replicate: bool, expected: int) -> None:
    assert divide("heads", count, tp_size, replicate) == expected


@pytest.mark.parametrize(("count", "tp_size", "replicate"), [(2, 4, False), (3, 2, True), (2, 3, True), (6, 4, True)])
def test_divide_refuses(count: int, tp_size: int, replicate: bool) -> None:
    with pytest.raises(UserError, match=f"{count} heads cannot be divided over tp_size {tp_size}"):
        divide("heads", count, tp_size, replicate)
