"""Qwen3.8-Flash-Next (qwen4_exp): Qwen3.5's layers between gated residual streams, indexed attention, hashed n-grams."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source
from trtllm_replayssm.builders.families.blueprint import Blueprint, Branch, MtpBlueprint, Sources
from trtllm_replayssm.builders.families.parts import plain, with_prefix
from trtllm_replayssm.builders.families.qwen3_5 import Qwen35
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.indexer import MeanIndexer
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.streams import GatedStreams

#: Our weights of a mixing, and theirs.
MIXING = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
INJECT = {"inject": "block_inject_weight"}
DROPPED = {
    "model.visual.": "vision tower; only the text model is converted",
    "visual.": "vision tower; only the text model is converted",
    "mtp.": "multi-token prediction over residual streams, which is not implemented",
}


class Qwen4(Qwen35):
    """Tensors ``model.layers.N.{linear_attn, self_attn, mlp, *_hyper_connection, ple}``, in wrappers as in Qwen3.5."""

    architectures = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    #: All with an indexer: published files and transformers have different words for it.
    attentions = ("full_attention", "indexed_attention", "qwen_sparse_attention")

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        config.expect("attn_output_gate", True)
        config.expect("use_sliding_window", False)
        config.expect("indexer_kv_heads", 1)
        config.ignore("sliding_window", "max_position_embeddings", "mamba_ssm_dtype", "number_of_conv_states")
        # In which dtype engines keep the tables; how they are stored, the tensors tell.
        config.expect("ple_embedding_dtype", "bfloat16", "float8_e4m3fn")
        mixer = "hyper_connection_mixer."
        spellings = ("model.", "model.language_model.")
        self.prefix = self.pick(*(f"{p}{mixer}hc_norm.weight" for p in spellings)).partition(mixer)[0]
        self.epsilon, self.rope = config.positive_number("rms_norm_eps"), self.read_rope()
        self.streams = GatedStreams(config.positive("hc_count"), self.epsilon, config.positive("hc_lowrank"))
        self.gate = config.text("output_gate_type", "silu")
        config.expect("output_gate_type", "sigmoid", "silu", "swish")
        embedded = self.ngram_layers()
        branches: list[Branch] = []
        for i, kind in enumerate(self.layer_types()):
            prefix = f"{self.prefix}layers.{i}."
            if i + 1 in embedded:
                branches.append(self.ngram(f"{prefix}ple.", embedded.index(i + 1)))
            for branch, part in zip(self.block(prefix, kind in self.attentions, self.sparse(i)), ("attn", "mlp")):
                mixing = mixing_sources(f"{prefix}{part}_hyper_connection.", MIXING | INJECT)
                branches.append(replace(branch, norm=None, streams=mixing))
        return Blueprint(
            vocab_size=self.vocabulary(f"{self.prefix}embed_tokens.weight"),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=tuple(branches),
            embedding=f"{self.prefix}embed_tokens.weight",
            final_norm=None,
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            norm_zero_centred=True,
            streams=self.streams,
            stream_sources=mixing_sources(f"{self.prefix}{mixer}", MIXING),
            mtp=self.mtp(),
            dropped=DROPPED | self.constants(embedded),
        )

    def mtp(self) -> MtpBlueprint | None:
        self.config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
        return None

    # ---- layers ------------------------------------------------------------------------------------------------------

    def gated_delta(self) -> GatedDelta:
        return replace(super().gated_delta(), gate="sigmoid" if self.gate == "sigmoid" else "silu")

    def attention(self) -> Attention:
        config = self.config
        block, chosen = config.positive("indexer_compress_ratio"), config.positive("indexer_budget")
        if chosen % block:
            raise config.fail("indexer_budget", f"is {chosen}, which is no multiple of {block} indexer_compress_ratio")
        indexer = MeanIndexer(
            num_heads=config.positive("indexer_n_heads"),
            head_dim=config.positive("indexer_head_dim"),
            block=block,
            count=chosen // block,
            norm_epsilon=self.epsilon,
            rope=self.rope,
        )
        if indexer.head_dim < self.rope.dim:
            raise config.fail("indexer_head_dim", f"is {indexer.head_dim}, but RoPE turns {self.rope.dim} channels")
        return replace(super().attention(), indexer=indexer)

    def attention_sources(self, prefix: str, layer: Attention) -> Sources:
        names = {"qk": "index_qk_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
        sources = plain(f"{prefix}indexer.", {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
        if isinstance(layer.indexer, MeanIndexer):
            sources["taps.weight"] = Source((), layer.indexer.mean)
        return super().attention_sources(prefix, layer) | with_prefix("indexer.", sources)

    # ---- n-grams -----------------------------------------------------------------------------------------------------

    def ngram_layers(self) -> list[int]:
        """Layers that begin with an n-gram embedding, counted from 1, in order."""
        config = self.config
        numbers = config.get("ple_layer_ids", [])
        count = config.positive("num_hidden_layers")
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= count for n in numbers):
            raise config.fail("ple_layer_ids", f"is {numbers!r}; expected a list of layer numbers from 1 to {count}")
        if not numbers:
            config.ignore("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "seed")
            config.ignore("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts")
        return sorted(set(numbers))

    def ngram(self, prefix: str, index: int) -> Branch:
        config, table = self.config, f"{prefix}ple_embedding.ngram_embedding."
        width = config.positive("ple_embed_dim", config.positive("hidden_size"))
        size, heads = config.positive("ngram_size"), config.positive("heads_per_ngram")
        if size < 2 or width % ((size - 1) * heads):
            raise config.fail(
                "ple_embed_dim", f"is {width}, which {heads} heads of each of {size - 1} orders of n-grams cannot share"
            )
        width //= (size - 1) * heads
        layer = NgramEmbedding(
            streams=self.streams.count,
            channels=self.streams.count * config.positive("hidden_size"),
            ngram_size=size,
            heads=heads,
            table_rows=config.positive("ngram_vocab_size_base"),
            vocab_size=config.positive("vocab_size"),
            seed=config.count("seed"),
            index=index,
            end_token=self.end_token(),
            rows=0,
            shards=1,
            width=width,
            full_width=width,
            conv_kernel=config.positive("ple_conv_kernel_size"),
            norm_epsilon=self.epsilon,
        )
        multiple = config.positive("make_ngram_vocab_size_divisible_by")
        rows = -(-layer.hash.rows // multiple) * multiple
        if rows >= 1 << 31:
            raise config.fail("ngram_vocab_size_base", f"makes {rows} rows of n-grams; their numbers have 31 bits")
        names, parts = self.table_parts(table, rows)
        layer = replace(layer, rows=rows, shards=parts)

        def spread(weight: Tensor) -> Tensor:
            """Taps ``ngram_size`` apart, as taps of consecutive tokens."""
            taps = torch.zeros(*weight.shape[::2], size, dtype=weight.dtype, device=weight.device)
            taps[..., 0] = weight[:, 0]
            return taps.flatten(1)[:, : layer.span]

        ours = {"key": "key_proj", "value": "value_proj"}
        ours |= {"key_norm": "norm_key", "query_norm": "norm_query", "conv_norm": "norm_conv"}
        sources = plain(prefix, {f"{name}.weight": f"{theirs}.weight" for name, theirs in ours.items()})
        sources["conv1d.weight"] = Source((f"{prefix}conv1d.weight",), spread)
        whole = Source(names, lambda *shards: torch.cat(shards)[None])
        sources["table.weight"] = Source(names, stacked=parts) if parts > 1 else whole
        return Branch(None, layer, sources)

    def table_parts(self, prefix: str, rows: int) -> tuple[tuple[str, ...], int]:
        """The tensors of a table, and in how many equal parts to store it: the checkpoint's, if they are equal."""
        parts = self.config.positive("split_ngram_parts")
        names = tuple(f"{prefix}shard_{i}.weight" for i in range(parts))
        if f"{prefix}weight" in self.tensor_shapes:
            return (f"{prefix}weight",), 1
        heights = {self.tensor_shapes.get(name, (-1,))[0] for name in names} if self.tensor_shapes else {-1}
        return names, parts if len(heights) == 1 and rows % parts == 0 else 1

    def end_token(self) -> int:
        """The token that n-grams do not reach across: the first of those that end a text."""
        value = self.config.get("eos_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is not int:
            raise self.config.fail("eos_token_id", f"is {value!r}, but n-grams end at such a token")
        return value

    def constants(self, embedded: list[int]) -> dict[str, str]:
        reason = "constants of the n-gram hash, which follow from config.json"
        names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        prefixes = [f"{self.prefix}layers.{number - 1}.ple.ple_embedding." for number in embedded]
        return {prefix + name: reason for prefix in prefixes for name in names}


def mixing_sources(prefix: str, names: dict[str, str]) -> Sources:
    return plain(prefix, {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
