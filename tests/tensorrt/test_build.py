"""What TensorRT's builder takes and refuses: released sizes, profiles, tensor parallelism, sizes that cannot be bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import Emission, make_weights, rtx

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.tensorrt.build import DECODE, PREFILL, VERIFY, StepSizes, add_profiles, build_plan
from trtllm_replayssm.network.tensorrt.describe import describe_network, describe_tensors
from trtllm_replayssm.network.tensorrt.options import PlanOptions

SMALL = StepSizes(max_batch_size=2, verify_tokens=1, prefill_tokens=16)
SIZES = StepSizes(max_batch_size=64, verify_tokens=4, prefill_tokens=2048)
#: 4093 + 3 drafts.
MAX_SEQ_LEN = 4093
#: One layer of each kind as released models have it, with the model's hidden size. Of 128, 256 and 512 experts 24 are kept:
#: they differ in nothing but their number, and the builder takes 20 s for 128.
RELEASED: dict[str, tuple[int, Layer]] = {
    "Nemotron 3 Nano 30B mixer": (2688, Mamba2(64, 64, 128, 8, 4, 1e-5)),
    "Nemotron Nano v2 9B mixer": (4480, Mamba2(128, 80, 128, 8, 4, 1e-5)),
    "Nemotron Nano v2 9B attention": (4480, Attention(40, 8, 128, 128**-0.5)),
    "Nemotron Nano v2 9B MLP": (4480, Mlp(15680, "relu2")),
    "Nemotron 3 Nano 30B experts": (2688, Moe(24, 6, 1856, "relu2", "sigmoid", True, 2.5, shared=Mlp(3712, "relu2"))),
    "Nemotron 3 Super experts": (
        4096,
        Moe(24, 22, 2688, "relu2", "sigmoid", True, 5.0, shared=Mlp(5376, "relu2"), latent_size=1024),
    ),
    "Qwen3.5 27B mixer": (5120, GatedDelta(16, 48, 128, 128, 4, 1e-6)),
    "Qwen3.5 27B attention": (5120, Attention(24, 4, 256, 1 / 16, Rope(64, 1e7), 1e-6, True, True)),
    "Qwen3.5 35B experts": (2048, Moe(24, 8, 512, "swiglu", "softmax", shared=Mlp(512, "swiglu"), shared_gate=True)),
    "Kimi-Linear mixer": (2304, Kda(32, 128, 4, 1e-5, None, 128)),
    "Kimi-Linear attention": (2304, Mla(32, 512, 128, 64, 128, 1e-6)),
    "Ling 3.0 flash mixer": (2560, Kda(32, 128, 4, 1e-6, -5.0, conv_float32=True)),
    "Ling 3.0 tiny attention": (1536, Mla(16, 512, 128, 64, 128, 1e-6, 256, 1e-6, Rope(64, 6e6, True), "head")),
    "Ling 3.0 flash experts": (
        2560,
        Moe(24, 8, 768, "swiglu", "sigmoid", True, 2.5, 8, 4, 4.0, Mlp(768, "swiglu", 7.0)),
    ),
}


def one(layer: Layer, hidden: int = 32) -> HybridDecoder:
    return HybridDecoder(256, hidden, 1e-5, (layer,))


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_build(name: str) -> None:
    hidden, layer = RELEASED[name]
    decoder = one(layer, hidden)
    # Zeros of calloc take no time and, until the builder reads them, no memory.
    weights = {
        n: torch.zeros(p.shape, dtype=torch.float32 if p.float32 else torch.bfloat16)
        for n, p in decoder.parameters().items()
    }
    emission = Emission.of(decoder, torch.bfloat16, weights=weights, max_seq_len=MAX_SEQ_LEN)
    assert len(emission.plan(SIZES)) > 0


def test_weights_are_not_copied() -> None:
    """Constants point at the memory that was handed in, until the builder reads it."""
    decoder = one(Mlp(48, "relu2"))
    weights = make_weights(decoder, torch.float32)
    network = Emission.of(decoder, weights=weights).step.network
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    name = "transformer.layers.0.mlp.up.weight"
    weights[name].fill_(3.0)
    trt = rtx().module
    found = 0
    for layer in layers:
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            found += tuple(layer.shape)[-2:] == (48, 32) and bool((layer.weights == 3.0).all())
    assert found == 1


def test_profiles() -> None:
    """Three in an engine with drafts, two in one without, which TensorRT takes."""
    emission, sizes = Emission.of(one(Attention(4, 2, 8, 0.3))), StepSizes(8, 4, 100, usual_prefill=60, step_tokens=17)
    config = PlanOptions((8, 9)).config(emission.tensorrt, emission.builder)
    add_profiles(emission.step.emitter, emission.builder, config, sizes)
    assert config.num_optimization_profiles == 3
    ranges = sizes.profiles()
    assert ranges[PREFILL] == {
        "rows": (1, 1, 1),
        "tokens": (1, 60, 100),
        "logits": (1, 1, 1),
        "step_tokens": (1, 17, 17),
    }
    assert ranges[DECODE] == {"rows": (1, 8, 8), "tokens": (1, 1, 1), "logits": (1, 1, 1), "step_tokens": (1, 1, 17)}
    assert ranges[VERIFY] == {"rows": (1, 8, 8), "tokens": (4, 4, 4), "logits": (1, 4, 4), "step_tokens": (1, 4, 17)}
    assert len(StepSizes(8, 1, 100).profiles()) == 2


def test_options_reach_the_builder() -> None:
    emission = Emission.of(one(Mlp(48, "relu2")))
    trt = emission.tensorrt.module
    plain = PlanOptions((8, 9)).config(emission.tensorrt, emission.builder)
    wanted = dict.fromkeys(("strip_plan", "weight_streaming", "weight_sparsity", "monitor_memory"), True)
    chosen = PlanOptions((12, 0), profiling_verbosity="detailed", **wanted)
    config = chosen.config(emission.tensorrt, emission.builder)
    for flag, set_by_default, set_now in (
        ("TF32", False, False),
        ("STRIP_PLAN", False, True),
        ("WEIGHT_STREAMING", False, True),
        ("SPARSE_WEIGHTS", False, True),
        ("MONITOR_MEMORY", False, True),
    ):
        assert plain.get_flag(getattr(trt.BuilderFlag, flag)) is set_by_default
        assert config.get_flag(getattr(trt.BuilderFlag, flag)) is set_now
    assert (plain.profiling_verbosity, config.profiling_verbosity) == (
        trt.ProfilingVerbosity.LAYER_NAMES_ONLY,
        trt.ProfilingVerbosity.DETAILED,
    )
    assert (plain.get_compute_capability(0), config.get_compute_capability(0)) == (
        trt.ComputeCapability.SM89,
        trt.ComputeCapability.SM120,
    )


def test_unknown_gpu_is_refused() -> None:
    emission = Emission.of(one(Mlp(48, "relu2")))
    with pytest.raises(EngineError, match="does not build for compute capability 90") as error:
        build_plan(emission.step, emission.builder, SMALL, PlanOptions((9, 0)))
    assert "89" in error.value.hint


def test_progress() -> None:
    """Every phase ends complete, and the outermost covers the build."""
    seen: dict[str, tuple[int, int]] = {}
    phases: list[str] = []

    def report(phase: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        assert done >= seen.get(phase, (0, 0))[0] or done == 0
        seen[phase] = (done, total)
        phases.append(phase)

    Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, report=report)
    assert all(done == total for done, total in seen.values())
    assert phases[0] == phases[-1]


def test_build_can_be_stopped() -> None:
    with pytest.raises(EngineError, match="could not build"):
        Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, report=lambda phase, done, total: done == 0)


def test_ctrl_c_stops_the_build() -> None:
    """TensorRT swallows what a monitor raises, and Python raises Ctrl-C in whatever it runs first."""

    def report(phase: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, report=report)


def test_plugins_may_declare_aliases_where_they_do() -> None:
    """TensorRT refuses to build them without its preview feature."""
    emission = Emission.of(one(Mlp(48, "relu2")))
    feature = emission.tensorrt.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03
    for wanted in (False, True):
        config = PlanOptions((8, 9), aliased_plugins=wanted).config(emission.tensorrt, emission.builder)
        assert config.get_preview_feature(feature) is wanted


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX")
def test_timing_cache(tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, output_timing_cache=cache)
    assert cache.stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == [cache.name]
    Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, input_timing_cache=cache)


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX")
def test_timing_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written: Is a directory"):
        Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, output_timing_cache=tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX")
def test_timing_cache_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    shared, link = tmp_path / "shared.cache", tmp_path / "timing.cache"
    shared.touch()
    link.symlink_to(shared)
    Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, output_timing_cache=link)
    assert link.is_symlink() and shared.stat().st_size > 0


def test_missing_timing_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        Emission.of(one(Mlp(48, "relu2"))).plan(SMALL, input_timing_cache=tmp_path / "none")


def test_step_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(EngineError, match="a step of 129 tokens does not fit into a KV cache of 128 positions"):
        Emission.of(one(Attention(4, 2, 8, 0.3))).plan(StepSizes(8, 4, 129))


def test_cache_that_cannot_be_bound_is_refused() -> None:
    """127 positions of one head of 8 float32 channels: slots would not lie on multiples of 256 bytes."""
    with pytest.raises(EngineError, match="which TensorRT cannot bind") as error:
        Emission.of(one(Attention(4, 1, 8, 0.3)), max_seq_len=124)
    assert "--max_seq_len" in error.value.hint


def test_refused_layer_is_named() -> None:
    """A weight of the wrong dtype: strongly typed networks do not mix them."""
    decoder = one(Mlp(48, "relu2"))
    emission = Emission.of(decoder)
    emitter = emission.step.emitter
    a = emitter.number(1.0, torch.float32, 3)
    b = emitter.number(1.0, torch.float16, 3)
    with pytest.raises(EngineError, match="could not build"):
        emitter.network.mark_output(emitter.binary("SUM", a, b))
        emission.plan(SMALL)


def test_description() -> None:
    """Every part of the model has a row; the weights are all there, the plugin layers too though they are cut out."""
    decoder = HybridDecoder(256, 32, 1e-5, (Mamba2(4, 8, 16, 2, 4, 1e-5), Mlp(48, "swiglu")))
    emission = Emission.of(decoder)
    rows = {row.scope: row for row in describe_network(emission.step)}
    mixer, mlp = rows["transformer.layers.0.mamba2"], rows["transformer.layers.1.mlp"]
    assert mixer.plugins == ["replayssm::causal_conv", "replayssm::mamba2"]
    assert mlp.layers["MATRIX_MULTIPLY"] == 2
    assert mlp.output == "float32 [?, ?, 32]"
    assert mlp.weight_bytes >= 4 * 3 * 48 * 32
    weights = sum(weight.nbytes for weight in emission.weights.values())
    assert weights <= sum(row.weight_bytes for row in rows.values()) < weights + 4096
    tensors = {name: (direction, text) for name, direction, text in describe_tensors(emission.step)}
    assert tensors["input_ids"] == ("in", "int32 [rows, tokens]")
    assert tensors["logits"] == ("out", "float32 [?, ?, 256]")
    assert tensors["transformer.layers.0.mamba2.state"] == ("in", "float32 [rows, 512]")


def test_what_all_layers_share_is_the_step_s() -> None:
    """Mask, positions and rotation are made once, and not counted for the attention layer that came first."""
    layer = Attention(4, 2, 8, 0.3, Rope(8, 1e4))
    rows = {row.scope: row for row in describe_network(Emission.of(HybridDecoder(256, 32, 1e-5, (layer, layer))).step)}
    first, second = rows["transformer.layers.0.attention"], rows["transformer.layers.1.attention"]
    assert first.layers == second.layers
    assert rows["step"].layers["FILL"] == 1
