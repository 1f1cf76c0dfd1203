"""Kimi-K3's language model in plain torch, written from what is public about it: the ground truth of its parity tests.

transformers 5.24 has no such class, and no weights were ever at hand. Nothing here uses the package's layers: tensors are read
under the names that the published files have, in any floating dtype, and a whole text is computed at once. The sources, by
which every statement below is marked:

* [code] ``modeling_kimi_linear.py`` of moonshotai/Kimi-K3 on Hugging Face, read in public copies; the class or function is
  named. test_kimi_k3_remote_code.py runs the copy in llm-compressor, which lists what it changed, against this file;
* [config] config.json of the same repository, read in a public copy;
* [paper] Attention Residuals, arXiv:2603.15031, and Kimi Linear, arXiv:2510.26692, as others describe them;
* [mlxcel] github.com/lablup/mlxcel issue 1334 and pull request 1741, an independent implementation with shapes;
* [llama.cpp] github.com/ggml-org/llama.cpp pull request 26185; [atomic] github.com/AtomicBot-ai/atomic-llama-cpp-turboquant
  pull request 58, whose decoding of MXFP4 was checked by its author on a published shard;
* [titan] torchtitan's ``models/kimi_k3`` (github.com/pytorch/torchtitan).

Not confirmed by anything but [code]: that a router with one choice does not normalise. Not confirmed at all: fla's KDA kernels
in a run, and how much the rounding of 16-bit activations matters, which every implementation places elsewhere; this file rounds
nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]

#: KimiRMSNorm's default, which the norms of the latents keep [code: KimiMLAAttention.__init__; mlxcel].
LATENT_EPSILON = 1e-6
#: Of the norm of q and k; a sum of squares, not a mean [code: use_qk_l2norm_in_kernel of fla's KDA; paper: Kimi Linear].
L2_EPSILON = 1e-6


def logits(config: Config, tensors: Tensors, ids: Tensor) -> Tensor:
    """``[rows, T, vocab]`` for ids ``[rows, T]``. config: the text config. tensors: as published, none quantised."""
    prefix = "language_model." if any(name.startswith("language_model.") for name in tensors) else ""
    model = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return torch.stack([text_logits(config, model, row) for row in ids])


def text_logits(config: Config, w: Tensors, ids: Tensor) -> Tensor:
    """One text: ids ``[T]`` to ``[T, vocab]``.

    Every layer is two branches, x + attention(norm(x)) and x + mlp(norm(x)), but for the residual: see ``attended``. A block of
    attn_res_block_size layers begins at layers 0, s, 2 s and so on; there the running sum is put away, and the output of the
    layer's attention begins the next one [code: KimiDecoderLayer._forward_attn_residual; titan]. What is put away first is the
    embedding [same; paper]. The head reads a mixture, too, before the last norm [code: KimiLinearModel._apply_output_attn_res].
    Without the key, residuals are the usual ones [code: KimiDecoderLayer.forward].
    """
    epsilon, size = config["rms_norm_eps"], config.get("attn_res_block_size")
    running, finished = w["model.embed_tokens.weight"][ids], []
    for i in range(config["num_hidden_layers"]):
        layer = below(w, f"model.layers.{i}.")
        # The lists of layers count from 1 [config; code: KimiLinearConfig.is_kda_layer].
        linear = i + 1 in config["linear_attn_config"]["kda_layers"]
        read = attended(layer, "self_attention_res", [*finished, running], epsilon) if size and finished else running
        mixed = (delta_attention if linear else latent_attention)(
            config, below(layer, "self_attn."), rms_norm(read, layer["input_layernorm.weight"], epsilon)
        )
        if size and i % size == 0:
            finished, running = [*finished, running], mixed
        else:
            running = running + mixed
        read = attended(layer, "mlp_res", [*finished, running], epsilon) if size else running
        running = running + feed_forward(
            config, layer, i, rms_norm(read, layer["post_attention_layernorm.weight"], epsilon)
        )
    model = below(w, "model.")
    if size:
        running = attended(model, "output_attn_res", [*finished, running], epsilon)
    return rms_norm(running, model["norm.weight"], epsilon) @ w["lm_head.weight"].T


def attended(w: Tensors, name: str, values: list[Tensor], epsilon: float) -> Tensor:
    """A mixture of ``values [T, D]``, with shares softmax(proj . norm(value)) [code: _apply_attn_res; paper; mlxcel; titan].

    The values themselves are not normed. The last one is what the block has so far.
    """
    stacked = torch.stack(values, 1)
    scores = rms_norm(stacked, w[f"{name}_norm.weight"], epsilon) @ w[f"{name}_proj.weight"][0]
    return (scores.softmax(-1)[..., None] * stacked).sum(1)


def delta_attention(config: Config, w: Tensors, x: Tensor) -> Tensor:
    """Kimi Delta Attention of x ``[T, D]`` [code: KimiDeltaAttention.forward; paper: Kimi Linear].

    * q, k and v each pass a causal convolution of their own, without bias, and SiLU.
    * One decay for each key channel, from f_b(f_a(x)) + dt_bias, which is per channel; A_log is per head. With
      gate_lower_bound, the decay's logarithm is bound * sigmoid(exp(A_log) * f), else -exp(A_log) * softplus(f) [code:
      safe_gate and lower_bound of fla's KDA; mlxcel; atomic].
    * A_log has num_heads values, and zeros behind them up to head_dim [mlxcel: a slice of the first 96 of 128; atomic; the
      header of the published shard]; [code] itself declares num_heads.
    * beta is sigmoid(b(x)). The output is normed per head, then multiplied by sigmoid(g), which is one full matrix where
      use_full_rank_gate says so, else g_b(g_a(x)) [code; mlxcel; llama.cpp].
    """
    sizes = config["linear_attn_config"]
    heads, width = sizes["num_heads"], sizes["head_dim"]

    def by_head(values: Tensor) -> Tensor:
        return values.unflatten(-1, (heads, width))

    q, k, v = (
        by_head(torch.nn.functional.silu(convolved(x @ w[f"{part}_proj.weight"].T, w[f"{part}_conv1d.weight"])))
        for part in "qkv"
    )
    q, k = (values / (values.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() for values in (q, k))
    rate = w["A_log"].flatten()[:heads].exp()[:, None]
    f = by_head(x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"])
    bound = sizes.get("gate_lower_bound")
    decay = bound * (rate * f).sigmoid() if bound is not None else -rate * torch.nn.functional.softplus(f)
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    state, rows = torch.zeros(heads, width, width, dtype=x.dtype), []
    for t in range(len(x)):
        state = state * decay[t].exp()[..., None]
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        rows.append(torch.einsum("hk,hkv->hv", q[t] * width**-0.5, state))
    if sizes.get("use_full_rank_gate"):
        gate = x @ w["g_proj.weight"].T
    else:
        gate = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    out = rms_norm(torch.stack(rows), w["o_norm.weight"], config["rms_norm_eps"]) * by_head(gate).sigmoid()
    return out.flatten(1) @ w["o_proj.weight"].T


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel by itself: x ``[T, C]``, weight ``[C, 1, K]``, whose last tap is of the newest token [code; paper]."""
    padded = torch.cat((x.new_zeros(weight.shape[2] - 1, x.shape[1]), x))
    return torch.stack([(padded[t : t + weight.shape[2]] * weight[:, 0].T).sum(0) for t in range(len(x))])


def latent_attention(config: Config, w: Tensors, x: Tensor) -> Tensor:
    """Multi-head latent attention of x ``[T, D]`` without RoPE [code: KimiMLAAttention.forward; mlxcel; llama.cpp].

    The query passes a normed low rank where q_lora_rank is set. Of the key's channels, those of kv_b come from the normed
    latent, and the qk_rope_head_dim last ones, the same for all heads, are neither normed nor rotated (mla_use_nope). Rows of
    kv_b are per head: keys, then values. The scores' scale counts both kinds of channels. mla_use_output_gate: each channel of
    the output is multiplied by sigmoid(g(x)), before o_proj.
    """
    heads, width = config["num_attention_heads"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rank, nope = config["kv_lora_rank"], config["qk_nope_head_dim"]
    if config.get("q_lora_rank") is None:
        q = x @ w["q_proj.weight"].T
    else:
        low = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], LATENT_EPSILON)
        q = low @ w["q_b_proj.weight"].T
    q = q.unflatten(-1, (heads, width))
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, config["qk_rope_head_dim"]], -1)
    kv = rms_norm(latent, w["kv_a_layernorm.weight"], LATENT_EPSILON) @ w["kv_b_proj.weight"].T
    k, v = kv.unflatten(-1, (heads, -1)).split([nope, config["v_head_dim"]], -1)
    k = torch.cat((k, shared[:, None].expand(-1, heads, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)
    if config.get("mla_use_output_gate"):
        out = out * (x @ w["g_proj.weight"].T).sigmoid()
    return out @ w["o_proj.weight"].T


def feed_forward(config: Config, layer: Tensors, index: int, x: Tensor) -> Tensor:
    """Layers before first_k_dense_replace are dense [code: KimiDecoderLayer.__init__; config]."""
    if index < config["first_k_dense_replace"]:
        return gated_mlp(config, below(layer, "mlp."), x, ("gate_proj", "up_proj", "down_proj"))
    return experts(config, below(layer, "block_sparse_moe."), x)


def gated_mlp(config: Config, w: Tensors, x: Tensor, names: tuple[str, str, str]) -> Tensor:
    """down(activation(gate(x), up(x))), with SiTU for hidden_act "situ" [code: SituAndMul; titan; llama.cpp].

    SiTU is beta tanh(gate / beta) sigmoid(gate) * gamma tanh(up / gamma): beta is activation_situ_beta, 1 where the config has
    none, and gamma activation_situ_linear_beta, without which up stays as it is.
    """
    gate, up = (x @ w[f"{name}.weight"].T for name in names[:2])
    if config["hidden_act"] == "situ":
        beta, gamma = config.get("activation_situ_beta") or 1.0, config.get("activation_situ_linear_beta")
        gate = beta * (gate / beta).tanh() * gate.sigmoid()
        up = up if gamma is None else gamma * (up / gamma).tanh()
    else:
        gate = torch.nn.functional.silu(gate)
    return (gate * up) @ w[f"{names[2]}.weight"].T


def experts(config: Config, w: Tensors, x: Tensor) -> Tensor:
    """Mixture of experts behind a latent [code: KimiSparseMoeBlock, KimiMoEGate; mlxcel; llama.cpp; atomic].

    * The router reads x itself. A token's experts are those of most sigmoid(score) + bias; their weights are the sigmoids
      alone, divided by their sum (moe_renormalize, with more than one choice), times routed_scaling_factor. Of
      num_expert_group groups only those topk_group are eligible whose two best experts add up to most; the published model
      has one group [config].
    * With routed_expert_hidden_size, experts read routed_expert_down_proj(x), and their weighted sum is normed with
      rms_norm_eps (latent_moe_use_norm) and goes through routed_expert_up_proj.
    * The shared expert, as wide as num_shared_experts of them, reads x, and is added unweighted.
    * Of an expert, w1 is gate, w3 up and w2 down.
    """
    scores = (x @ w["gate.weight"].T).sigmoid()
    top = config["num_experts_per_token"]
    choice = scores + w["gate.e_score_correction_bias"]
    if config["num_expert_group"] > config["topk_group"]:
        grouped = choice.unflatten(-1, (config["num_expert_group"], -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        eligible = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~eligible[..., None], -torch.inf).flatten(-2)
    chosen = choice.topk(top, -1).indices
    weights = scores.gather(-1, chosen)
    if top > 1 and config["moe_renormalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config["routed_scaling_factor"]
    latent = config.get("routed_expert_hidden_size") is not None
    read = x @ w["routed_expert_down_proj.weight"].T if latent else x
    out = torch.zeros_like(read)
    for e in range(config["num_experts"]):
        share = (weights * (chosen == e)).sum(-1, keepdim=True)
        out = out + share * gated_mlp(config, below(w, f"experts.{e}."), read, ("w1", "w3", "w2"))
    if latent:
        if config.get("latent_moe_use_norm"):
            out = rms_norm(out, w["routed_expert_norm.weight"], config["rms_norm_eps"])
        out = out @ w["routed_expert_up_proj.weight"].T
    if not config["num_shared_experts"]:
        return out
    return out + gated_mlp(config, below(w, "shared_experts."), x, ("gate_proj", "up_proj", "down_proj"))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Weights are factors as they are, not offsets from 1 [code: KimiRMSNorm]."""
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def below(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# ---- the tensors of a checkpoint -------------------------------------------------------------------------------------


def shapes(config: Config, prefix: str = "language_model.", padded: bool = True) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model [code: the classes' parameters; shapes: the header of the published shard, mlxcel].

    padded: A_log is as long as a head is wide. The first layer has a query although it has nothing to choose from [titan].
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    named |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    named |= query_shapes(config, "model.output_attn_res")
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        linear = i + 1 in config["linear_attn_config"]["kda_layers"]
        named |= {f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        named |= query_shapes(config, f"{layer}self_attention_res") | query_shapes(config, f"{layer}mlp_res")
        mixer = delta_shapes(config, padded) if linear else latent_shapes(config)
        named |= {f"{layer}self_attn.{name}": shape for name, shape in mixer.items()}
        if i < config["first_k_dense_replace"]:
            named |= mlp_shapes(f"{layer}mlp.", hidden, config["intermediate_size"])
        else:
            named |= {f"{layer}block_sparse_moe.{name}": shape for name, shape in expert_shapes(config).items()}
    return {prefix + name: shape for name, shape in named.items()}


def query_shapes(config: Config, name: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    if config.get("attn_res_block_size") is None:
        return {}
    return {f"{name}_norm.weight": (hidden,), f"{name}_proj.weight": (1, hidden)}


def delta_shapes(config: Config, padded: bool) -> dict[str, tuple[int, ...]]:
    sizes, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, width, kernel = sizes["num_heads"], sizes["head_dim"], sizes["short_conv_kernel_size"]
    channels = heads * width
    named: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (channels, hidden) for part in "qkv"}
    named |= {f"{part}_conv1d.weight": (channels, 1, kernel) for part in "qkv"}
    named |= {"f_a_proj.weight": (width, hidden), "f_b_proj.weight": (channels, width)}
    named |= {"A_log": (width if padded else heads,), "dt_bias": (channels,), "b_proj.weight": (heads, hidden)}
    if sizes.get("use_full_rank_gate"):
        named["g_proj.weight"] = (channels, hidden)
    else:
        named |= {"g_a_proj.weight": (width, hidden), "g_b_proj.weight": (channels, width)}
    return named | {"o_norm.weight": (width,), "o_proj.weight": (hidden, channels)}


def latent_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, values = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    low = config.get("q_lora_rank")
    named: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * (nope + rope), hidden)}
    if low is not None:
        named = {"q_a_proj.weight": (low, hidden), "q_a_layernorm.weight": (low,)}
        named |= {"q_b_proj.weight": (heads * (nope + rope), low)}
    named |= {"kv_a_proj_with_mqa.weight": (rank + rope, hidden), "kv_a_layernorm.weight": (rank,)}
    named |= {"kv_b_proj.weight": (heads * (nope + values), rank), "o_proj.weight": (hidden, heads * values)}
    return named | ({"g_proj.weight": (heads * values, hidden)} if config.get("mla_use_output_gate") else {})


def expert_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    latent = config.get("routed_expert_hidden_size")
    named: dict[str, tuple[int, ...]] = {"gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,)}
    if latent is not None:
        named |= {"routed_expert_down_proj.weight": (latent, hidden), "routed_expert_up_proj.weight": (hidden, latent)}
        named |= {"routed_expert_norm.weight": (latent,)} if config.get("latent_moe_use_norm") else {}
    width = latent or hidden
    for e in range(count):
        named |= {f"experts.{e}.{name}.weight": (inner, width) for name in ("w1", "w3")}
        named[f"experts.{e}.w2.weight"] = (width, inner)
    shared = config["num_shared_experts"]
    return named | (mlp_shapes("shared_experts.", hidden, shared * inner) if shared else {})


def mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {f"{prefix}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return named | {f"{prefix}down_proj.weight": (hidden, inner)}
