"""Every family, from the Hugging Face folder to the TensorRT network: it equals transformers, and TensorRT builds it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import REPLAY, Emission, Run
from hf_models import MODELS, build, random_ids, reference_logits
from hf_spelling import write_hub
from test_recording import record
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.network.tensorrt.describe import describe_network, describe_tensors
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins
from trtllm_replayssm.plugins.cursors import STEP_WORDS, RowMode

ROWS, PROMPT, VERIFIED = 2, 21, 12
SIZES = StepSizes(max_batch_size=4, verify_tokens=REPLAY.verify_tokens, prefill_tokens=64)


@cache
def family(name: str) -> tuple[HybridDecoder, dict[str, Tensor], Tensor, Tensor]:
    """Decoder, weights, token ids and the logits of transformers."""
    # With these ids no token stands so near to a tie between experts that rounding decides.
    model, ids = build(name), random_ids(ROWS, PROMPT + VERIFIED, seed=2)
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        convert(write_hub(model, Path(folder) / "hf"), checkpoint, warn=lambda message: None)
        decoder, weights = CheckpointConfig.read(checkpoint).rank_decoder(), load_rank(checkpoint, 0)
        # The files are mapped, and about to be deleted.
        weights = {name: weight.clone() for name, weight in weights.items()}
    return decoder, weights, ids, reference_logits(model, ids)


@pytest.mark.parametrize("name", MODELS)
def test_network_equals_transformers(name: str) -> None:
    """A prefill, then verify steps of which two tokens are kept."""
    decoder, weights, ids, logits = family(name)
    run = Run(Emission.of(decoder, weights=weights), ROWS)
    _, got = run.compare(ids[:, :PROMPT], RowMode.ABSORB, PROMPT)
    tolerance = 1e-4 * max(1.0, float(logits.std()))
    torch.testing.assert_close(got, logits[:, :PROMPT], atol=tolerance, rtol=0)
    for start in range(PROMPT, PROMPT + VERIFIED, 2):
        drafts = torch.cat((ids[:, start : start + 2], ids[:, :2]), 1)
        _, got = run.compare(drafts, RowMode.DECODE, 2)
        torch.testing.assert_close(got[:, :2], logits[:, start : start + 2], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_tensorrt_builds_the_network(name: str) -> None:
    """In bfloat16, with all profiles. Its tensors are the expected ones.

    Of layers that differ in nothing but their weights' values one is built: the builder takes its time over each.
    """
    decoder, weights, _, _ = family(name)
    cast = {n: weights[n] if p.float32 else weights[n].bfloat16() for n, p in decoder.parameters().items()}
    emission = Emission.of(decoder, torch.bfloat16, weights=cast)
    assert emission.step.tensors() == expected_tensors(emission)
    different = replace(decoder, layers=tuple(dict.fromkeys(decoder.layers)))
    assert len(Emission.of(different, torch.bfloat16).plan(SIZES)) > 0


@pytest.mark.parametrize("name", MODELS)
def test_network_is_the_same_without_tensorrt(name: str) -> None:
    """What ``build --dry_run`` shows where no TensorRT is installed."""
    decoder, weights, _, _ = family(name)
    genuine, recorded = Emission.of(decoder, weights=weights).step, record(decoder, weights, CutPlugins())
    assert describe_network(recorded) == describe_network(genuine)
    assert describe_tensors(recorded) == describe_tensors(genuine)


def expected_tensors(emission: Emission) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    """Inputs and outputs that a session and the plugin layers count on, from the decoder alone."""
    activation = emission.options.activation
    expected: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {
        "input_ids": ("in", torch.int32, (-1, -1)),
        "logit_positions": ("in", torch.int32, (-1, -1)),
        "step": ("in", torch.int32, (-1, STEP_WORDS)),
        "logits": ("out", torch.float32, (-1, -1, emission.decoder.vocab_size)),
    }
    for name, pool in emission.decoder.pools(emission.options).items():
        slot = pool.shape if pool.kind == "kv" else (pool.slot_bytes // pool.dtype.itemsize,)
        expected[name] = ("in", pool.dtype, (-1, *slot))
        expected[f"{name}_out"] = ("out", pool.dtype, (-1, *slot))
    for name, layer in emission.decoder.named_parts():
        for tensor, (direction, width) in CUTS.get(layer.kind, lambda layer: {})(layer).items():
            expected[f"cut/{name}/{tensor}"] = (direction, activation, (-1, -1, width))
        indexer = getattr(layer, "indexer", None)
        for tensor, direction in (("x", "out"), ("y", "in")) if indexer else ():
            shape = (-1, -1, indexer.ring_channels)
            expected[f"cut/{name}.indexer/causal_conv/{tensor}"] = (direction, activation, shape)
    return expected


def mamba2_cuts(layer: Mamba2) -> dict[str, tuple[str, int]]:
    cuts = {"x": ("out", layer.conv_channels), "y": ("in", layer.conv_channels)}
    return {f"causal_conv/{n}": c for n, c in cuts.items()} | {
        "mamba2/dt": ("out", layer.num_heads),
        "mamba2/y": ("in", layer.inner_size),
    }


def gated_delta_cuts(layer: GatedDelta) -> dict[str, tuple[str, int]]:
    channels = sum(layer.sizes)
    return {
        "causal_conv/x": ("out", channels),
        "causal_conv/y": ("in", channels),
        "gated_delta/a": ("out", layer.num_value_heads),
        "gated_delta/b": ("out", layer.num_value_heads),
        "gated_delta/o": ("in", layer.sizes[2]),
    }


def kda_cuts(layer: Kda) -> dict[str, tuple[str, int]]:
    return {
        "causal_conv/x": ("out", 3 * layer.channels),
        "causal_conv/y": ("in", 3 * layer.channels),
        "kda/f": ("out", layer.channels),
        "kda/b": ("out", layer.num_heads),
        "kda/o": ("in", layer.channels),
    }


def ngram_cuts(layer: NgramEmbedding) -> dict[str, tuple[str, int]]:
    return {"causal_conv/x": ("out", layer.channels), "causal_conv/y": ("in", layer.channels)}


#: Tensors at which a network is cut, by layer kind.
CUTS = {"mamba2": mamba2_cuts, "gated_delta": gated_delta_cuts, "kda": kda_cuts, "ngram": ngram_cuts}
