"""8-bit checkpoints: codes and scales, what a fold writes, what a step sees, and who may have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from division import DivisionOfGpus
from synthetic import decoder, write_checkpoint, write_engine

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.inspection import inspect_model
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.implementation import reference, without_quantised_state
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.quantised_state import LARGEST
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.materialise import materialise
from trtllm_replayssm.plugins.reference.quantised_state import dequantise, quantise
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.subject import read_subject
from trtllm_replayssm.tuning.drift import Request, weak_weights
from trtllm_replayssm.tuning.layer import Dtypes, signature, step_info

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LAYER = Mamba2Attributes(4, 16, 32, 2, 8, 12)
BOTH = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])


def every_code(dtype: torch.dtype) -> torch.Tensor:
    codes = torch.arange(-127, 128, dtype=torch.int8)
    values = codes if dtype == INT8 else torch.arange(256).to(torch.uint8).view(FP8)
    return values.float()[values.float().isfinite()].unique()


@BOTH
def test_codes_are_the_nearest_of_all_and_the_largest_is_exact(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None]
    codes, scale = quantise(x, dtype)
    values = dequantise(codes, scale).double()
    known, scaled = every_code(dtype).double(), x.double() / scale.double()[..., None]
    nearest = (scaled[..., None] - known).abs().amin(-1)
    assert ((scaled - codes.double()).abs() <= nearest * (1 + 1e-6) + 1e-6).all()
    assert codes.dtype == dtype and (codes.float().abs().amax(-1) == LARGEST[dtype]).all()
    largest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(values.gather(-1, largest), x.double().gather(-1, largest), rtol=1e-6, atol=0)


@BOTH
def test_scales_are_quotients_on_a_gpu_too(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    with DivisionOfGpus():
        codes, scale = quantise(x, dtype)
    assert torch.equal(scale, x.abs().amax(-1) / torch.tensor(LARGEST[dtype]))
    assert torch.equal(codes.float(), quantise(x, dtype)[0].float())


@BOTH
def test_rows_of_zeros_and_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 3, 16)
    x[0, 0, 1, 3], x[0, 0, 2, 5] = float("nan"), float("inf")
    x[0, 0, 1, 4] = 2.0
    values = dequantise(*quantise(x, dtype))[0, 0]
    assert (values[0] == 0).all() and not values[1].isfinite().any() and not values[2].isfinite().any()


@BOTH
def test_rows_next_to_the_least_float32_keep_their_signs(dtype: torch.dtype) -> None:
    """Their scales are subnormal, up to half again too small for the largest code."""
    x = torch.arange(-1000.0, 1001)[:, None] * 2.0**-149 * torch.tensor([1.0, 0.5])
    codes, scale = quantise(x[None, None], dtype)
    values = dequantise(codes, scale)[0, 0]
    assert (values * x.sign() >= 0).all() and (values.abs() <= 1.5 * x.abs()).all()
    assert (codes.float().abs() <= LARGEST[dtype]).all()


def run(pools: dict[str, torch.Tensor], folded: int, history: int, mode: RowMode) -> torch.Tensor:
    """One verify step of 4 tokens over what the pools hold."""
    generator = torch.Generator().manual_seed(folded + history)
    plan = step_info(LAYER.window, [history], 4, 1, folded=folded, mode=mode)
    xbc, dt = (torch.randn(1, 4, width, generator=generator) for width in signature(LAYER).inputs)
    return reference().mamba2(LAYER, xbc, dt, *weak_weights(LAYER), plan, pools)


def filled(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pools = {name: p.allocate(2) for name, p in LAYER.pools(torch.float32, dtype, torch.float32).items()}
    for name in ("ring_x", "ring_b"):
        pools[name].normal_(generator=generator)
    pools["ring_dt"].uniform_(0, 0.2, generator=generator)
    state = torch.randn(2, 4, 16, 32, generator=generator)
    codes, pools["state_scale"][:] = quantise(state, dtype)
    pools["state"].view(torch.int8)[:] = codes.view(torch.int8)
    return pools


@BOTH
@pytest.mark.parametrize("mode", [RowMode.DECODE, RowMode.FLUSH, RowMode.ABSORB])
def test_a_step_is_that_of_a_float32_state_with_these_values(dtype: torch.dtype, mode: RowMode) -> None:
    """Outputs see the unrounded state; what is folded is quantised once; the other slot stays as it is."""
    pools = filled(dtype)
    plain = {name: pool.clone() for name, pool in pools.items() if name != "state_scale"}
    plain["state"] = dequantise(pools["state"], pools["state_scale"])
    before = {name: pool.clone() for name, pool in pools.items()}
    wanted, got = (run(p, 100, 4, mode) for p in (plain, pools))
    assert torch.equal(got, wanted)
    if mode == RowMode.DECODE:
        assert all(torch.equal(pools[name].float(), before[name].float()) for name in ("state", "state_scale"))
        return
    codes, scale = quantise(plain["state"][:1], dtype)
    assert torch.equal(pools["state"][:1].float(), codes.float()) and torch.equal(pools["state_scale"][:1], scale)
    assert torch.equal(pools["state"][1].float(), before["state"][1].float())


@BOTH
def test_a_prefix_is_quantised_where_it_is_written(dtype: torch.dtype) -> None:
    pools = filled(dtype)
    plain = {name: pool.clone() for name, pool in pools.items() if name != "state_scale"}
    plain["state"] = dequantise(pools["state"], pools["state_scale"])
    A_log, _, D = weak_weights(LAYER)
    for one in (plain, pools):
        materialise(Mamba2Recurrence(A_log, D), one, 0, 1, folded=100, prefix_len=104)
    codes, scale = quantise(plain["state"][1:], dtype)
    assert torch.equal(pools["state"][1:].float(), codes.float()) and torch.equal(pools["state_scale"][1:], scale)


@BOTH
def test_an_empty_prefix_is_the_checkpoint_bit_for_bit(dtype: torch.dtype) -> None:
    """Quantised again, scales would differ in their last bit."""
    pools = filled(dtype)
    A_log, _, D = weak_weights(LAYER)
    materialise(Mamba2Recurrence(A_log, D), pools, 0, 1, folded=100, prefix_len=100)
    for name in ("state", "state_scale"):
        assert torch.equal(pools[name][1].contiguous().view(torch.uint8), pools[name][0].contiguous().view(torch.uint8))


def test_longer_windows_lose_less() -> None:
    """Every fold rounds: four times fewer folds, a smaller error; fp8 has three bits of fraction where int8 has six."""
    errors: dict[Any, float] = {}
    for dtype in (INT8, FP8):
        for window in (4, 16):
            attributes = Mamba2Attributes(4, 16, 32, 2, window, window)
            request = Request(attributes, weak_weights(attributes), torch.float32, 256, 1, 1, torch.device("cpu"))
            drift = request.drift(attributes, Dtypes(torch.float32, dtype, torch.float32), reference())
            errors[dtype, window] = drift.last
    assert errors[INT8, 16] < errors[INT8, 4] < errors[FP8, 4] and errors[FP8, 16] < errors[FP8, 4]
    assert 1e-3 < errors[INT8, 16] < errors[FP8, 16] < 0.2


# ---- options ---------------------------------------------------------------------------------------------------------

MAMBA2 = Mamba2(num_heads=4, head_dim=16, state_size=32, n_groups=2, conv_kernel=4, norm_epsilon=1e-5)
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_kernel=4, norm_epsilon=1e-6)

LAYERS_BY_NAME = {"mamba2": MAMBA2, "gated_delta": DELTA}


def options(**changes: Any) -> StateOptions:
    return StateOptions(ReplayConfig(**changes), torch.bfloat16, max_seq_len=1)


@pytest.mark.parametrize(("name", "dtype"), [("int8", INT8), ("fp8", FP8)])
def test_a_layer_has_codes_and_scales(name: str, dtype: torch.dtype) -> None:
    pools = MAMBA2.pools(options(state_dtype=name))
    assert pools["state"].dtype == dtype and pools["state_scale"].shape == (4, 16)
    assert pools["state"].kind == pools["state_scale"].kind == "state"
    assert "state_scale" not in MAMBA2.pools(options(state_dtype="float16"))


def test_delta_rule_layers_are_forced() -> None:
    with pytest.raises(UserError, match="feeds its rounding back into the updates of gated_delta layers"):
        DELTA.pools(options(state_dtype="int8"))
    forced = DELTA.pools(options(state_dtype="int8", force_quantised_state=True))
    assert forced["state"].dtype == INT8 and forced["state_scale"].shape == (4, 16)


def test_rounding_at_random_is_for_16_bits_and_mamba2() -> None:
    replay = ReplayConfig(state_dtype="float16", state_rounding="stochastic")
    assert MAMBA2.attributes(replay).stochastic_rounding and not MAMBA2.attributes(ReplayConfig()).stochastic_rounding
    with pytest.raises(UserError, match="is for Mamba-2 layers"):
        DELTA.pools(StateOptions(replay, torch.bfloat16, 1))
    with pytest.raises(UserError, match="does not go with state_dtype float32"):
        ReplayConfig(state_rounding="stochastic")
    with pytest.raises(UserError, match="does not go with state_read_dtype fp8"):
        ReplayConfig(state_dtype="int8", state_read_dtype="fp8")


def test_kernels_without_quantised_states_refuse_them() -> None:
    attributes = GatedDeltaAttributes(2, 4, 16, 16, 8, 8)
    pools = {name: p.allocate(1) for name, p in attributes.pools(torch.bfloat16, INT8, torch.bfloat16).items()}
    with pytest.raises(EngineError, match="CUDA kernels of gated_delta layers have no quantised states"):
        without_quantised_state("gated_delta", reference().gated_delta)(attributes, pools)


# ---- engines ---------------------------------------------------------------------------------------------------------


def texts(folder: Path, prompts: int, cache: int = 0) -> list[list[int]]:
    """What an engine says to a prompt that is asked several times."""
    llm = LLM(folder, device="cpu", prefix_cache_bytes=cache)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate([list(range(2, 40))] * prompts, params)]


@pytest.mark.parametrize(
    "options",
    [{"state_dtype": "int8"}, {"state_dtype": "fp8"}, {"state_dtype": "float16", "state_rounding": "stochastic"}],
    ids=str,
)
def test_texts_of_engines_do_not_depend_on_neighbours_slots_and_snapshots(tmp_path: Path, options: Any) -> None:
    """Three requests in two slots, with their common prompt taken from snapshots, say what one says alone."""
    build = BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=32, **options)
    folder = write_engine(tmp_path / "engine", decoder((MAMBA2, Mlp(96, "relu2"), MAMBA2)), build)
    assert EngineConfig.read(folder).replay.state_dtype == options["state_dtype"]
    (alone,) = texts(folder, 1)
    assert len(alone) == 30
    assert texts(folder, 3) == texts(folder, 3, cache=1 << 24) == [alone] * 3


def test_inspect_counts_codes_and_scales(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine", decoder((MAMBA2,)), BuildOptions(state_dtype="int8", max_seq_len=64))
    report = inspect_model(read_subject(folder))
    assert report.total("state_bytes") == 4 * 16 * 32 + 4 * 4 * 16


def test_builds_that_cannot_have_such_a_state_say_so_before_they_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba, delta = (write_checkpoint(tmp_path / name, decoder((layer,))) for name, layer in LAYERS_BY_NAME.items())
    for source, arguments, message in (
        (delta, ("--state_dtype", "int8", "--engine_flavour", "embedded"), "feeds its rounding back"),
        (mamba, ("--state_dtype", "fp8", "--engine_flavour", "tensorrt"), "TensorRT engines have no fp8 states"),
    ):
        command = ["build", "--checkpoint_dir", str(source), "--output_dir", str(tmp_path / "engine")]
        assert main([*command, *arguments]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "engine").exists()
    command = [
        "build",
        "--checkpoint_dir",
        str(delta),
        "--output_dir",
        str(tmp_path / "engine"),
        "--state_dtype",
        "int8",
    ]
    assert main([*command, "--force_quantised_state", "--engine_flavour", "embedded"]) == 0
