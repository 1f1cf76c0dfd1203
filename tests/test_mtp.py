"""The multi-token prediction head against transformers: cached, in pieces of any size, as a drafter runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
import transformers
from hf_models import MODELS, build, random_ids
from hf_spelling import read_folder, write_folder, write_hub
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.model import Mtp
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Kept
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter

TOKENS, PIECES = 33, (5, 1, 3, 1, 1, 9, 10, 2)


def engine_of(folder: Path, root: Path, max_draft_len: int = 3) -> Engine:
    convert(folder, root / "checkpoint", warn=lambda message: None)
    options = BuildOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=64, max_draft_len=max_draft_len)
    build_engine(root / "checkpoint", root / "engine", options)
    return Engine.load(root / "engine", device="cpu")


@torch.no_grad()
def generic_logits(model: Any, folder: Path, ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits ``[T - 1, vocab]`` of transformers' own class for such heads, which reads the checkpoint by itself."""
    text = model.config.get_text_config()
    text.num_mtp_layers = 1
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(text, kinds, None):
            setattr(text, f"mtp_{kinds}", [getattr(text, kinds)[-1]])
    model.config.name_or_path, model.config.dtype, text.dtype = str(folder), torch.float32, torch.float32
    head: Any = MtpModel.from_pretrained(model).eval()
    head.config._attn_implementation = "eager"
    positions = torch.arange(1, ids.shape[1])[None]
    out = head.forward_layer(0, hidden, positions, MtpCache(config=head.config), input_ids=ids[:, 1:])
    return head._project_to_logits(out)[0]


@torch.no_grad()
def nemotron_logits(folder: Path, ids: Tensor, hidden: Tensor) -> Tensor:
    """The same from a model of the family that has the head's layers for a body, and reads what the head projects."""
    _, given = read_folder(folder)
    small = write_hub(
        build("nemotron_h_latent", hybrid_override_pattern="*E", num_nextn_predict_layers=0), folder / "head", mtp=False
    )
    config, tensors = read_folder(small)
    for name in tensors:
        tensors[name] = given[name.replace("backbone.layers.", "mtp.layers.")]
    tensors["backbone.norm_f.weight"] = given["mtp.layers.1.final_layernorm.weight"]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        write_folder(folder / "head.of", config, tensors, 1), attn_implementation="eager", dtype=torch.float32
    ).eval()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["layer_norm_epsilon"]).rsqrt() * weight

    embedded = norm(given["backbone.embeddings.weight"][ids[:, 1:]], given["mtp.layers.0.enorm.weight"])
    parts = torch.cat([embedded, norm(hidden, given["mtp.layers.0.hnorm.weight"])], -1)
    return model(inputs_embeds=parts @ given["mtp.layers.0.eh_proj.weight"].T, use_cache=False).logits[0]


@torch.no_grad()
def glm_logits(folder: Path, ids: Tensor, hidden: Tensor) -> Tensor:
    """The same from a model of one block, whose only stream is mixed with factors of 1: a plain residual stream."""
    config, given = read_folder(folder)
    root, last = "model.language_model.", f"layers.{config['text_config']['num_hidden_layers']}."
    text = MODELS["glm5_next"].config["text_config"] | {"num_hidden_layers": 1, "hc_mult": 1}
    text |= {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]}
    small = write_hub(build("glm5_next", text_config=text), folder / "head", mtp=False)
    config, tensors = read_folder(small)
    for name, tensor in tensors.items():
        if name.endswith(("hc_attn_fn", "hc_ffn_fn")):
            tensor.zero_()
        elif name.endswith(("hc_attn_base", "hc_ffn_base")):
            # sigmoid(40) of the stream is read, and 2 sigmoid(0) of the output is written.
            tensor.copy_(torch.tensor([40.0, 0.0, 0.0]))
        elif ".hc_" not in name and name.startswith(f"{root}layers."):
            tensors[name] = given[name.replace("layers.0.", last)]
    tensors["lm_head.weight"] = given["lm_head.weight"]
    tensors[f"{root}norm.weight"] = given[f"{root}{last}shared_head.norm.weight"]
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        write_folder(folder / "head.of", config, tensors, 1), attn_implementation="eager", dtype=torch.float32
    ).eval()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + model.config.text_config.rms_norm_eps).rsqrt() * weight

    embedded = norm(given[f"{root}embed_tokens.weight"][ids[:, 1:]], given[f"{root}{last}enorm.weight"])
    parts = torch.cat([embedded, norm(hidden, given[f"{root}{last}hnorm.weight"])], -1)
    return model(inputs_embeds=parts @ given[f"{root}{last}eh_proj.weight"].T, use_cache=False).logits[0]


def expected_logits(name: str, model: Any, folder: Path, ids: Tensor, hidden: Tensor) -> Tensor:
    if name.startswith("nemotron"):
        return nemotron_logits(folder, ids, hidden)
    if name.startswith("glm"):
        return glm_logits(folder, ids, hidden)
    if name.startswith("bailing"):
        # The one name in which transformers and the published files differ.
        config, tensors = read_folder(folder)
        renamed = {n.replace("final_layernorm", "post_norm"): t for n, t in tensors.items()}
        folder = write_folder(folder / "renamed", config, renamed, 1)
    return generic_logits(model, folder, ids, hidden)


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "qwen3_5_text_tied_v3", "qwen3_5_moe_text", "bailing_hybrid", "nemotron_h_latent", "glm5_next"],
)
def test_head_equals_transformers(name: str, tmp_path: Path) -> None:
    model, ids = build(name), random_ids(1, TOKENS)
    folder = write_hub(model, tmp_path / "hf", shards=1)
    session = Session(engine_of(folder, tmp_path))
    for pool in session.pools.values():
        pool.fill_(float("nan"))
    session.step(ids[:, :-1], first_slot=1, modes=[RowMode.ABSORB])
    ours = session.hidden[0]
    with torch.no_grad():
        hidden = model(input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(ours, hidden[0], rtol=0, atol=2e-5)
    expected = expected_logits(name, model, folder, ids, hidden)
    drafter, start, following = MtpDrafter(session), 0, ids[0, 1:].tolist()
    for count in PIECES:
        end = start + count
        outputs = drafter.run({1: Kept(start, ours[start:end], following[start:end])})
        error = (outputs[1].logits - expected[end - 1]).abs().max()
        assert error < 1e-4 * max(1.0, float(expected.std())), f"position {end - 1}"
        # Drafts, which are all rejected.
        for position in (end, end + 1):
            outputs = drafter.run({1: Kept(position, outputs[1].hidden[None], [7])})
        start = end


def test_engines_without_a_head_or_without_drafts(tmp_path: Path) -> None:
    plain = engine_of(write_hub(build("qwen3_next"), tmp_path / "plain", mtp=False), tmp_path / "a")
    with pytest.raises(UserError, match="no multi-token prediction head"):
        MtpDrafter(Session(plain))
    idle = engine_of(write_hub(build("qwen3_next"), tmp_path / "idle"), tmp_path / "b", max_draft_len=0)
    # Nobody pays for caches of a head that is never run.
    assert not any(name.startswith("mtp.") for name in Session(idle).pools)


def test_a_head_that_cannot_be_rolled_back_by_position_is_refused(tmp_path: Path) -> None:
    model = replace(synthetic.decoder(synthetic.LAYERS[6:7]), mtp=Mtp(synthetic.LAYERS[:1]))
    options = BuildOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=64, max_draft_len=3)
    engine = synthetic.load(synthetic.write_engine(tmp_path / "engine", model, options))
    with pytest.raises(UserError, match="recurrent layers, which cannot draft"):
        MtpDrafter(Session(engine))
