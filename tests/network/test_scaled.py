"""FP8 products with activations rounded token by token, against float64; and who may ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch

from trtllm_replayssm.builders.keeping import is_multiplied
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.packed import PackedWeight, Packing, dense
from trtllm_replayssm.network.scaled import check_products, scaled_linear, suited
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tensorrt.record import PlanRecord


def fp8(*shape: int, dtype: torch.dtype = torch.bfloat16, group: int | None = None) -> PackedWeight:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(*shape[:-1], -(-shape[-1] // (group or shape[-1])), generator=generator)
    return PackedWeight(Packing("FP8", group), (values, scales), dtype)


def test_product_of_rounded_tokens() -> None:
    """Tokens of any size: each has its own scale, and one of zeros stays zero."""
    weight, x = fp8(48, 64), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 2], x[1, 3] = 0, 1e4 * x[1, 2], 1e-4 * x[1, 3]
    x = x.to(torch.bfloat16)
    got = scaled_linear(x, weight).double()
    size = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    rounded = (x.double() / size).float().to(torch.float8_e4m3fn).double() * size
    values = weight.parts[0].double() * weight.parts[1].double()
    assert got.shape == (2, 5, 48)
    assert torch.equal(got[0, 0], torch.zeros(48, dtype=torch.float64))
    expected = rounded @ values.t()
    # Rounded once more, to bfloat16; a few values of x lie at ties, where float32 decides otherwise than float64.
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 2**-8
    exact = x.double() @ values.t()
    assert 0.005 < (got - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    "weight",
    [fp8(48, 64, group=16), fp8(2, 48, 64), fp8(40, 64), fp8(48, 72), fp8(48, 64, dtype=torch.float32)],
    ids=["groups", "experts", "rows", "columns", "float32"],
)
def test_weights_that_are_multiplied_by_value(weight: PackedWeight) -> None:
    assert not suited(weight.packing, weight.shape, weight.dtype)
    fits = fp8(48, 64)
    assert suited(fits.packing, fits.shape, fits.dtype)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Engine]:
    """An engine in bfloat16 whose matrices are FP8, with or without products in FP8."""
    folder = tmp_path_factory.mktemp("scaled") / "engine"
    options = BuildOptions(max_batch_size=2, max_seq_len=32, max_num_tokens=64)
    synthetic.write_engine(folder, synthetic.decoder(), options, dtype="bfloat16")

    def load(scaled: bool) -> Engine:
        plain = Engine.load(folder, device="cpu")
        parameters = plain.config.checkpoint.decoder.parameters()
        weights = {n: kept(w) if is_multiplied(n, parameters[n]) else w for n, w in plain.weights.items()}
        return replace(plain, weights=weights, scaled_matmul=scaled)

    return load


def kept(weight: torch.Tensor) -> PackedWeight:
    scales = weight.float().abs().amax(-1, keepdim=True) / 448
    return PackedWeight(Packing("FP8"), ((weight / scales).to(torch.float8_e4m3fn), scales), weight.dtype)


def test_engine_errs_by_what_rounding_does(engine: Callable[[bool], Engine]) -> None:
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    scaled, exact, again = (
        Session(engine(how)).step(ids, modes=[RowMode.ABSORB] * 2).float() for how in (True, False, False)
    )
    assert torch.equal(exact, again)
    assert 1e-3 < (scaled - exact).norm() / exact.norm() < 0.5
    linear = next(weight for name, weight in engine(True).weights.items() if name.endswith("mlp.up.weight"))
    assert suited(linear.packing, linear.shape, linear.dtype)
    assert dense(linear).dtype == torch.bfloat16


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(EngineError, match=r"compute capability 8\.6 has no FP8 products, which begin with 8\.9"):
        check_products(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_products(torch.device("cuda", 0))


def test_engines_of_tensorrt_multiply_as_they_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = synthetic.write_engine(tmp_path / "engine", options=BuildOptions(max_seq_len=64))
    config = replace(EngineConfig.read(folder), tensorrt=PlanRecord("11.0", "9.0", 64))
    monkeypatch.setattr(EngineConfig, "read", lambda folder: config)
    with pytest.raises(EngineError, match=r"is run by TensorRT, which multiplies as it was built"):
        Engine.load(folder, device="cpu", scaled_matmul=True)


def test_asked_for_in_vain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence from the command where no weight is FP8."""
    folder = synthetic.write_engine(tmp_path / "engine", options=BuildOptions(max_seq_len=64), text=True)
    line = ["generate", "--engine_dir", str(folder), "--input_text", "a", "--device", "cpu", "--scaled_matmul"]
    assert main(line) != 0
    said = capsys.readouterr().err
    assert "has no FP8 matrices with a scale a row" in said and "hint: convert FP8 weights by tensor or channel" in said
    assert main(["bench", "--synthetic_config", str(folder / "config.json"), "--scaled_matmul"]) != 0
    assert "random ones are not quantised" in capsys.readouterr().err
