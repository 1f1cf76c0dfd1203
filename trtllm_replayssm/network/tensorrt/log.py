"""TensorRT's log in this package's log."""

from __future__ import annotations

import logging
from functools import lru_cache
from types import ModuleType
from typing import Any

from trtllm_replayssm.compat import collector_paused

log = logging.getLogger("trtllm_replayssm.tensorrt")

#: What TensorRT reports as information is of use to those who debug only.
LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.DEBUG,
    "VERBOSE": logging.DEBUG,
}


@lru_cache
def tensorrt_log(trt: ModuleType) -> Any:
    """The logger that this process hands to TensorRT ``trt``; TensorRT wants one and the same for all its objects.

    Its ``first_error()`` is the first thing that went wrong since ``forget()``, which usually is the cause of the rest.
    """

    class Log(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            level = LEVELS.get(severity.name, logging.WARNING)
            if level == logging.ERROR:
                self.errors.append(text)
            with collector_paused():
                log.log(level, "TensorRT: %s", text)

        def forget(self) -> None:
            self.errors.clear()

        def first_error(self) -> str:
            return sentence(self.errors[0]) if self.errors else "TensorRT gives no reason"

    return Log()


def sentence(text: str) -> str:
    """TensorRT's message without the place in its sources: ``createX: Error Code 6: API Usage Error (why In f at /x:1)``."""
    _, _, reason = text.rpartition("Error Code ")
    reason = reason.partition(" In ")[0] if " In " in reason else reason
    _, bracket, inner = reason.partition("(")
    return " ".join((inner if bracket else reason).split()).rstrip(".)")
