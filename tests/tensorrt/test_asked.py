"""Every member of every object of TensorRT that is asked for exists in the genuine bindings, of whichever version.

The networks are TensorRT-RTX's, whose classes are TensorRT's; they are made as the version of the bindings asks for. The file
runs with the bindings that are installed, and again with the oldest supported ones (test_oldest.py).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

import test_api
from emission import Emission, prediction_model, rtx
from lean_runtime import missing, tensorrt_bindings
from watching import Watch

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.network.tensorrt.build import StepSizes, add_profiles
from trtllm_replayssm.network.tensorrt.options import PlanOptions
from trtllm_replayssm.validation.catalogue import MODELS

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

#: A device on which the layer of experts exists.
CAPABILITY = (10, 0)
SIZES = StepSizes(max_batch_size=2, verify_tokens=4, prefill_tokens=16)


def genuine() -> TensorRT:
    return TensorRT.of(tensorrt_bindings(), "tensorrt")


@cache
def asked() -> frozenset[tuple[str, str]]:
    """By the networks of every family, a prediction head and two ranks, and by profiles and builder options.

    Raises AttributeError for what is not there.
    """
    watch, real = Watch(tensorrt_bindings()), rtx()
    features = genuine().features
    tensorrt = watch.tensorrt(real, features)
    for name, model in MODELS.items():
        decoder = find_family({"architectures": [model.model_class], **model.arguments}, {}).decoder()
        emission = Emission.of(decoder, torch.bfloat16, tensorrt, capability=CAPABILITY, whole=True)
        assert emission.step.network.num_layers > 10, name
        add_profiles(emission.step.emitter, emission.builder, emission.builder.create_builder_config(), SIZES)
    head = HybridDecoder(51, 32, 1e-5, (Mlp(24, "swiglu"),), mtp=Mtp((Attention(4, 2, 8, 0.3), Mlp(24, "relu2"))))
    Emission.of(head, tensorrt=tensorrt, model=prediction_model)
    if features.collective:
        part = {name: torch.zeros(p.local_shape(2)) for name, p in head.parameters(2).items()}
        Emission.of(head.divided(2), tensorrt=tensorrt, weights=part, tp_size=2)
    builder = tensorrt.module.Builder(tensorrt.module.Logger(tensorrt.module.Logger.ERROR))
    PlanOptions(strip_plan=True, weight_streaming=True).config(tensorrt, builder)
    return frozenset(watch.asked)


def test_members_exist() -> None:
    """And those of layers of many kinds were asked for, and what this version has was used."""
    features, found = genuine().features, asked()
    assert {
        ("IShuffleLayer", "first_transpose"),
        ("IGatherLayer", "num_elementwise_dims"),
        ("ISliceLayer", "axes"),
        ("ISoftMaxLayer", "axes"),
        ("IAttention", "decomposable"),
        ("ITensor", "set_dimension_name"),
        ("IOptimizationProfile", "set_shape"),
        ("IBuilderConfig", "profiling_verbosity"),
        ("ElementWiseOperation", "FLOOR_DIV"),
        ("BuilderFlag", "WEIGHT_STREAMING"),
    } <= found
    assert len(found) > 100
    later = {
        "kv_cache_update": ("INetworkDefinition", "add_kv_cache_update"),
        "attention_lengths": ("IAttention", "key_value_lengths"),
        "moe": ("IMoELayer", "set_gated_weights"),
        "collective": ("INetworkDefinition", "add_dist_collective"),
    }
    assert {name: use in found for name, use in later.items()} == {name: getattr(features, name) for name in later}


def test_a_member_that_is_missing_is_noticed() -> None:
    watch = Watch(tensorrt_bindings())
    tensorrt = watch.tensorrt(rtx(), genuine().features)
    network = tensorrt.create_network(tensorrt.module.Builder(tensorrt.module.Logger(tensorrt.module.Logger.ERROR)))
    assert network.num_layers == 0
    with pytest.raises(AttributeError, match=r"INetworkDefinition\.add_miracle is not in TensorRT \d+"):
        network.add_miracle(network)
    assert ("INetworkDefinition", "num_layers") in watch.asked


def test_what_is_written_exists_or_stands_behind_a_feature() -> None:
    """The same for every line of the sources, those that run plans included."""
    module, features = tensorrt_bindings(), genuine().features
    behind = test_api.AFTER_10_14 | {"get_aliased_input_tensor": "aliases"}
    for path in test_api.SOURCES:
        text = path.read_text(encoding="utf-8")
        for owner, member in test_api.uses(path):
            target = module if owner == "module" else getattr(module, owner)
            if hasattr(target, member) or path.name == "compat.py":
                continue
            feature = behind.get(member)
            assert feature is not None, f"{path.name}: {owner}.{member} is not in TensorRT {module.__version__}"
            assert not getattr(features, feature)
            assert f"features.{feature}" in text, path.name
