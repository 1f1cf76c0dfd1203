"""ReplaySSM for TensorRT-LLM: hybrid SSM / attention checkpoints as engines whose recurrent layers are plugin layers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.llm import LLM
    from trtllm_replayssm.runtime.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

#: Names that are imported when first used, because they need torch.
LAZY = {"LLM": "trtllm_replayssm.runtime.llm", "SamplingParams": "trtllm_replayssm.runtime.sampling"}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(LAZY[name]), name)
