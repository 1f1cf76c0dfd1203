"""Weights that stay quantised on the GPU: the values of the CPU, in CUDA graphs, too, and engines that compute with them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from trtllm_replayssm.builders.keeping import is_multiplied
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.network.packed import NVFP4_GROUP, PackedWeight, Packing, dense
from trtllm_replayssm.network.scaled import scaled_linear, suited
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session


def packed(weight: torch.Tensor, packing: Packing) -> PackedWeight:
    """Random values of a weight's shape, device and size."""
    *lead, k = weight.shape
    draw, size = torch.Generator().manual_seed(k), float(weight.float().std())
    if packing.quant_algo == "NVFP4":
        values = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=draw)
        scales = torch.rand(*lead, k // NVFP4_GROUP, generator=draw).to(torch.float8_e4m3fn)
        parts = (values, scales, size * torch.rand(lead, generator=draw))
    else:
        values = torch.randn(*lead, k, generator=draw).to(torch.float8_e4m3fn)
        parts = (values, size * torch.rand(*lead, -(-k // (packing.group_size or k)), generator=draw))
    return PackedWeight(packing, tuple(part.to(weight.device) for part in parts), weight.dtype)


@pytest.mark.parametrize("packing", [Packing("FP8"), Packing("FP8", 48), Packing("FP8", 64), Packing("NVFP4", 16)])
@pytest.mark.parametrize("shape", [(96, 128), (4, 32, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_the_cpu(packing, shape, dtype):
    weight = packed(torch.ones(shape, dtype=dtype).normal_(), packing)
    there = replace(weight, parts=tuple(part.cuda() for part in weight.parts))
    expected = dense(weight)
    assert torch.equal(dense(there).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = dense(there)
    values.zero_()
    graph.replay()
    assert torch.equal(values.cpu(), expected)


@pytest.mark.parametrize("packing", [Packing("FP8"), Packing("NVFP4", 16)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engine_computes_with_the_values(tmp_path, packing, dtype):
    """As with the same values stored densely, for every kind of layer."""
    options = BuildOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=256)
    decoder = synthetic.decoder()
    synthetic.write_engine(tmp_path / "engine", decoder, options, dtype=dtype, replay=ReplayConfig(window=8))
    engine, parameters = Engine.load(tmp_path / "engine", device="cuda", plugin_impl="cuda"), decoder.parameters()
    kept = {
        name: packed(weight, packing)
        if is_multiplied(name, parameters[name]) and weight.shape[-1] % 16 == 0
        else weight
        for name, weight in engine.weights.items()
    }
    assert sum(isinstance(weight, PackedWeight) for weight in kept.values()) > 20
    ids = torch.randint(0, decoder.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    values = {name: dense(weight) for name, weight in kept.items()}
    mine, twin = (logits(replace(engine, weights=weights), ids) for weights in (kept, values))
    assert twin.std() > 0.1
    torch.testing.assert_close(mine, twin, rtol=0, atol=1e-3 * float(twin.std()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gates_with_a_weight_of_their_own(tmp_path, dtype):
    """b and a lie elsewhere than q, k, v and z, and are the same numbers but for the order of sums."""
    options, whole = BuildOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=256), synthetic.decoder()
    layers = tuple(replace(x, gates_apart=True) if isinstance(x, GatedDelta) else x for x in whole.layers)
    engines = []
    for name, decoder in (("whole", whole), ("apart", replace(whole, layers=layers))):
        synthetic.write_engine(tmp_path / name, decoder, options, dtype=dtype, replay=ReplayConfig(window=8))
        engines.append(Engine.load(tmp_path / name, device="cuda", plugin_impl="cuda"))
    weights = dict(engines[0].weights)
    gates = engines[1].weights.keys() - weights.keys()
    assert gates
    for name in gates:
        fused, rows = name.replace("gates", "in_proj"), len(engines[1].weights[name])
        weights[fused], weights[name] = weights[fused][:-rows], weights[fused][-rows:]
    ids = torch.randint(0, whole.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, got = logits(engines[0], ids), logits(replace(engines[1], weights=weights), ids)
    assert expected.std() > 0.1
    within = {"bfloat16": 5e-2, "float32": 1e-3}[dtype]
    torch.testing.assert_close(got, expected, rtol=0, atol=within * float(expected.std()))


@pytest.mark.parametrize("tokens", [1, 4, 37])
def test_product_of_rounded_tokens_is_that_of_the_cpu(tokens):
    """Sums are taken in another order, and rounded to bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8 products")
    weight = packed(torch.empty(256, 512, dtype=torch.bfloat16).normal_(), Packing("FP8"))
    there = replace(weight, parts=tuple(part.cuda() for part in weight.parts))
    x = torch.randn(2, tokens, 512, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
    assert suited(there.packing, there.shape, there.dtype)
    expected, got = scaled_linear(x, weight).float(), scaled_linear(x.cuda(), there).float().cpu()
    assert (got - expected).norm() / expected.norm() < 2**-8


def logits(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Of a prefill and of decode steps."""
    session, found = Session(engine), []
    for start, stop in ((0, 24), *((i, i + 1) for i in range(24, 40))):
        mode = RowMode.DECODE if stop - start == 1 else RowMode.ABSORB
        found.append(session.step(ids[:, start:stop], 0, modes=[mode] * 2).float().cpu())
        session.commit(0, [stop - start] * 2)
    return torch.cat(found, 1)
