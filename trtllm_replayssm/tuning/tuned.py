"""The file that ``tune`` writes and ``build`` reads: what was measured, what was chosen, and for which layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trtllm_replayssm
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.base import to_dict
from trtllm_replayssm.builders.typed import check_types
from trtllm_replayssm.console import LOGGER
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import ReadDtype
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.files import output_file
from trtllm_replayssm.tuning.choice import Limits
from trtllm_replayssm.tuning.measure import Row, Setting
from trtllm_replayssm.tuning.subject import recurrent_groups

FORMAT_VERSION = 1
TUNE_AGAIN = "run trtllm-replayssm tune for this checkpoint"
NOT_TUNED = "--tuned takes a file that trtllm-replayssm tune has written"


def shapes(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """What times and errors depend on, as JSON values: the recurrent layers of one rank, and the activations' dtype."""
    groups = recurrent_groups(checkpoint)
    layers = [{"count": group.count, "layer": to_dict(group.layer)} for group in groups]
    return {"dtype": checkpoint.dtype, "tp_size": checkpoint.tp_size, "layers": layers}


@dataclass(frozen=True)
class Choice:
    """Options of ``build`` that were chosen; their names there."""

    replay_window: int
    max_draft_len: int
    state_dtype: str
    state_read_dtype: ReadDtype


def write_tuned(
    path: Path,
    checkpoint: CheckpointConfig,
    setting: Setting,
    rows: Sequence[Row],
    within: Limits,
    taken: Row,
    machine: dict[str, Any],
) -> None:
    """Write the file; it appears complete or not at all."""
    candidate = taken.candidate
    choice = Choice(candidate.window, setting.draft_len, candidate.state_dtype, candidate.read_dtype)
    data = {
        "format_version": FORMAT_VERSION,
        "package_version": trtllm_replayssm.__version__,
        "architecture": checkpoint.hf_architecture,
        "shapes": shapes(checkpoint),
        "setting": asdict(setting),
        "limits": asdict(within),
        "choice": asdict(choice),
        "candidates": [asdict(row) for row in rows],
        "machine": machine,
    }
    with output_file(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def read_choice(path: Path, checkpoint: CheckpointConfig) -> Choice:
    """The choice in the file. Raises UserError when it is none of ours, or was made for other layers than the checkpoint's."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format_version {version}; this version reads {FORMAT_VERSION}", TUNE_AGAIN)
        choice, tuned = Choice(**data["choice"]), dict(data["shapes"])
        check_types(choice)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", NOT_TUNED) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} was not written by tune: {error!r}", NOT_TUNED) from None
    own = shapes(checkpoint)
    for name, what in (("dtype", "activations in {}"), ("tp_size", "{} ranks"), ("layers", "other recurrent layers")):
        if tuned.get(name) != own[name]:
            found = what.format(tuned.get(name))
            raise UserError(f"{path} was tuned for {found}, which the checkpoint does not have", TUNE_AGAIN)
    return choice


def with_choice(options: BuildOptions, choice: Choice) -> BuildOptions:
    """The options with what was chosen where they say nothing themselves."""
    given = {name: getattr(options, name) for name in vars(choice) if getattr(options, name) is not None}
    for name, value in given.items():
        if value != getattr(choice, name):
            LOGGER.warning("--%s %s is given, and taken instead of the tuned %s", name, value, getattr(choice, name))
    return replace(options, **(vars(choice) | given))
