"""Weights that stay quantised as networks: they compute what their dequantised twins do, and TensorRT builds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

import emission as emission_module
from emission import REPLAY, Emission, Run, make_weights
from hf_models import random_ids
from quantised_recipes import folders
from test_quantised_kept import KEPT, packed_fp8
from test_recording import record

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.packed import PackedWeight, Packing, dense, without_input_scales
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.network.tensorrt.describe import describe_network, layer_kind
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.tensorrt.dry_run import dry_run
from trtllm_replayssm.runtime.tensorrt.plans import unpacked_weights
from trtllm_replayssm.runtime.tensorrt.refit import fits

SIZES = StepSizes(max_batch_size=4, verify_tokens=REPLAY.verify_tokens, prefill_tokens=64)
#: A GPU that TensorRT-RTX builds for and that has numbers of 4 bits, one with 8 bits only, and one with neither.
FP4, FP8, NEITHER = (12, 0), (8, 9), (8, 6)
#: Each format, dense and with experts.
SAMPLES = ("nemotron super", "qwen3.5 moe fp8 in small blocks", "falcon nvfp4", "kimi fp8", "qwen3.5 compressed")
sample = pytest.mark.parametrize("name", SAMPLES)


def checkpoint(name: str, tmp_path: Path, dtype: str) -> tuple[CheckpointConfig, dict[str, Any]]:
    packed, _ = folders(KEPT[name], tmp_path)
    config = convert(packed, tmp_path / "kept", dtype=dtype, warn=lambda message: None, quantization="keep")
    return config, without_input_scales(load_rank(tmp_path / "kept", 0))


def emission(config: CheckpointConfig, weights: dict[str, Any], capability: tuple[int, int]) -> Emission:
    return Emission.of(config.rank_decoder(), config.torch_dtype, weights=weights, capability=capability)


def kinds(made: Emission) -> Counter[str]:
    network = made.step.network
    return Counter(layer_kind(made.step.emitter, network.get_layer(i)) for i in range(network.num_layers))


@sample
def test_network_equals_the_dequantised_twin(name: str, tmp_path: Path) -> None:
    """Bit for bit with the same network over constants, and within rounding of the torch backend."""
    config, weights = checkpoint(name, tmp_path, "float32")
    ids, made = random_ids(2, 21, seed=2), emission(config, weights, FP4)
    expected, got = Run(made, 2).compare(ids, RowMode.ABSORB, 21)
    torch.testing.assert_close(got, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)
    values = {key: dense(weight) for key, weight in weights.items()}
    _, twin = Run(emission(config, values, FP4), 2).compare(ids, RowMode.ABSORB, 21)
    if any(packing.divides for packing in config.packings.values()):
        # Reciprocals of scales are rounded.
        torch.testing.assert_close(got, twin, rtol=0, atol=1e-5 * float(twin.std()))
    else:
        assert torch.equal(got, twin)
    each = {"FP8": 1, "NVFP4": 2}
    # The tied or unused part of an MTP head is in another plan.
    used = [p for n, p in config.packings.items() if not n.startswith("mtp.")]
    assert kinds(made)["DEQUANTIZE"] == sum(each[packing.quant_algo] for packing in used)


@sample
def test_tensorrt_builds_the_network(name: str, tmp_path: Path) -> None:
    """In bfloat16, with all profiles, for a GPU that has the numbers."""
    config, weights = checkpoint(name, tmp_path, "bfloat16")
    assert len(emission(config, weights, FP4).plan(SIZES, FP4)) > 0


def test_plans_hold_weights_as_they_are_stored() -> None:
    """Not dequantised while the plan is built: FP8 takes half, NVFP4 less than a third of what bfloat16 does."""
    layer = Mlp(4096, "swiglu")
    decoder = HybridDecoder(64, 512, 1e-5, (layer,))
    plain = make_weights(decoder, torch.bfloat16)
    weights = {
        None: plain,
        "FP8": {n: packed_fp8(w) if ".mlp." in n else w for n, w in plain.items()},
        "NVFP4": {n: packed_nvfp4(w) if ".mlp." in n else w for n, w in plain.items()},
    }
    size = {
        kind: len(Emission.of(decoder, torch.bfloat16, weights=w, capability=FP4).plan(SIZES, FP4))
        for kind, w in weights.items()
    }
    values = sum(p.elements for n, p in decoder.parameters().items() if ".mlp." in n)
    assert size[None] > 2 * values
    # What is no weight is larger by the code that dequantises.
    rest = size[None] - 2 * values
    assert size["FP8"] < values + 2 * rest + 2**20
    assert size["NVFP4"] < 0.6 * values + 2 * rest + 2**20


def packed_nvfp4(weight: torch.Tensor) -> PackedWeight:
    n, k = weight.shape
    generator = torch.Generator().manual_seed(n)
    values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(n, k // 16, generator=generator).to(torch.float8_e4m3fn)
    return PackedWeight(Packing("NVFP4", 16), (values, scales, torch.full((n,), 0.1)), weight.dtype)


def test_numbers_that_the_gpu_lacks_become_constants(tmp_path: Path) -> None:
    """FP8 stays where there is no FP4, and what TensorRT would refuse is built."""
    config, weights = checkpoint("nemotron super", tmp_path, "bfloat16")
    algorithms = Counter(p.quant_algo for n, p in config.packings.items() if not n.startswith("mtp."))
    hopper, ampere = (emission(config, weights, capability) for capability in (FP8, NEITHER))
    assert kinds(hopper)["DEQUANTIZE"] == algorithms["FP8"]
    assert kinds(ampere)["DEQUANTIZE"] == 0
    assert len(hopper.plan(SIZES, FP8)) > 0


def test_groups_that_do_not_divide_the_width_become_constants(tmp_path: Path) -> None:
    """Blocks of 40 columns of matrices 64 and 96 wide: TensorRT dequantises groups of one size only."""
    config, weights = checkpoint("qwen3.5 fp8", tmp_path, "bfloat16")
    parameters = config.decoder.parameters()
    uneven = [name for name in config.packings if parameters[name].shape[-1] % 40]
    assert uneven and uneven == unpacked_weights(config, FP4)
    even = [name for name in config.packings if name not in uneven and not name.startswith("mtp.")]
    made = emission(config, weights, FP4)
    assert kinds(made)["DEQUANTIZE"] == len(even)
    assert len(made.plan(SIZES, FP4)) > 0


@sample
def test_network_is_the_same_without_tensorrt(name: str, tmp_path: Path) -> None:
    """What ``build --dry_run`` shows: the bytes of the weights are those that the file has."""
    config, weights = checkpoint(name, tmp_path, "float32")
    decoder = config.rank_decoder()
    genuine, recorded = Emission.of(decoder, weights=weights).step, record(decoder, weights, CutPlugins())
    assert describe_network(recorded) == describe_network(genuine)


# ---- products of quantised numbers -----------------------------------------------------------------------------------


def rounded(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """By the formats' definitions: E4M3 numbers times the scale, or E2M1 numbers times E4M3 numbers times the scale."""
    scale = packing.input_scale
    if scale is None:
        return x
    if packing.quant_algo == "FP8":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    rows = x.reshape(-1, x.shape[-1])
    codes = q.e4m3_codes(rows.unflatten(1, (-1, 16)).abs().amax(2) / 6 / scale)
    scales = [[q.f32(q.E4M3[code] * q.f32(scale)) for code in row] for row in codes]
    return torch.tensor(q.e2m1_blocks(rows, scales, 16)[1]).view(x.shape)


class RoundedInputs(TorchNetwork):
    def _linear(self, x: Any, weight: Any, bias: Any) -> Any:
        return super()._linear(
            rounded(x, weight.packing) if isinstance(weight, PackedWeight) else x, dense(weight), bias
        )


@sample
def test_inputs_are_rounded_by_the_checkpoints_scales(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 by FP8 and NVFP4 by NVFP4, in every linear layer whose inputs have a scale, and nowhere else."""
    config, _ = checkpoint(name, tmp_path, "float32")
    weights = load_rank(tmp_path / "kept", 0)
    monkeypatch.setattr(emission_module, "TorchNetwork", RoundedInputs)
    ids, made = random_ids(1, 9, seed=2), emission(config, weights, FP4)
    expected, got = Run(made, 1).compare(ids, RowMode.ABSORB, 9)
    used = {n: p for n, p in config.packings.items() if not n.startswith("mtp.")}
    scaled = Counter(p.quant_algo for p in used.values() if p.input_scale is not None)
    assert kinds(made)["QUANTIZE"] == scaled["FP8"] and kinds(made)["DYNAMIC_QUANTIZE"] == scaled["NVFP4"]
    assert bool(scaled) == (name != "qwen3.5 moe fp8 in small blocks")
    assert all(p.input_scale is None for n, p in used.items() if ".experts." in n)
    # A last bit before a rounding is a step behind it, now and then.
    assert (got - expected).norm() < 2e-2 * expected.norm()
    if scaled:
        plain = Run(emission(config, without_input_scales(weights), FP4), 1)
        exact = plain.compare(ids, RowMode.ABSORB, 9)[1]
        assert 5 * (got - expected).norm() < (got - exact).norm()


@pytest.mark.parametrize(("capability", "kind"), [(FP4, "DYNAMIC_QUANTIZE"), (FP8, "QUANTIZE"), (NEITHER, "")])
def test_tensorrt_builds_products_that_the_gpu_has(capability: tuple[int, int], kind: str, tmp_path: Path) -> None:
    config, _ = checkpoint("nemotron nano 4b", tmp_path, "bfloat16")
    made = emission(config, load_rank(tmp_path / "kept", 0), capability)
    found = kinds(made)
    assert bool(kind) == bool(found["QUANTIZE"] + found["DYNAMIC_QUANTIZE"])
    if kind:
        assert found[kind] > 0 and (kind == "QUANTIZE") != bool(found["DYNAMIC_QUANTIZE"])
        assert len(made.plan(SIZES, capability)) > 0
    recorded = record(config.rank_decoder(), load_rank(tmp_path / "kept", 0), CutPlugins(), torch.bfloat16, capability)
    assert describe_network(recorded) == describe_network(made.step)


def test_build_rounds_inputs_when_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint("nemotron nano 4b", tmp_path, "bfloat16")
    build = ["build", "--checkpoint_dir", str(tmp_path / "kept"), "--output_dir", str(tmp_path / "engine"), "--dry_run"]
    assert main([*build, "--max_seq_len", "128"]) == 0
    assert "dynamic_quantize" not in capsys.readouterr().out
    assert main([*build, "--max_seq_len", "128", "--scaled_matmul"]) == 0
    assert "dynamic_quantize" in capsys.readouterr().out
    assert not (tmp_path / "engine").exists()


def test_a_checkpoint_without_scales_of_inputs_is_refused(tmp_path: Path) -> None:
    checkpoint("qwen3.5 moe fp8 in small blocks", tmp_path, "bfloat16")
    options = BuildOptions(max_seq_len=128, engine_flavour="tensorrt", scaled_matmul=True)
    with pytest.raises(EngineError, match="no linear weights with a scale of their inputs"):
        dry_run(tmp_path / "kept", options)


def test_other_scales_of_inputs_fit_plans_that_do_not_have_them(tmp_path: Path) -> None:
    """A refit takes the weights of a model that was calibrated anew, unless its plans hold the old scales."""
    config, _ = checkpoint("kimi fp8", tmp_path, "bfloat16")
    anew = {n: replace(p, input_scale=p.input_scale and 2 * p.input_scale) for n, p in config.packings.items()}
    other = replace(config, packings=anew)
    assert fits(other, config, scaled_matmul=False) and not fits(other, config, scaled_matmul=True)
    assert fits(config, config, scaled_matmul=True)
    assert not fits(replace(other, dtype="float16"), config, scaled_matmul=False)
