"""What config.json of an engine folder keeps of its plans."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_replayssm.builders.typed import check_types


@dataclass(frozen=True)
class PlanRecord:
    """The plans of an engine.

    tensorrt_version, compute_capability: a plan runs on these and no others. prefill_tokens: most tokens of a prefill step.
    gather_context_logits: whether a prefill gives the logits of every token, or of the last one only. aliased: whether
    TensorRT was told which inputs and outputs are one memory. just_in_time: whether plugin layers run in Python.
    stripped: whether the weights were left out. weight_streaming: whether they may stay on the host. scaled_matmul: whether
    inputs of quantised weights are rounded, too. files: bytes of every file of the engine by name.
    """

    tensorrt_version: str
    compute_capability: str
    prefill_tokens: int
    gather_context_logits: bool = False
    aliased: bool = False
    just_in_time: bool = False
    stripped: bool = False
    weight_streaming: bool = False
    scaled_matmul: bool = False
    files: dict = field(default_factory=dict)

    @property
    def capability(self) -> tuple[int, int]:
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PlanRecord:
        """What ``to_dict`` wrote. Raises ValueError, or TypeError for other fields."""
        record = cls(**data)
        check_types(record)
        if not re.fullmatch(r"\d+\.\d+", record.compute_capability):
            raise ValueError(f"compute_capability {record.compute_capability!r}")
        if record.prefill_tokens < 1 or not all(type(size) is int and size > 0 for size in record.files.values()):
            raise ValueError(f"prefill_tokens {record.prefill_tokens}, files {record.files}")
        return record
