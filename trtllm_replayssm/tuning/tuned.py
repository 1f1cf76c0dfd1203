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
from trtllm_replayssm.replay import ReadDtype, ReplayConfig
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.files import output_file
from trtllm_replayssm.tuning.choice import Limits
from trtllm_replayssm.tuning.measure import Row, Setting
from trtllm_replayssm.tuning.subject import recurrent_groups

FORMAT_VERSION = 2
TUNE_AGAIN = "run trtllm-replayssm tune for this checkpoint"
NOT_TUNED = "--tuned takes a file that trtllm-replayssm tune has written"
#: Fields of ReplayConfig that are no candidates and are measured as they are stored, by the names that ``build`` has for them.
HELD = {"ring_dtype": "ring_dtype", "fold": "replay_fold", "state_rounding": "state_rounding"}


def shapes(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """What times and errors depend on, as JSON values: the recurrences of one rank's layers, and the activations' dtype."""
    layers = [
        {"count": group.count, "kind": group.layer.kind} | to_dict(group.layer.attributes(ReplayConfig()))
        for group in recurrent_groups(checkpoint)
    ]
    return {"dtype": checkpoint.dtype, "tp_size": checkpoint.tp_size, "layers": layers}


def held(replay: ReplayConfig) -> dict[str, str]:
    """What all candidates had in common, by the names of ``build``'s options."""
    return {option: getattr(replay, name) for name, option in HELD.items()}


@dataclass(frozen=True)
class Choice:
    """Options of ``build`` that were chosen; their names there."""

    replay_window: int
    max_draft_len: int
    state_dtype: str
    state_read_dtype: ReadDtype


@dataclass(frozen=True)
class Tuned:
    """What ``build`` takes from the file. batch: requests of the steps that were timed. held: see ``held``. gpu: that timed."""

    choice: Choice
    batch: int
    held: dict[str, str]
    gpu: str


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
        "held": held(checkpoint.replay),
        "setting": asdict(setting),
        "limits": asdict(within),
        "choice": asdict(choice),
        "candidates": [asdict(row) for row in rows],
        "machine": machine,
    }
    with output_file(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def read_tuned(path: Path, checkpoint: CheckpointConfig) -> Tuned:
    """What the file says. Raises UserError when it is none of ours, or was made for other layers than the checkpoint's."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", NOT_TUNED) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} was not written by tune: it is not JSON, or not all of it", NOT_TUNED) from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version is None:
        raise UserError(f"{path} was not written by tune: it has no format_version", NOT_TUNED)
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format_version {version}; this version reads {FORMAT_VERSION}", TUNE_AGAIN)
    try:
        found = Tuned(Choice(**data["choice"]), data["setting"]["batch"], data["held"], data["machine"]["name"])
        check_types(found)
        tuned = dict(data["shapes"])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} was not written by tune as it is: its parts are incomplete or edited", TUNE_AGAIN
        ) from None
    own = shapes(checkpoint)
    for name, what in (("dtype", "activations in {}"), ("tp_size", "{} ranks"), ("layers", "other recurrent layers")):
        if tuned.get(name) != own[name]:
            described = what.format(tuned.get(name))
            raise UserError(f"{path} was tuned for {described}, which the checkpoint does not have", TUNE_AGAIN)
    return found


def with_choice(options: BuildOptions, choice: Choice) -> BuildOptions:
    """The options with what was chosen where they say nothing themselves."""
    given = {name: getattr(options, name) for name in vars(choice) if getattr(options, name) is not None}
    for name, value in given.items():
        if value != getattr(choice, name):
            LOGGER.warning("--%s %s is given, and taken instead of the tuned %s", name, value, getattr(choice, name))
    return replace(options, **(vars(choice) | given))


def differences(tuned: Tuned, options: BuildOptions, replay: ReplayConfig, gpu: str | None) -> list[str]:
    """Where the engine that is built will not be what was measured, a sentence each. replay: what the engine will have.

    gpu: of this machine, None where there is none.
    """
    found = [
        f"--{name} is {value}, and the choice was measured with {tuned.held.get(name)}"
        for name, value in held(replay).items()
        if value != tuned.held.get(name)
    ]
    if gpu is not None and gpu != tuned.gpu:
        found.append(f"the choice was measured on {tuned.gpu}, and this machine has {gpu}: another may be better here")
    if options.max_batch_size < tuned.batch:
        found.append(
            f"the choice was measured for steps of {tuned.batch} requests, and --max_batch_size is {options.max_batch_size}"
        )
    return found
