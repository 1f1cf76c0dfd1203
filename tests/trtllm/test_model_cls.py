"""The model classes for trtllm-build, against a stand-in for tensorrt-llm 1.2 over TensorRT-RTX's own network definition."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import ARCHITECTURE, CheckpointConfig
from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.errors import CheckpointError, UserError
from trtllm_replayssm.plugins.cursors import Cursor, RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import engine_config
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.tensorrt.models import step_sizes
from trtllm_replayssm.runtime.tensorrt.plans import Target, emitted_plans
from trtllm_replayssm.validation.catalogue import MODELS
from trtllm_replayssm.validation.models import random_weights, write_checkpoint

#: Keywords with which the builder of tensorrt-llm 1.2.1 calls prepare_inputs.
KEYWORDS = {
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "use_cache",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "prompt_embedding_table_size",
    "max_draft_len",
    "speculative_decoding_draft_tokens_external",
    "gather_context_logits",
    "lora_target_modules",
}
REPLAY = ReplayConfig(window=8, max_draft_len=3)
#: 125 + 3 drafts: cache rows whose bytes TensorRT can bind.
BATCH, MAX_SEQ_LEN = 4, 125
#: Families with windows, or with attention to chosen blocks, in their grouped-query layers.
PARTIAL = ("lara_mini", "qwen4_exp")
#: A recurrence, both kinds of attention and experts: what a builder takes little time for.
FEW = tuple(next(layer for layer in synthetic.LAYERS if isinstance(layer, k)) for k in (Mamba2, Attention, Mla, Moe))
SHIM = Path(__file__).parents[2] / "examples" / "trtllm_build" / "replayssm_models.py"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Every layer kind, in float32."""
    return synthetic.write_checkpoint(tmp_path / "checkpoint", synthetic.decoder(), replay=REPLAY)


def build_config(llm: SimpleNamespace, **changes: Any) -> Any:
    plugins = llm.plugin.PluginConfig(**changes.pop("plugins", {}))
    sizes = {"max_batch_size": BATCH, "max_seq_len": MAX_SEQ_LEN, "max_num_tokens": 64, "max_input_len": 64}
    return llm.builder.BuildConfig(**sizes | changes, plugin_config=plugins)


def load(llm: SimpleNamespace, folder: Path, name: str = "CutForCausalLM", rank: int = 0) -> Any:
    config = llm.modeling_utils.PretrainedConfig.from_json_file(folder / "config.json")
    config.set_rank(rank)
    return getattr(llm.cut, name).from_checkpoint(folder, config=config)


# ---- config and weights ----------------------------------------------------------------------------------------------


def test_architecture_is_registered(llm: SimpleNamespace, checkpoint: Path) -> None:
    found = llm.models.MODEL_MAP[ARCHITECTURE]
    assert found.__name__ == "ReplaySSMForCausalLM"
    llm.modeling_utils.WARNINGS.clear()
    config = llm.modeling_utils.PretrainedConfig.from_json_file(checkpoint / "config.json")
    assert type(config) is found.config_class
    assert config.checkpoint() == CheckpointConfig.read(checkpoint)
    assert llm.modeling_utils.WARNINGS == []
    with pytest.raises(KeyError, match="OtherForCausalLM"):
        llm.modeling_utils.PretrainedConfig.from_dict({"architecture": "OtherForCausalLM"})


@pytest.mark.parametrize("layers", [synthetic.LAYERS, synthetic.LAYERS[:1]], ids=["every kind", "without attention"])
def test_config_goes_through_the_engines_config(llm: SimpleNamespace, tmp_path: Path, layers: Any) -> None:
    folder = synthetic.write_checkpoint(tmp_path / "checkpoint", synthetic.decoder(layers))
    config = llm.modeling_utils.PretrainedConfig.from_json_file(folder / "config.json")
    written = json.loads(json.dumps(config.to_dict()))
    again = llm.modeling_utils.PretrainedConfig.from_dict(written)
    assert again.to_dict() == config.to_dict()
    assert CheckpointConfig.from_dict(written, "engine") == CheckpointConfig.read(folder)


def test_foreign_configs_are_refused(llm: SimpleNamespace, checkpoint: Path) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    from_dict = llm.modeling_utils.PretrainedConfig.from_dict
    with pytest.raises(CheckpointError, match="checkpoint format 99"):
        from_dict(values | {"replayssm": values["replayssm"] | {"format_version": 99}})
    with pytest.raises(UserError, match="pp_size is 2"):
        from_dict(values | {"mapping": {"world_size": 2, "tp_size": 1, "pp_size": 2}})
    with pytest.raises(UserError, match="dequantised"):
        from_dict(values | {"quantization": {"quant_algo": "FP8"}})


@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_are_the_checkpoints(llm: SimpleNamespace, tmp_path: Path, rank: int) -> None:
    """By name, shape and dtype, for each rank; those of a prediction head are left out, which is a warning."""
    model = replace(synthetic.decoder(), mtp=Mtp((Attention(4, 2, 16, 0.25), Mlp(32, "swiglu"))))
    folder = synthetic.write_checkpoint(tmp_path / "checkpoint", model, tp_size=2, dtype="bfloat16")
    llm.modeling_utils.WARNINGS.clear()
    loaded = dict(load(llm, folder, rank=rank).named_parameters())
    stored = load_file(folder / f"rank{rank}.safetensors")
    head = {name for name in stored if name.startswith("mtp.")}
    assert loaded.keys() == stored.keys() - head
    assert head
    [warning] = llm.modeling_utils.WARNINGS
    assert "not required" in warning
    for name, parameter in loaded.items():
        stored_bytes = stored[name].view(torch.uint8).numpy().tobytes()
        assert parameter.raw_value.tobytes() == stored_bytes, name


def test_a_missing_weight_is_named(llm: SimpleNamespace, checkpoint: Path) -> None:
    path = checkpoint / "rank0.safetensors"
    weights = load_file(path)
    del weights["transformer.ln_f.weight"]
    save_file(weights, path)
    with pytest.raises(RuntimeError, match=r"not provided tensors:\{'transformer.ln_f.weight'\}"):
        load(llm, checkpoint)


# ---- the network -----------------------------------------------------------------------------------------------------


def test_prepare_inputs_has_the_builders_keywords(llm: SimpleNamespace) -> None:
    parameters = dict(inspect.signature(llm.cut.CutForCausalLM.prepare_inputs).parameters)
    assert parameters.pop("others").kind is inspect.Parameter.VAR_KEYWORD
    assert parameters.keys() == KEYWORDS | {"self"}


CACHES = {
    "paged, packed": {},
    "paged, padded": {"plugins": {"remove_input_padding": False}},
}


class PluginRun:
    """The network of a model class, its attention computed here as TensorRT-LLM documents it, beside the torch backend."""

    def __init__(self, llm: SimpleNamespace, model: Any, network: Any) -> None:
        from emission import Emission, Run

        class Beside(Run):
            def resolve(run, interpreter: Any, name: str) -> Tensor:
                if name.startswith("cut/attention_"):
                    return self.attention(int(name.split("_")[1].split("/")[0]), interpreter)
                return super().resolve(interpreter, name)

        checkpoint, decoder = model.checkpoint, model.checkpoint.rank_decoder()
        options = StateOptions(checkpoint.replay, checkpoint.torch_dtype, MAX_SEQ_LEN)
        emission = Emission(
            llm.trt.TENSORRT, None, model.emitted, model.plugins, decoder, model.emitted.weights, options
        )
        self.run, self.rows, self.network = Beside(emission, 2), 2, network
        bound = {network.trt_network.get_input(i).name for i in range(network.trt_network.num_inputs)}
        self.run.theirs = {name: pool for name, pool in self.run.theirs.items() if name in bound}
        self.calls = {a["layer_idx"]: a for a in network.flayers.values()}
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}

    def compare(self, ids: Tensor, mode: RowMode, accepted: int) -> tuple[Tensor, Tensor]:
        self.start, self.tokens = self.run.cursors[:, Cursor.COMMITTED].tolist(), ids.shape[1]
        return self.run.compare(ids, mode, accepted)

    def first(self, ids: Tensor, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        """Logits of a prefill of one of several ranks. exchange: see Interpreter."""
        self.start, self.tokens = [0] * self.rows, ids.shape[1]
        return self.run.by_network(ids, self.run.plan(ids, RowMode.ABSORB), exchange)

    def attention(self, place: int, interpreter: Any) -> Tensor:
        call = self.calls[place]
        heads, kv_heads, width = call["num_heads"], call["num_kv_heads"], call["hidden_size_per_head"]
        qkv = interpreter.value(f"cut/attention_{place}/qkv")
        rows = qkv.reshape(self.rows, self.tokens, -1, width).transpose(1, 2)
        q, k, v = rows.split((heads, kv_heads, kv_heads), 1)
        empty = torch.zeros(self.rows, kv_heads, MAX_SEQ_LEN + REPLAY.max_draft_len, width)
        keys, values = self.caches.setdefault(place, (empty, empty.clone()))
        out = torch.empty_like(q)
        for row, start in enumerate(self.start):
            end = start + self.tokens
            keys[row, :, start:end], values[row, :, start:end] = k[row], v[row]
            past = [t[row, :, :end].repeat_interleave(heads // kv_heads, 0) for t in (keys, values)]
            scores = q[row] @ past[0].transpose(1, 2) / (call["q_scaling"] * math.sqrt(width))
            seen = torch.arange(end) <= start + torch.arange(self.tokens)[:, None]
            out[row] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ past[1]
        flat = out.transpose(1, 2).flatten(2)
        return flat.flatten(0, 1) if qkv.ndim == 2 else flat


@pytest.mark.parametrize("name", ["CutForCausalLM", "CutOwnCacheForCausalLM"])
@pytest.mark.parametrize("changes", CACHES.values(), ids=CACHES)
def test_network_equals_the_embedded_engine(
    llm: SimpleNamespace, checkpoint: Path, name: str, changes: dict[str, Any]
) -> None:
    """A prefill, then verify steps of which two tokens are kept, over every layer kind."""
    model = load(llm, checkpoint, name)
    engine = llm.builder.build(model, build_config(llm, dry_run=True, **changes))
    run = PluginRun(llm, model, engine.network)
    assert bool(run.calls) is (name == "CutForCausalLM")
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(1))
    expected, got = run.compare(ids[:, :9], RowMode.ABSORB, 9)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for start in range(9, 17, 2):
        drafts = torch.cat((ids[:, start : start + 2], ids[:, :2]), 1)
        expected, got = run.compare(drafts, RowMode.DECODE, 2)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_two_ranks_equal_one(llm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and gathers go through TensorRT-LLM's functions, where its own run time would exchange them."""
    monkeypatch.setattr(llm.functional, "COMPUTED", True)
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    runs = {}
    for ranks in (1, 2):
        folder = synthetic.write_checkpoint(tmp_path / str(ranks), synthetic.decoder(FEW), tp_size=ranks, replay=REPLAY)
        for rank in range(ranks):
            model = load(llm, folder, rank=rank)
            runs[ranks, rank] = PluginRun(llm, model, llm.builder.build(model, build_config(llm, dry_run=True)).network)
    expected, got = runs[1, 0].compare(ids, RowMode.ABSORB, 9)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    barrier, parts = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2

    def run(rank: int) -> Tensor:
        def exchange(mine: Tensor) -> list[Tensor]:
            parts[rank] = mine
            barrier.wait()
            everyone = list(parts)
            barrier.wait()
            return everyone

        return runs[2, rank].first(ids, exchange)

    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, range(2)):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


BUILDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "paged, packed": ("CutForCausalLM", 1, {}),
    "contiguous, padded": (
        "CutForCausalLM",
        1,
        {"kv_cache_type": "CONTINUOUS", "plugins": {"remove_input_padding": False}},
    ),
    "own caches": ("CutOwnCacheForCausalLM", 1, {}),
    "two ranks": ("CutForCausalLM", 2, {}),
    "logits of the whole prompt": ("CutForCausalLM", 1, {"gather_context_logits": True}),
}


@pytest.mark.parametrize(("name", "ranks", "changes"), BUILDS.values(), ids=BUILDS)
def test_tensorrt_builds_every_profile(
    llm: SimpleNamespace, tmp_path: Path, name: str, ranks: int, changes: dict[str, Any]
) -> None:
    """In bfloat16; inputs and outputs are those that the documents name."""
    contiguous = "kv_cache_type" in changes
    replay = replace(REPLAY, max_draft_len=0) if contiguous else REPLAY
    folder = synthetic.write_checkpoint(
        tmp_path / "checkpoint", synthetic.decoder(FEW), tp_size=ranks, dtype="bfloat16", replay=replay
    )
    if contiguous:
        changes = changes | {"kv_cache_type": llm.bindings.KVCacheType.CONTINUOUS}
    max_seq_len = MAX_SEQ_LEN + REPLAY.max_draft_len - replay.max_draft_len
    model = load(llm, folder, name, rank=ranks - 1)
    engine = llm.builder.build(model, build_config(llm, max_seq_len=max_seq_len, **changes))
    assert len(engine.engine) > 0
    inputs = engine.network._inputs
    profiles = [
        {n: (t.profiles[i].min, t.profiles[i].opt, t.profiles[i].max) for n, t in inputs.items()} for i in (0, 1)
    ]
    assert profiles[0]["input_ids"] == ([1, 1], [1, 64 // BATCH], [1, 64])
    assert profiles[1]["input_ids"] == ([1, 1], [BATCH, 1], [BATCH, 1])
    assert profiles[0]["logit_positions"][2] == [1, 64 if "gather_context_logits" in changes else 1]
    assert len(inputs["input_ids"].profiles) == (2 if contiguous else 3)

    options = StateOptions(replay, torch.bfloat16, max_seq_len)
    pools = set(model.checkpoint.rank_decoder().pools(options))
    plugin_caches = {n for n in pools if n.endswith((".k_cache", ".v_cache"))} if name == "CutForCausalLM" else set()
    trt_network = engine.network.trt_network
    outputs = {trt_network.get_output(i).name for i in range(trt_network.num_outputs)}
    expected = {"logits"} | {f"{pool}_out" for pool in pools - plugin_caches}
    expected |= {"present_key_value_0"} if contiguous else set()
    assert {n for n in outputs if not n.startswith("cut/")} == expected
    theirs = {"past_key_value_0"} if contiguous else {n for n in inputs if "kv_cache" in n}
    assert len(theirs) == (0 if name != "CutForCausalLM" else 1 if contiguous else 4)
    ours = {"input_ids", "logit_positions", "step"} | (pools - plugin_caches)
    assert ours | theirs <= inputs.keys()
    summed = sum(trt_network.get_layer(i).name.startswith("AllReduce") for i in range(trt_network.num_layers))
    assert ("all_reduce_workspace" in inputs) == (ranks > 1) == (summed > 0)


def test_tensorrt_builds_every_layer_kind(llm: SimpleNamespace, tmp_path: Path) -> None:
    folder = synthetic.write_checkpoint(tmp_path / "checkpoint", synthetic.decoder(), dtype="bfloat16", replay=REPLAY)
    assert llm.builder.build(load(llm, folder), build_config(llm)).engine


def test_own_caches_make_the_network_of_build(
    llm: SimpleNamespace, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs, outputs, profiles and layers are those of a plan of ``trtllm-replayssm build``."""
    from emission import RecordedPlugins

    def plugins() -> Any:
        return RecordedPlugins(whole=True)

    def network() -> tuple[Any, Any]:
        builder = llm.trt.trt.Builder(llm.trt.trt.Logger(llm.trt.trt.Logger.ERROR))
        return llm.trt.TENSORRT.create_network(builder), builder

    options = {"max_batch_size": BATCH, "max_seq_len": MAX_SEQ_LEN, "max_num_tokens": 64}
    config = engine_config(CheckpointConfig.read(checkpoint), BuildOptions(**options, engine_flavour="tensorrt"))
    target = Target(llm.trt.TENSORRT, llm.trt.CAPABILITY, plugins, network)
    [(_, built, _)] = emitted_plans(checkpoint, config, 0, target)

    model = load(llm, checkpoint, "CutOwnCacheForCausalLM")
    monkeypatch.setattr(model, "plugin_layer", lambda tensorrt: plugins())
    network_of_ours = llm.builder.build(model, build_config(llm, dry_run=True)).network
    assert model.emitted.tensors() == built.tensors()
    assert {"cursors", "cursors_out", "step_tokens"} <= built.tensors().keys()
    assert network_of_ours.trt_network.num_layers == built.network.num_layers
    profiles = step_sizes(config, None, False).profiles()
    for name, symbols in built.emitter.inputs.items():
        for ranges, found in zip(profiles, network_of_ours._inputs[name].profiles, strict=True):
            bounds = [ranges[size] if isinstance(size, str) else (size,) * 3 for size in symbols]
            assert [tuple(sizes) for sizes in zip(*bounds)] == [tuple(found.min), tuple(found.opt), tuple(found.max)]


def test_passes_meet_layers_they_do_not_know(llm: SimpleNamespace, checkpoint: Path) -> None:
    """TensorRT-LLM's pass visits every layer; without the registration it stops at the first of another kind."""
    model, kinds = load(llm, checkpoint), llm.graph_rewriting.Layer.TRT_LAYER_TYPE_TO_LAYER
    network = llm.builder.build(model, build_config(llm, dry_run=True)).network
    used = {layer.type for layer in network.get_layers()}
    unknown = [kind for kind in used if kind.name not in llm.graph_rewriting.KNOWN.split()]
    assert unknown
    del kinds[unknown[0]]
    with pytest.raises(NotImplementedError, match="Unknown layer type"):
        llm.graph_rewriting.optimize(network)
    kinds[unknown[0]] = llm.trt.trt.ILayer


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "--max_beam_width": {"max_beam_width": 2},
    "--max_prompt_embedding_table_size": {"max_prompt_embedding_table_size": 8},
    "--lora_target_modules": {"lora_target_modules": ["attn_q"]},
    "--speculative_decoding_mode": {"draft_tokens_external": True},
    "--max_draft_len is 5": {"max_draft_len": 5},
    "--gpt_attention_plugin": {"plugins": {"_gpt_attention_plugin": None}},
    "verify steps": {"plugins": {"use_paged_context_fmha": False}},
}


@pytest.mark.parametrize(("match", "changes"), REFUSED.items(), ids=REFUSED)
def test_options_that_cannot_work_are_refused(
    llm: SimpleNamespace, checkpoint: Path, match: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=match) as error:
        llm.builder.build(load(llm, checkpoint), build_config(llm, **changes))
    assert error.value.hint


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ((Attention(4, 2, 16, 0.25), Attention(4, 1, 16, 0.25)), "attention layers differ"),
        ((Attention(4, 2, 16, 0.25, window=32),), "a part of the past"),
    ],
)
def test_attention_that_the_plugin_cannot_compute_is_refused(
    llm: SimpleNamespace, tmp_path: Path, layers: Any, match: str
) -> None:
    folder = synthetic.write_checkpoint(tmp_path / "checkpoint", HybridDecoder(51, 64, 1e-5, layers), replay=REPLAY)
    with pytest.raises(UserError, match=match) as error:
        llm.builder.build(load(llm, folder), build_config(llm, dry_run=True))
    assert "ReplaySSMOwnCacheForCausalLM" in error.value.hint
    llm.builder.build(load(llm, folder, "CutOwnCacheForCausalLM"), build_config(llm, dry_run=True))


@pytest.mark.parametrize("family", MODELS)
def test_every_family_is_emitted(llm: SimpleNamespace, tmp_path: Path, family: str) -> None:
    """With caches of ours always; through the plugin unless attention is not to all of the past."""
    model = MODELS[family]
    decoder = find_family({"architectures": [model.model_class], **model.arguments}, {}).decoder()
    config = CheckpointConfig(model.model_class, "bfloat16", 1, decoder, REPLAY)
    write_checkpoint(tmp_path / "checkpoint", config, random_weights(decoder))
    own = llm.builder.build(
        load(llm, tmp_path / "checkpoint", "CutOwnCacheForCausalLM"), build_config(llm, dry_run=True)
    )
    assert own.network.trt_network.num_layers > 10
    assert not own.network.flayers
    loaded = load(llm, tmp_path / "checkpoint")
    if family in PARTIAL:
        with pytest.raises(UserError, match="a part of the past"):
            llm.builder.build(loaded, build_config(llm, dry_run=True))
        return
    engine = llm.builder.build(loaded, build_config(llm, dry_run=True))
    grouped = sum(isinstance(layer, Attention) for _, layer in decoder.named_parts())
    assert len(engine.network.flayers) == grouped


def test_latent_attention_alone_needs_no_plugin(llm: SimpleNamespace, tmp_path: Path) -> None:
    layers = (Mamba2(4, 8, 16, 2, 4, 1e-5), Mla(4, 32, 16, 8, 16, 1e-6))
    folder = synthetic.write_checkpoint(tmp_path / "checkpoint", HybridDecoder(51, 64, 1e-5, layers), replay=REPLAY)
    engine = llm.builder.build(
        load(llm, folder), build_config(llm, dry_run=True, plugins={"_gpt_attention_plugin": None})
    )
    assert not engine.network.flayers


# ---- the file on the command line ------------------------------------------------------------------------------------


def test_the_shims_classes_can_be_pickled(llm: SimpleNamespace) -> None:
    spec = importlib.util.spec_from_file_location("models", SHIM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("ReplaySSMForCausalLM", "ReplaySSMOwnCacheForCausalLM"):
        found = getattr(module, name)
        assert found.__module__ == "trtllm_replayssm.trtllm.model_cls"
        assert pickle.loads(pickle.dumps(found)) is found
