"""What the documents say of options, families and files is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtllm_replayssm.builders.families.refused import REFUSED
from trtllm_replayssm.builders.families.registry import FAMILIES
from trtllm_replayssm.cli.main import COMMANDS
from trtllm_replayssm.replay import ReplayConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert "://" in target or (document.parent / target).exists(), target


def test_readme_has_the_defaults_of_the_options() -> None:
    table = dict(
        re.findall(r"^\| `--(\w+)` \| (\w+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    defaults = ReplayConfig()
    options = {"replay_window": defaults.window, "replay_fold": defaults.fold}
    unchanged = ("max_draft_len", "state_dtype", "state_read_dtype", "state_rounding", "ring_dtype")
    options |= {name: getattr(defaults, name) for name in unchanged}
    assert table == {name: str(value) for name, value in options.items()}


def test_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [
        command for command in COMMANDS if f"`{command}`" not in text and f"trtllm-replayssm {command}" not in text
    ] == []


def test_families_are_all_listed() -> None:
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    supported, refused = text.split("## Recognised and refused")
    for family in FAMILIES:
        for name in family.architectures:
            assert f"`{name}`" in supported
    for name, reason in REFUSED.items():
        # Entries of a model_type stand beside one of the architecture.
        if name.lower() != name:
            row = next((line for line in refused.splitlines() if f"`{name}`" in line), "")
            assert reason in row, name


def test_quoted_commands_exist() -> None:
    for document in DOCUMENTS:
        for command in re.findall(r"trtllm-replayssm +([a-z][a-z-]*)", document.read_text(encoding="utf-8")):
            assert command in COMMANDS, f"{document.name}: {command}"
