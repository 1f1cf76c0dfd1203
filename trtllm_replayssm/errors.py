"""Errors that a user can cause: one plain sentence, and a hint that says what to do."""

from __future__ import annotations


def pip_extra(name: str) -> str:
    """The command that installs an extra of pyproject.toml; the package is on no index."""
    return f"pip install '.[{name}]' in the folder of trtllm-replayssm's pyproject.toml"


class UserError(Exception):
    """Something outside the program is wrong: a file, an option, the machine.

    The command line prints ``error: <message>`` and ``hint: <hint>`` and exits with status 1.
    Library users catch it like any other exception; ``str(error)`` is the sentence.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def not_utf8(what: str, error: UnicodeDecodeError, hint: str = "") -> UserError:
    """The error for bytes that are no text, which names the first of them; bytes are counted from 1."""
    return UserError(f"{what} is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}", hint)


class CheckpointError(UserError):
    """A Hugging Face or TensorRT-LLM checkpoint cannot be used as it is."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but holds an architecture that this package does not build."""


class EngineError(UserError):
    """An engine folder cannot be loaded on this machine or by this version."""
