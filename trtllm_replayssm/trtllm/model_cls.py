"""Model classes for ``trtllm-build --model_cls_file FILE --model_cls_name NAME``, for checkpoints of ``convert``.

FILE is a shim that imports from here: ``trtllm-build`` runs it under another module name, and its workers must find the class
again by the name of its module. Importing this module registers the architecture in TensorRT-LLM's MODEL_MAP, where
``PretrainedConfig.from_dict`` looks for it before any class is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trtllm_replayssm.trtllm.available import require_engine_builder

require_engine_builder()

from tensorrt_llm import graph_rewriting  # noqa: E402  (the sentence above comes first)
from tensorrt_llm._common import default_net, default_trtnet  # noqa: E402
from tensorrt_llm._utils import numpy_to_torch, str_dtype_to_trt  # noqa: E402
from tensorrt_llm.models import MODEL_MAP  # noqa: E402
from tensorrt_llm.models.modeling_utils import KVCacheType, PretrainedModel  # noqa: E402
from tensorrt_llm.parameter import Parameter  # noqa: E402
from tensorrt_llm.plugin import current_all_reduce_helper  # noqa: E402

from trtllm_replayssm.builders.checkpoint import ARCHITECTURE  # noqa: E402
from trtllm_replayssm.compat import TensorRT, load_tensorrt  # noqa: E402
from trtllm_replayssm.errors import UserError  # noqa: E402
from trtllm_replayssm.network.base import Network  # noqa: E402
from trtllm_replayssm.network.tensorrt.build import StepSizes, emit_step  # noqa: E402
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginLayer  # noqa: E402
from trtllm_replayssm.network.tensorrt.quick_plugins import QuickPlugins  # noqa: E402
from trtllm_replayssm.runtime.engine_config import EngineConfig  # noqa: E402
from trtllm_replayssm.runtime.tensorrt.models import decoder_model, state_options, step_sizes  # noqa: E402
from trtllm_replayssm.trtllm.config import ReplaySSMConfig  # noqa: E402
from trtllm_replayssm.trtllm.emission import OWN_CACHE, PluginAttention, TrtLlmEmitter, TrtLlmNetwork  # noqa: E402

__all__ = ["ReplaySSMConfig", "ReplaySSMForCausalLM", "ReplaySSMOwnCacheForCausalLM"]


class ReplaySSMForCausalLM(PretrainedModel):
    """Any family of ``convert``. Grouped-query attention is TensorRT-LLM's attention plugin with its KV cache; latent
    attention (MLA), which that plugin does not take without its own projections, keeps a cache of ours.

    Parameters are the checkpoint's, by name; those of a prediction head (MTP) are left out.
    """

    config_class = ReplaySSMConfig
    #: Whether grouped-query attention goes through TensorRT-LLM's plugin.
    attention_plugin = True

    def __init__(self, config: ReplaySSMConfig) -> None:
        super().__init__(config)
        self.checkpoint = config.checkpoint()
        for name, (dtype, shape) in self.checkpoint.rank_layout().items():
            if not name.startswith("mtp."):
                self.register_parameter(name, Parameter(shape=shape, dtype=str(dtype).removeprefix("torch.")))

    # ---- where the layers come from ----------------------------------------------------------------------------------

    def tensorrt(self) -> TensorRT:
        """The TensorRT that TensorRT-LLM builds with."""
        return load_tensorrt(("tensorrt",))

    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU that the engine is for."""
        return torch.cuda.get_device_capability()

    def plugin_layer(self, tensorrt: TensorRT) -> PluginLayer:
        """Adds the ReplaySSM layers."""
        return QuickPlugins(tensorrt, self.capability())

    # ---- what trtllm-build calls -------------------------------------------------------------------------------------

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int,
        use_cache: bool,
        max_beam_width: int = 1,
        opt_num_tokens: int | None = None,
        prompt_embedding_table_size: int = 0,
        max_draft_len: int = 0,
        speculative_decoding_draft_tokens_external: bool = False,
        gather_context_logits: bool = False,
        lora_target_modules: list[str] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Arguments of ``forward``. The keywords are those of the builder of 1.2; max_input_len has no use here.

        A prefill step has one request and at most max_num_tokens tokens; gather_context_logits gives all of them logits.
        Raises UserError for options that these models do not know, or that do not fit together.
        """
        drafts = self.checkpoint.replay.max_draft_len
        refusals = {
            "--max_beam_width": max_beam_width != 1,
            "--kv_cache_type disabled": not use_cache,
            "--max_prompt_embedding_table_size": prompt_embedding_table_size > 0,
            "--lora_target_modules": bool(lora_target_modules),
            "--speculative_decoding_mode": speculative_decoding_draft_tokens_external or bool(others),
        }
        for option, given in refusals.items():
            if given:
                raise UserError(f"these models cannot be built with {option}", "leave it out")
        if max_draft_len not in (0, drafts):
            raise UserError(
                f"--max_draft_len is {max_draft_len}, but the checkpoint's rings are made for {drafts} draft tokens",
                f"convert with --max_draft_len {max_draft_len}, or leave it out",
            )
        engine = EngineConfig(self.checkpoint, max_batch_size, max_seq_len, max_num_tokens, "tensorrt")
        sizes = step_sizes(engine, opt_num_tokens, gather_context_logits)
        mapping = self.config.mapping
        if mapping.tp_size > 1:
            current_all_reduce_helper().set_workspace_tensor(mapping, len(sizes.profiles()))
        return {
            "engine": engine,
            "sizes": sizes,
            "attention": self.prepare_attention(engine, sizes) if self.attention_plugin else None,
        }

    def prepare_attention(self, engine: EngineConfig, sizes: StepSizes) -> PluginAttention | None:
        """Inputs of TensorRT-LLM's attention plugin; None for a model without such layers.

        Raises UserError when the plugin, or what verify steps need of it, is switched off.
        """
        # Sizes over all ranks, which is what TensorRT-LLM asks for.
        whole = self.checkpoint.decoder.pools(state_options(engine))
        caches = [name.removesuffix(".k_cache") for name in whole if name.endswith(".k_cache")]
        if not caches:
            return None
        config, drafts = default_net().plugin_config, self.checkpoint.replay.max_draft_len
        if not config.gpt_attention_plugin:
            raise UserError("attention goes through --gpt_attention_plugin, which is disabled", OWN_CACHE)
        if drafts and not (config.paged_kv_cache and config.use_paged_context_fmha):
            raise UserError(
                "verify steps reach TensorRT-LLM's attention as chunks of context",
                "build with --kv_cache_type paged --use_paged_context_fmha enable, or convert with --max_draft_len 0",
            )
        shapes = {whole[f"{layer}.k_cache"].shape for layer in caches}
        if len(shapes) > 1:
            raise UserError("its attention layers differ, but share one KV cache in TensorRT-LLM", OWN_CACHE)
        [(kv_heads, _, head_dim)] = shapes
        longest = max(sizes.prefill_tokens, sizes.verify_tokens)
        inputs = self.prepare_attention_inputs(
            max_batch_size=sizes.max_batch_size,
            max_beam_width=1,
            max_input_len=longest,
            # Drafts may reach past the end of a sequence.
            max_seq_len=engine.max_seq_len + drafts,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            num_layers=len(caches),
            kv_dtype=str_dtype_to_trt(self.config.kv_dtype),
            kv_cache_type=KVCacheType.PAGED if config.paged_kv_cache else KVCacheType.CONTINUOUS,
            num_profiles=len(sizes.profiles()),
            remove_input_padding=config.remove_input_padding,
            use_gpt_attention_plugin=config.gpt_attention_plugin,
            tokens_per_block=config.tokens_per_block,
            mapping=self.config.mapping,
            streamingllm=False,
        )
        places = {layer: place for place, layer in enumerate(caches)}
        return PluginAttention(inputs, places, longest, self.config.mapping)

    def forward(self, engine: EngineConfig, sizes: StepSizes, attention: PluginAttention | None) -> None:
        """Write one step into TensorRT-LLM's network: that of a plan of ``trtllm-replayssm build``, with the attention
        plugin's inputs."""
        tensorrt, logits_dtype = self.tensorrt(), getattr(torch, self.config.logits_dtype)
        emitter = TrtLlmEmitter(tensorrt, default_trtnet(), sizes.profiles())
        model = decoder_model(engine)

        def outputs(net: Network, token_ids: Any, previous: Any) -> dict[str, Any]:
            made = dict(model.forward(net, token_ids, previous))
            return made | {"logits": emitter.cast(made["logits"], logits_dtype)}

        weights = {name: numpy_to_torch(parameter.raw_value) for name, parameter in self.named_parameters()}
        #: Holds the memory behind the constants until the engine is built.
        self.emitted = emit_step(
            tensorrt,
            default_trtnet(),
            replace(model, forward=outputs),
            weights,
            self.plugin_layer(tensorrt),
            self.checkpoint.tp_size,
            self.capability(),
            emitter=emitter,
            backend=partial(TrtLlmNetwork, mapping=self.config.mapping, attention=attention),
            with_step_tokens=True,
        )


class ReplaySSMOwnCacheForCausalLM(ReplaySSMForCausalLM):
    """The same with attention made of TensorRT's layers and KV caches of ours: the inputs, outputs and profiles are those of
    ``trtllm-replayssm build``, and with one rank nothing of TensorRT-LLM is in the engine."""

    attention_plugin = False


def register() -> None:
    """Make TensorRT-LLM find the architecture, and let its passes over a network meet every kind of layer."""
    MODEL_MAP[ARCHITECTURE] = ReplaySSMForCausalLM
    # Its table stops at the layers that its own models use, and an unknown one is an error in every pass.
    for kind in graph_rewriting.trt.LayerType.__members__.values():
        graph_rewriting.Layer.TRT_LAYER_TYPE_TO_LAYER.setdefault(kind, graph_rewriting.trt.ILayer)


register()
