"""Every layer kind computes the same on two or four ranks as on one."""

from __future__ import annotations

import pytest
import torch
from layer_harness import LAYERS, random_weights, run, width_of

from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.errors import UserError

all_layers = pytest.mark.parametrize("name", LAYERS)


@all_layers
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_add_up_to_one(name: str, tp_size: int) -> None:
    """Also with more ranks than key/value heads, where ranks hold copies."""
    layer, weights = LAYERS[name], random_weights(LAYERS[name])
    (expected,) = run(layer, weights)
    for output in run(layer, weights, tp_size):
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@all_layers
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_are_the_parameters_of_the_divided_layer(name: str, tp_size: int) -> None:
    layer, weights = LAYERS[name], random_weights(LAYERS[name])
    whole, divided = (part.parameters(width_of(layer)) for part in (layer, layer.divided(tp_size)))
    assert whole.keys() == divided.keys()
    for weight, parameter in whole.items():
        assert parameter.local_shape(tp_size) == divided[weight].shape, weight
        assert (parameter.float32, parameter.nonzero) == (divided[weight].float32, divided[weight].nonzero)
        for rank in range(tp_size):
            assert parameter.shard(weights[weight], rank, tp_size).shape == divided[weight].shape


@all_layers
def test_heads_are_not_torn_apart(name: str) -> None:
    with pytest.raises(UserError, match="cannot be divided over tp_size 7"):
        LAYERS[name].divided(7)


def test_every_kind_is_covered() -> None:
    layers = {kind: layer for kind, layer in Layer.kinds.items() if issubclass(layer, Layer)}
    ours = {kind for kind, layer in layers.items() if layer.__module__.startswith("trtllm_replayssm.")}
    assert {layer.kind for layer in LAYERS.values()} == ours
