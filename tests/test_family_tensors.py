"""What becomes of a family's tensors: MTP, precision, shapes, heads, vocabulary, and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, build, random_ids, reference_logits
from hf_spelling import read_folder, write_folder, write_hub, write_saved
from test_parity import TOLERANCE, absorb, case, decode
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.families.blueprint import BlueprintFamily
from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.errors import CheckpointError, UserError
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.session import Session

every_model = pytest.mark.parametrize("name", MODELS)

#: Branches of the body that are like the MTP branches.
MTP_LIKE = {
    "nemotron_h_latent": (5, 8),
    "qwen3_next": (6, 7),
    "qwen3_5_text": (6, 7),
    "qwen3_5_text_tied_v3": (6, 7),
    "qwen3_5_moe_text": (6, 7),
    "qwen3_5_vl": (6, 7),
    "qwen3_5_moe_vl": (6, 7),
    "bailing_hybrid": (6, 7),
    "bailing_hybrid_clamp": (6, 7),
    "bailing_hybrid_qlora": (2, 3),
    "glm5_next": (6, 7),
}


def family_of(folder: Path) -> tuple[BlueprintFamily, dict[str, Tensor]]:
    config, tensors = read_config(folder / "config.json"), read_folder(folder)[1]
    family = find_family(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert isinstance(family, BlueprintFamily)
    return family, tensors


def converted(folder: Path, **options: Any) -> tuple[CheckpointConfig, dict[str, Tensor], list[str]]:
    """Config, weights of rank 0, and warnings of a conversion."""
    warnings: list[str] = []
    target = folder.with_name(folder.name + ".checkpoint")
    config = convert(folder, target, warn=warnings.append, **options)
    return config, load_rank(target, 0), warnings


def edited(name: str, folder: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any], **hub: Any) -> Path:
    """The hub's spelling of a tiny model after ``edit`` of its config and tensors."""
    config, tensors = read_folder(write_hub(build(name), folder / "hub", **hub))
    edit(config.get("text_config", config), tensors)
    return write_folder(folder / "edited", config, tensors, 1)


# ---- multi-token prediction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MTP_LIKE)
def test_mtp_layers_are_made_as_those_of_the_body(name: str, tmp_path: Path) -> None:
    family, tensors = family_of(write_hub(build(name), tmp_path / "hub"))
    blueprint = family.blueprint
    assert blueprint.mtp is not None
    assert len(blueprint.mtp.branches) == len(MTP_LIKE[name])
    for branch, index in zip(blueprint.mtp.branches, MTP_LIKE[name]):
        like = blueprint.branches[index]
        assert type(branch.layer) is type(like.layer)
        assert branch.sources.keys() == like.sources.keys()
        for weight, source in branch.sources.items():
            if weight.startswith("experts."):
                continue
            given = [tensors[tensor] for tensor in source.names]
            assert torch.equal(source.build(given), like.sources[weight].build(given)), weight


@pytest.mark.parametrize("name", MTP_LIKE)
def test_mtp_weights_are_kept(name: str, tmp_path: Path) -> None:
    """Every MTP tensor is used, and the head's own tensors arrive unchanged."""
    folder = write_hub(build(name), tmp_path / "hub")
    config, weights, warnings = converted(folder)
    family, tensors = family_of(folder)
    mtp, places = family.blueprint.mtp, config.decoder.parameters()
    assert mtp is not None
    last = len(family.blueprint.branches) // 2
    beginnings = ("mtp.", f"model.layers.{last}.", f"model.language_model.layers.{last}.")
    theirs = {name for name in tensors if name.startswith(beginnings)}
    used = {
        n for ours, source in family.sources(config.decoder).items() if ours.startswith("mtp.") for n in source.names
    }
    assert used == theirs
    for ours, tensor in {
        "mtp.proj.weight": mtp.proj,
        "mtp.norm_embedding.weight": mtp.norm_embedding,
        "mtp.norm_hidden.weight": mtp.norm_hidden,
        "mtp.ln_f.weight": mtp.final_norm,
    }.items():
        assert ours in places
        assert torch.equal(weights[ours], tensors[tensor])
    assert not [message for message in warnings if "MTP" in message]


@pytest.mark.parametrize("name", ["nemotron_h_latent", "qwen3_5_text", "bailing_hybrid"])
def test_announced_mtp_without_tensors_is_off_with_a_warning(name: str, tmp_path: Path) -> None:
    """Fine-tuning drops MTP tensors while the config still asks for them."""
    config, _, warnings = converted(write_hub(build(name), tmp_path / "hub", mtp=False))
    assert config.decoder.mtp is None
    assert any("MTP is off" in message for message in warnings)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("nemotron_h_latent", "num_nextn_predict_layers"),
        ("qwen3_5_text", "mtp_num_hidden_layers"),
        ("bailing_hybrid", "num_nextn_predict_layers"),
    ],
)
def test_mtp_tensors_that_the_config_forgot_are_kept_with_a_warning(name: str, key: str, tmp_path: Path) -> None:
    folder = edited(name, tmp_path, lambda config, tensors: config.pop(key))
    config, _, warnings = converted(folder)
    assert config.decoder.mtp is not None
    assert any("does not announce" in message for message in warnings)


def test_half_of_an_mtp_head_is_refused(tmp_path: Path) -> None:
    folder = edited("qwen3_5_text", tmp_path, lambda config, tensors: tensors.pop("mtp.fc.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*mtp\.fc\.weight"):
        converted(folder)


# ---- precision -------------------------------------------------------------------------------------------------------


@every_model
def test_16_bit_checkpoints_keep_what_must_stay_float32(name: str, tmp_path: Path) -> None:
    folder = write_hub(build(name), tmp_path / "hub", shards=1)
    _, exact, _ = converted(folder, dtype="float32")
    _, weights, _ = converted(folder, dtype="bfloat16")
    kept = {n for n, t in weights.items() if t.dtype == torch.float32}
    expected = (".A_log", ".dt_bias", ".D", ".router.weight", ".router.bias")
    if name.startswith(("bailing", "kimi_k3", "glm5")):
        expected += (".kda.conv1d.weight", ".streams.mix.weight", ".streams.mix.bias")
    if name.startswith("kimi_k3"):
        expected += (".kda.norm.weight", ".streams.query.weight")
    assert kept == {n for n in weights if n.endswith(expected)}
    assert all(torch.equal(weights[n], exact[n]) for n in kept)
    # Norms that are 1 + w are stored as w: adding the 1 in bfloat16 would lose bits.
    assert all(torch.equal(t, exact[n].bfloat16()) for n, t in weights.items() if n not in kept)


@pytest.mark.parametrize(
    "name",
    [
        *("mamba2", "nemotron_h_dense", "qwen3_5_text", "bailing_hybrid_qlora", "granite4_dense", "falcon_h1"),
        *("bamba", "olmo_hybrid_rope", "granite4_moe", "lara_mini", "glm5_next", "qwen4_exp_text"),
    ],
)
def test_bfloat16_engines_stay_as_near_to_float32_as_transformers(name: str, tmp_path: Path) -> None:
    """Near ties between experts, and between blocks, fall another way in bfloat16, there as here."""
    model = build(name)
    converted(write_hub(model, tmp_path / "hub"), dtype="bfloat16")
    options = BuildOptions(max_batch_size=3, max_seq_len=32, max_num_tokens=128)
    build_engine(tmp_path / "hub.checkpoint", tmp_path / "engine", options)
    session, c = Session(Engine.load(tmp_path / "engine", device="cpu")), case(name)
    ours = torch.cat([absorb(session, c.ids[:, :12]), decode(session, c.ids[:, 12:32])], 1)
    theirs = reference_logits(model.bfloat16(), c.ids[:, :32])
    exact = c.logits[:, :32]
    assert float((ours - exact).norm()) < 1.5 * float((theirs - exact).norm())


def test_finite_time_step_limits_are_applied(tmp_path: Path) -> None:
    """In prefill and in decode; transformers does so for Mamba2 in its scan."""
    model, ids = build("mamba2", time_step_limit=[0.01, 0.05]), random_ids(2, 24)
    converted(write_hub(model, tmp_path / "hub"))
    build_engine(
        tmp_path / "hub.checkpoint",
        tmp_path / "engine",
        BuildOptions(max_batch_size=2, max_seq_len=32, max_num_tokens=128),
    )
    session = Session(Engine.load(tmp_path / "engine", device="cpu"))
    logits = torch.cat([absorb(session, ids[:, :9]), decode(session, ids[:, 9:])], 1)
    assert float((logits - reference_logits(model, ids)).abs().max()) < TOLERANCE


# ---- shapes and accounting -------------------------------------------------------------------------------------------


def transposed(tensor: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.update({tensor: tensors[tensor].T.contiguous()})


def cut(tensor: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.update({tensor: tensors[tensor][:-1].clone()})


#: Layers of GLM-5.3.
GLM = "model.language_model.layers."
#: Of the first layer of Kimi-K3.
K3_DECAYS = "language_model.model.layers.0.self_attn.A_log"


def says(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config.update({key: value})


@pytest.mark.parametrize(
    ("name", "edit", "named"),
    [
        ("kimi_linear", transposed("model.layers.0.self_attn.f_b_proj.weight"), "f_b_proj"),
        ("qwen3_5_text", cut("model.layers.0.linear_attn.in_proj_a.weight"), "in_proj_a"),
        ("qwen3_5_text", cut("model.layers.0.linear_attn.conv1d.weight"), "conv1d"),
        ("qwen3_next", cut("model.layers.0.linear_attn.in_proj_qkvz.weight"), "in_proj_qkvz"),
        ("qwen3_next", cut("model.layers.3.self_attn.q_proj.weight"), "q_proj"),
        ("qwen3_5_moe_text", cut("model.layers.0.mlp.experts.gate_up_proj"), "gate_up_proj"),
        ("bailing_hybrid", cut("model.layers.1.attention.kv_b_proj.weight"), "kv_b_proj"),
        # A per-channel gate where config.json says that it is per head.
        ("bailing_hybrid", says("gated_attention_proj_granularity_type", "element_wise"), "g_proj"),
        ("nemotron_h_dense", says("mamba_head_dim", 8), "in_proj"),
        ("nemotron_h_dense", says("head_dim", 32), "q_proj"),
        ("nemotron_h_moe", says("n_routed_experts", 4), "gate.weight"),
        ("mamba2", says("n_groups", 1), "in_proj"),
        ("state_spaces", lambda c, t: c["ssm_cfg"].update(headdim=32), "in_proj"),
        ("state_spaces", lambda c, t: c["ssm_cfg"].pop("d_state"), "in_proj"),
        # The wrong head size of Mamba-2 makes in_proj wider by the difference in heads.
        ("falcon_h1", lambda c, t: c.update(mamba_n_heads=16, mamba_d_head=8), "in_proj"),
        ("falcon_h1", says("head_dim", 32), "q_proj"),
        ("granite4_moe", says("shared_intermediate_size", 96), "input_linear"),
        ("granite4_moe", cut("model.layers.0.block_sparse_moe.input_linear.weight"), "input_linear"),
        ("granite4_dense", says("num_local_experts", 8), "num_experts_per_tok"),
        ("bamba", says("attn_layer_indices", [0]), "lacks"),
        ("olmo_hybrid", cut("model.layers.0.linear_attn.v_conv1d.weight"), "v_conv1d"),
        ("olmo_hybrid", says("linear_value_head_dim", 12), "o_norm"),
        ("glm5_next", transposed(f"{GLM}3.self_attn.indexer.index_kpool_compress_ape"), "compress_ape"),
        ("glm5_next", lambda c, t: t.update({f"{GLM}0.hc_attn_scale": torch.ones(4)}), "hc_attn_scale"),
        ("lara_mini", cut("model.layers.0.linear_attn.in_proj.weight"), "in_proj"),
        ("lara_mini", says("layer_types", ["linear_attention"] * 5), "lacks"),
        ("kimi_linear", says("kv_lora_rank", 16), "kv_a"),
        ("kimi_k3", cut("language_model.model.layers.1.mlp_res_norm.weight"), "mlp_res"),
        (
            "kimi_k3",
            cut("language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight"),
            "routed_expert_norm",
        ),
        ("kimi_k3", cut("language_model.model.layers.2.self_attn.g_proj.weight"), "g_proj"),
        ("kimi_k3", says("routed_expert_hidden_size", 16), r"experts\.0\.w1"),
        ("kimi_k3", says("attn_res_block_size", None), "does not use"),
        # Fewer decays than heads; more are padding.
        ("kimi_k3", lambda c, t: t.update({K3_DECAYS: t[K3_DECAYS][:3].clone()}), "A_log"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shapes_that_contradict_the_config_are_refused(
    name: str, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        converted(edited(name, tmp_path, edit))


def test_a_projection_of_zeros_is_refused(tmp_path: Path) -> None:
    """in_proj_qkv written as zeros makes a model that talks nonsense, and no error."""
    tensor = "model.layers.0.linear_attn.in_proj_qkv.weight"
    folder = edited("qwen3_5_text", tmp_path, lambda config, tensors: tensors[tensor].zero_())
    with pytest.raises(CheckpointError, match=r"in_proj_qkv\.weight is all zeros"):
        converted(folder)


@every_model
def test_a_missing_and_a_surplus_tensor_are_refused(name: str, tmp_path: Path) -> None:
    norms = {"olmo": "attention_layer_norm", "qwen4": "attn_hyper_connection.hc_norm"} | dict.fromkeys(
        ("mamba", "nemot", "state"), "norm"
    )
    first = f"layers.0.{norms.get(name[:4], norms.get(name[:5], 'input_layernorm'))}.weight"
    lost = edited(name, tmp_path / "lost", lambda c, t: t.pop(next(n for n in t if n.endswith(first))))
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        converted(lost)
    surplus = "model.layers.0.self_attn.gate_norm.weight"
    more = edited(name, tmp_path / "more", lambda c, t: t.update({surplus: torch.ones(4)}))
    with pytest.raises(CheckpointError, match=f"does not use: {surplus}"):
        converted(more)


@pytest.mark.parametrize(
    ("name", "tower"),
    [("qwen3_5_vl", "model.visual."), ("qwen3_5_moe_vl", "model.visual."), ("kimi_k3", "vision_tower.")],
)
def test_the_vision_tower_is_left_out_and_listed(name: str, tower: str, tmp_path: Path) -> None:
    _, _, warnings = converted(write_saved(build(name), tmp_path / "saved"))
    assert any("vision tower" in message and tower in message for message in warnings)


# ---- head and vocabulary ---------------------------------------------------------------------------------------------


def test_a_tied_model_may_bring_an_equal_head_and_no_other(tmp_path: Path) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    name = "qwen3_5_text_tied_v3"
    equal = edited(name, tmp_path / "equal", lambda c, t: t.update({head: t[embedding].clone()}))
    _, weights, warnings = converted(equal)
    assert head not in weights
    assert any(head in message for message in warnings)
    other = edited(name, tmp_path / "other", lambda c, t: t.update({head: t[embedding] + 1}))
    with pytest.raises(CheckpointError, match="ties the head"):
        converted(other)
    quantised = {"lm_head.weight": torch.zeros(128, 32, dtype=torch.uint8), "lm_head.weight_scale": torch.ones(128, 4)}
    packed = edited(name, tmp_path / "packed", lambda c, t: t.update(quantised))
    with pytest.raises(CheckpointError, match="lm_head"):
        converted(packed)


def test_an_untied_model_must_bring_its_head(tmp_path: Path) -> None:
    folder = edited("qwen3_5_text", tmp_path, lambda config, tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        converted(folder)


def test_a_config_silent_about_tying_is_judged_by_the_head(tmp_path: Path) -> None:
    for name, tied in (("qwen3_5_text", False), ("qwen3_5_text_tied_v3", True)):
        folder = edited(name, tmp_path / name, lambda config, tensors: config.pop("tie_word_embeddings", None))
        assert converted(folder)[0].decoder.tie_embeddings is tied


def test_rows_beyond_the_vocabulary_are_padding(tmp_path: Path) -> None:
    """Qwen3.5 has 248320 rows for 248077 tokens: the file is the truth, and too few rows are an error."""
    config, _, warnings = converted(edited("qwen3_5_text", tmp_path / "fewer", says("vocab_size", 120)))
    assert config.decoder.vocab_size == 128
    assert any("padding" in message for message in warnings)
    with pytest.raises(CheckpointError, match="128 rows"):
        converted(edited("qwen3_5_text", tmp_path / "more", says("vocab_size", 130)))


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@every_model
def test_a_rank_holds_what_its_layers_expect(name: str) -> None:
    decoder = case(name).engine.decoder
    for layer in {*decoder.layers, *(decoder.mtp.layers if decoder.mtp else ())}:
        local = layer.divided(2)
        expected = {n: p.local_shape(2) for n, p in layer.parameters(64).items()}
        assert {n: p.shape for n, p in local.parameters(64).items()} == expected


@pytest.mark.parametrize(
    ("name", "tp_size", "what"),
    [
        ("mamba2_g1_bias", 3, "8 Mamba-2 heads"),
        ("nemotron_h_dense", 4, "2 Mamba-2 groups"),
        ("qwen3_5_text", 4, "2 GDN key heads"),
        ("kimi_linear", 3, "MLA heads|attention heads|KDA heads"),
        ("kimi_k3", 8, "4 (MLA|KDA) heads"),
    ],
)
def test_heads_and_groups_are_never_torn_apart(name: str, tp_size: int, what: str, tmp_path: Path) -> None:
    folder = write_hub(build(name), tmp_path / "hub")
    with pytest.raises(UserError, match=what):
        converted(folder, tp_size=tp_size)
    assert not (tmp_path / "hub.checkpoint").exists()
