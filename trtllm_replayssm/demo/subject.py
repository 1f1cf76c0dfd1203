"""Which model the demo takes: one of the trained ones that a checkout has, or a tiny one with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.demo.catalogue import MODELS, TRAINED
from trtllm_replayssm.demo.models import load_checkpoint, make_checkpoint
from trtllm_replayssm.errors import UserError

#: Test data of the checkout (examples/train_tiny); an installed wheel has none.
TRAINED_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "trained"

RANDOM_PROMPTS = ("A state that nobody rewrites is a state that nobody has to copy.", "Replay!")
TRAINED_PROMPTS = (
    'class Parser:\n    """Reads a file, line by line."""\n\n    def __init__(self, ',
    'import os\nimport sys\n\n\ndef find_module(name, path=None):\n    """',
)


@dataclass(frozen=True)
class Subject:
    """name, and what: for the reader. prompts: of two requests. trained: whether its text is worth showing.

    folder: where the Hugging Face checkpoint is; None for ``model`` below the demo's folder. make: brings it to the folder it
    is given, if it is not there, and returns the transformers model.
    """

    name: str
    what: str
    prompts: tuple[str, ...]
    trained: bool
    folder: Path | None
    make: Callable[[Path], Any]


def random_subject(family: str) -> Subject:
    """A model of ``MODELS``, made by transformers."""
    what = f"{MODELS[family].what}, with random weights"
    return Subject(family, what, RANDOM_PROMPTS, False, None, lambda folder: make_checkpoint(family, folder))


def trained_subject(name: str) -> Subject:
    """A model of ``TRAINED``. Raises UserError where this installation has none."""
    if not has_trained(name):
        raise UserError(
            f"this installation has no trained model {name}: {TRAINED_FOLDER / name} does not exist",
            "run the demo from a checkout, or with --family, which makes a model with random weights",
        )
    what = f"{TRAINED[name]} and attention layers, trained on Python's standard library"
    return Subject(name, what, TRAINED_PROMPTS, True, TRAINED_FOLDER / name, load_checkpoint)


def has_trained(name: str) -> bool:
    return (TRAINED_FOLDER / name / "model.safetensors").is_file()
