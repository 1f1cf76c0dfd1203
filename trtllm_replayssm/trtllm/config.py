"""config.json of a checkpoint as TensorRT-LLM holds it while it builds."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.models.modeling_utils import PretrainedConfig

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.errors import UserError


class ReplaySSMConfig(PretrainedConfig):
    """TensorRT-LLM's usual keys as attributes, and ours under ``replayssm``, as in the file.

    What ``to_dict`` returns makes the same config again; it is what ``trtllm-build`` puts into the engine's config.json.

    Raises CheckpointError when ``replayssm`` is not what this version of ``convert`` writes, UserError for parallelism other
    than tensor parallelism.
    """

    def __init__(
        self,
        *,
        replayssm: dict[str, Any],
        hidden_size: int,
        num_attention_heads: int,
        head_size: int | None = None,
        producer: dict[str, Any] | None = None,
        **usual: Any,
    ) -> None:
        # A model without attention has no heads, and TensorRT-LLM divides by their number to find their size.
        head_size = head_size or hidden_size // max(1, num_attention_heads)
        super().__init__(hidden_size=hidden_size, num_attention_heads=num_attention_heads, head_size=head_size, **usual)
        self.replayssm, self.producer = replayssm, producer
        for name in ("pp_size", "cp_size"):
            if getattr(self.mapping, name) > 1:
                raise UserError(f"{name} is {getattr(self.mapping, name)}; these models know tensor parallelism only")
        if self.quantization.quant_algo is not None or self.quantization.kv_cache_quant_algo is not None:
            raise UserError("these models are built from dequantised weights", "convert with --quantization dequantise")
        self.checkpoint()

    def checkpoint(self) -> CheckpointConfig:
        """The same as ``convert`` describes it."""
        named = ("architecture", "dtype", "max_position_embeddings", "replayssm")
        values = {name: getattr(self, name) for name in named} | {"mapping": {"tp_size": self.mapping.tp_size}}
        return CheckpointConfig.from_dict(values, "the checkpoint's config.json")
