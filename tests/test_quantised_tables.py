"""Tables of n-grams in FP8, which descriptions of linear layers contradict: one scale for all shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch
from test_quantised_formats import folder, matrix, modelopt, native, refused, same_bits
from torch import Tensor

from trtllm_replayssm.builders.hf.folder import HfFolder

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
SHARDS = [f"{TABLE}.shard_{i}.weight" for i in range(2)]
#: What published files say of a table in FP8, beside what is true of the rest.
OF_TABLES: dict[str, dict[str, Any]] = {
    "excluded": modelopt("NVFP4", ignore=["lm_head", "*.ple.*"]),
    "in the table": modelopt("MIXED_PRECISION", quantized_layers={TABLE: {"quant_algo": "FP8"}}, ignore=["*.ple.*"]),
    "of another format in general": native(128, 128),
    "named": native(128, 128) | {"modules_to_convert": [TABLE]},
}


def table_tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a table in two shards, and its weights."""
    made = {name: q.ngram_shard(torch.randn(5, 16) / 50) for name in SHARDS}
    tensors = {name: stored.tensors["weight"] for name, stored in made.items()}
    return tensors | {f"{TABLE}.weight_scale": q.TABLE_SCALE}, {name: stored.weight for name, stored in made.items()}


@pytest.mark.parametrize("said", OF_TABLES)
def test_a_table_of_ngrams(said: str, tmp_path: Path) -> None:
    """One scale for all shards, whatever is said of linear layers."""
    tensors, weights = table_tensors()
    notes: list[str] = []
    with HfFolder(folder(tmp_path, tensors, OF_TABLES[said]), notes.append) as opened:
        assert set(opened.entries) == set(SHARDS)
        for name, weight in weights.items():
            assert same_bits(opened.tensor(name), weight)
    assert notes[0].endswith("2 weights are dequantised on conversion, 2 FP8 per tensor")


def test_a_table_of_ngrams_in_one_tensor(tmp_path: Path) -> None:
    tensors, weights = table_tensors()
    whole = {f"{TABLE}.weight": tensors[SHARDS[0]], f"{TABLE}.weight_scale": q.TABLE_SCALE}
    with HfFolder(folder(tmp_path, whole, OF_TABLES["excluded"]), print) as opened:
        assert same_bits(opened.tensor(f"{TABLE}.weight"), weights[SHARDS[0]])


def test_a_table_of_ngrams_that_only_its_dtype_describes(tmp_path: Path) -> None:
    tensors, weights = table_tensors()
    text = {"text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}
    with HfFolder(folder(tmp_path / "a", tensors, None, **text), print) as opened:
        assert same_bits(opened.tensor(SHARDS[1]), weights[SHARDS[1]])
    refused(folder(tmp_path / "b", tensors, None), SHARDS[0], "neither config.json nor hf_quant_config.json")


def test_a_table_of_ngrams_that_is_none(tmp_path: Path) -> None:
    """Without a scale, with one of another shape, in another format, described as another, and a scale of plain shards."""
    tensors, _ = table_tensors()
    alone = {name: tensor for name, tensor in tensors.items() if name in SHARDS}
    refused(folder(tmp_path / "a", alone, native(128, 128)), f"{TABLE}.shard_0", "lacks weight_scale")
    rows = tensors | {f"{TABLE}.weight_scale": torch.ones(2)}
    refused(folder(tmp_path / "b", rows, native(128, 128)), f"{TABLE}.weight_scale of shape [2]")
    packed = {f"{TABLE}.shard_0.{part}": tensor for part, tensor in q.compressed_nvfp4(matrix()).tensors.items()}
    refused(folder(tmp_path / "c", packed, modelopt("NVFP4")), f"{TABLE}.shard_0.weight_packed", "in U8", "only BF16")
    other = modelopt("MIXED_PRECISION", quantized_layers={TABLE: {"quant_algo": "NVFP4"}})
    refused(folder(tmp_path / "d", tensors, other), f"{TABLE}.shard_0 is NVFP4", "those of FP8 per tensor")
    plain = tensors | {name: torch.randn(5, 16) for name in SHARDS}
    refused(folder(tmp_path / "e", plain, native(128, 128)), TABLE, "lacks weight")
