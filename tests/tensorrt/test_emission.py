"""The emitted network computes what the torch backend computes: every layer kind, every fallback, every kind of step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import Emission, Run, bound_pool, make_weights, prediction_model, rtx, without
from interpreter import Interpreter

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.side_by_side import SideBySide
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.tensorrt import experts
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS, RowMode, Step
from trtllm_replayssm.replay import ReplayConfig

SHARED = Mlp(24, "swiglu")
LAYERS: dict[str, Layer] = {
    "mamba2": Mamba2(8, 8, 16, 2, 4, 1e-5),
    "mamba2 with projection biases, without convolution bias": Mamba2(4, 8, 16, 1, 4, 1e-5, False, True, 0.01, 1.0),
    "mamba2 with scales, without norm": Mamba2(8, 8, 16, 2, 4, None, scales=(1.35, 0.8, 1.2, 0.7, 1.4)),
    "gated delta": GatedDelta(2, 4, 16, 8, 4, 1e-6),
    "gated delta with negative eigenvalues and a sigmoid gate": GatedDelta(2, 2, 8, 16, 4, 1e-6, 2.0, "sigmoid"),
    "kda": Kda(4, 8, 4, 1e-6),
    "kda, bounded, with low-rank gates and float32 taps": Kda(4, 8, 4, 1e-6, -5.0, 6, True),
    "kda with a full output gate and a float32 norm": Kda(
        4, 8, 4, 1e-6, -5.0, 6, full_output_gate=True, norm_float32=True
    ),
    "attention": Attention(4, 2, 8, 8**-0.5),
    "attention with everything": Attention(4, 2, 16, 0.3, Rope(8, 1e4), 1e-6, True, True, True),
    "attention with interleaved rope": Attention(4, 1, 8, 0.3, Rope(8, 1e4, True)),
    "attention in a window": Attention(4, 2, 8, 0.3, Rope(8, 1e4), window=5),
    "attention with joint norms": Attention(4, 2, 8, 0.3, None, 1e-3, qk_norm_joint=True),
    "mla": Mla(4, 32, 8, 8, 8, 1e-6),
    "mla with everything, gated by head": Mla(4, 32, 8, 8, 16, 1e-6, 12, 1e-5, Rope(8, 1e4, True), "head"),
    "mla gated by element": Mla(2, 32, 8, 8, 8, 1e-6, rope=Rope(8, 1e4), gate="element"),
    "relu2": Mlp(48, "relu2", bias=True),
    "swiglu": Mlp(48, "swiglu"),
    "swiglu with a limit": Mlp(48, "swiglu", limit=0.1),
    "swiglu behind a norm, with scales": Mlp(
        48, "swiglu", gate_scale=0.6, norm_after=True, input_scale=1.3, output_scale=0.7
    ),
    "mamba2 beside attention": SideBySide(
        (Mamba2(4, 8, 16, 1, 4, None, input_scale=1.25, output_scale=0.6), Attention(4, 2, 8, 0.3, output_scale=0.7))
    ),
    "moe by softmax, gated shared expert": Moe(8, 3, 12, "swiglu", "softmax", shared=SHARED, shared_gate=True),
    "moe by sigmoid, in groups, limited": Moe(8, 3, 12, "swiglu", "sigmoid", True, 2.5, 4, 2, 0.05, SHARED),
    "moe in latent space": Moe(8, 4, 12, "relu2", "sigmoid", False, 1.5, latent_size=16),
    "moe in latent space, normed, situ": Moe(
        8,
        4,
        12,
        "situ",
        "sigmoid",
        limit=(0.4, 0.3),
        latent_size=16,
        latent_epsilon=1e-3,
        shared=Mlp(24, "situ", (0.4, None)),
    ),
}
DECODER = HybridDecoder(50, 32, 1e-5, tuple(LAYERS.values()))


def one(layer: Layer) -> HybridDecoder:
    return HybridDecoder(50, 32, 1e-5, (layer,))


def tokens(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, count), generator=torch.Generator().manual_seed(seed))


def check(run: Run, live: list[int] | None = None, upto: list[int] | None = None, **step) -> None:
    """Equal logits of valid tokens, and equal state, up to rounding that grows with the depth."""
    expected, got = run.compare(**step)
    atol = 1e-5 * max(2, len(run.emission.decoder.layers))
    for row in range(len(expected)) if live is None else live:
        end = None if upto is None else upto[row]
        torch.testing.assert_close(got[row, :end], expected[row, :end], atol=atol, rtol=1e-4)
    for name, pool in run.mine.items():
        if "cache" not in name:
            torch.testing.assert_close(run.theirs[name], pool, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def drive(emission: Emission) -> None:
    """A request's life in two rows: a prefill in two chunks, decoding, and verifying with rejected drafts."""
    run = Run(emission, 2)
    check(run, ids=tokens(2, 9, 1), mode=RowMode.ABSORB, accepted=9)
    check(run, ids=tokens(2, 5, 2), mode=RowMode.ABSORB, accepted=5)
    for seed, (count, accepted) in enumerate(((1, 1), (4, 2), (4, 1), (1, 1), (4, 4), (4, 3), (1, 1))):
        check(run, ids=tokens(2, count, 10 + seed), mode=RowMode.DECODE, accepted=accepted)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_equals_torch(kind: str) -> None:
    drive(Emission.of(one(LAYERS[kind])))


def test_whole_decoder_equals_torch() -> None:
    drive(Emission.of(replace(DECODER, norm_zero_centred=True, tie_embeddings=True)))
    drive(Emission.of(replace(DECODER, residual_float32=True, embedding_scale=0.7, logits_scale=1.3)))


def test_float16_follows_torch() -> None:
    """Casts stand where they must: the network is as far from the float32 result as torch is in float16."""
    decoder = HybridDecoder(50, 32, 1e-5, tuple(layer for layer in LAYERS.values() if layer.kind != "moe"))
    weights = make_weights(decoder, torch.float16)
    ids, logits = tokens(2, 20, 1), {}
    wide = {name: weight.float() for name, weight in weights.items()}
    exact, _ = Run(Emission.of(decoder, weights=wide), 2).compare(ids, RowMode.ABSORB, 20)
    logits["torch"], logits["network"] = Run(Emission.of(decoder, torch.float16, weights=weights), 2).compare(
        ids, RowMode.ABSORB, 20
    )
    errors = {name: float((value - exact).norm() / exact.norm()) for name, value in logits.items()}
    assert 1e-4 < errors["torch"] < 2e-2
    assert errors["network"] < 1.5 * errors["torch"]


@pytest.mark.parametrize("missing", ["kv_cache_update", "attention_lengths"])
@pytest.mark.parametrize("kind", ["attention with everything", "mla with everything, gated by head"])
def test_earlier_versions_equal_torch(kind: str, missing: str) -> None:
    drive(Emission.of(one(LAYERS[kind]), tensorrt=without(rtx(), **{missing: False})))


def native_experts(emission: Emission) -> int:
    network = emission.step.network
    return [network.get_layer(i).type.name for i in range(network.num_layers)].count("MOE")


def test_native_experts_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which TensorRT is not asked for, to see more than 16 bits show."""
    monkeypatch.setattr(experts, "NATIVE_DTYPES", (torch.float32,))
    emission = Emission.of(one(LAYERS["moe by softmax, gated shared expert"]), capability=(10, 0))
    assert native_experts(emission) == 1
    drive(emission)


@pytest.mark.parametrize("layer", ["moe by sigmoid, in groups, limited", "moe in latent space"])
def test_native_experts_are_not_used_where_they_would_compute_something_else(layer: str) -> None:
    assert native_experts(Emission.of(one(LAYERS[layer]), torch.bfloat16, capability=(10, 0))) == 0


@pytest.mark.parametrize(
    ("dtype", "capability", "count"),
    [
        (torch.bfloat16, (10, 3), 1),
        (torch.float16, (10, 0), 1),
        (torch.float32, (10, 3), 0),
        (torch.bfloat16, (9, 0), 0),
        (torch.bfloat16, (12, 0), 0),
        (torch.bfloat16, None, 0),
    ],
)
def test_native_experts_are_used_where_there_are_kernels_for_them(
    dtype: torch.dtype, capability: tuple[int, int] | None, count: int
) -> None:
    layer = one(LAYERS["moe by softmax, gated shared expert"])
    assert native_experts(Emission.of(layer, dtype, capability=capability)) == count


def test_experts_of_more_tokens_than_a_block() -> None:
    """More pairs for one expert than a block has rows, and experts that nobody chose."""
    moe = Moe(16, 2, 12, "swiglu", "softmax")
    run = Run(Emission.of(one(moe)), 4)
    ids = tokens(4, 100, 3)
    ids[:, ::2] = 7
    check(run, ids=ids, mode=RowMode.ABSORB, accepted=100)


def test_padding_rows_and_tokens_change_nothing() -> None:
    """Rows that sit a step out keep their state and KV cache; padding tokens do not reach valid ones."""
    run = Run(Emission.of(DECODER), 3)
    check(run, ids=tokens(3, 20, 1), mode=RowMode.ABSORB, accepted=20)
    before = {name: pool[1].clone() for name, pool in run.theirs.items()}
    lengths = [4, 1, 2]
    check(run, [0, 2], lengths, ids=tokens(3, 4, 2), mode=RowMode.DECODE, accepted=1, slots=[0, -1, 2], lengths=lengths)
    for name, pool in run.theirs.items():
        now = pool[1, :, :20] if "cache" in name else pool[1]
        was = before[name][:, :20] if "cache" in name else before[name]
        assert torch.equal(now, was), name
    check(run, ids=tokens(3, 1, 3), mode=RowMode.DECODE, accepted=1)


def test_cursors_inside_the_network() -> None:
    """As where TensorRT has plugin layers: the rows' plan is made by the network, from cursors that it also returns."""
    emission = Emission.of(DECODER, whole=True)
    tensors = emission.step.tensors()
    assert tensors["cursors"] == ("in", torch.int32, (-1, CURSOR_WORDS))
    assert tensors["cursors_out"] == ("out", torch.int32, (-1, CURSOR_WORDS))
    for name in ("slot_ids", "query_lens", "modes"):
        assert tensors[name] == ("in", torch.int32, (-1,))
    drive(emission)


def test_prediction_head_equals_torch() -> None:
    """MTP: from the decoder's hidden states and the next tokens to logits and the head's own hidden states."""
    layers = (LAYERS["attention with everything"], LAYERS["moe by softmax, gated shared expert"])
    decoder = HybridDecoder(50, 32, 1e-5, (), mtp=Mtp(layers))
    emission = Emission.of(decoder, model=prediction_model)
    pools = decoder.mtp_pools(emission.options)
    mine, theirs = ({name: bound_pool(pool, 2) for name, pool in pools.items()} for _ in range(2))
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    ids, step = tokens(2, 9, 1), torch.zeros(2, STEP_WORDS, dtype=torch.int32)
    step[:, Step.SLOT], step[:, Step.QUERY_LEN] = torch.arange(2), 9
    net = TorchNetwork(emission.weights, mine, step, torch.float32, 9)
    expected = decoder.predicted(net, ids, hidden, emission.options.replay)
    last = torch.full((2, 1), 8, dtype=torch.int32)
    feeds = {"input_ids": ids.int(), "logit_positions": last, "step": step, "previous_hidden": hidden} | theirs
    got = Interpreter(emission.tensorrt, emission.step.network).run(feeds)
    torch.testing.assert_close(got["hidden_states"], expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(got["logits"], decoder.logits(net, expected, last_only=True), atol=5e-5, rtol=1e-4)
    assert len(emission.plan(StepSizes(4, 4, 64))) > 0


def test_quantised_states_are_refused() -> None:
    """Also by trtllm-build, which takes a checkpoint as it is."""
    with pytest.raises(EngineError, match="mamba2 layers of TensorRT's networks have no int8 or fp8 states"):
        Emission.of(one(LAYERS["mamba2"]), replay=ReplayConfig(state_dtype="int8"))
