"""Whether the tensorrt-llm at hand has the engine builder that the model classes are for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from trtllm_replayssm.errors import EngineError, pip_extra

#: In the sentence itself, because the program that runs into it is trtllm-build, which knows no hints.
BUILD_INSTEAD = "trtllm-replayssm build --engine_flavour tensorrt builds the same checkpoint without it"


def require_engine_builder() -> None:
    """Raises EngineError unless tensorrt-llm is installed, can be imported, and still builds engines."""
    if find_spec("tensorrt_llm") is None:
        raise EngineError(f"tensorrt-llm is not installed; {BUILD_INSTEAD}", pip_extra("trtllm"))
    try:
        # Looks into the package, which is imported for that.
        builder = find_spec("tensorrt_llm.builder")
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"tensorrt-llm {installed_version()} cannot be imported ({error}); {BUILD_INSTEAD}"
        ) from error
    if builder is None:
        raise EngineError(
            f"tensorrt-llm {installed_version()} has no engine builder, which was removed after 1.2; {BUILD_INSTEAD}",
            "install tensorrt-llm 1.2",
        )


def installed_version() -> str:
    try:
        return version("tensorrt-llm")
    except PackageNotFoundError:
        return "(of unknown version)"
