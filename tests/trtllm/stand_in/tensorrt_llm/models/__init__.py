"""Model classes by architecture."""

from tensorrt_llm.models.modeling_utils import PretrainedConfig, PretrainedModel

__all__ = ["MODEL_MAP", "PretrainedConfig", "PretrainedModel"]

MODEL_MAP: dict[str, type] = {}
