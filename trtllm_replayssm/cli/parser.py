"""The parser of a command: it says which option was likely meant by one that it does not know."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Prints defaults, but not the ones that only mean that an option was not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        means_nothing = action.default is None or action.default is False or action.default == []
        return action.help if means_nothing else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown arguments itself, and before it misses others, so that usage and message are of the mistake made."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # argparse takes what follows "--" for positional, and a word with a space in it for a value.
        options = args[: args.index("--")] if "--" in args else args
        names = [word.partition("=")[0] for word in options if word.startswith("--") and " " not in word]
        unknown = [name for name in names if name not in self._option_string_actions]
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.meant(unknown[0])}")
        known, surplus = super().parse_known_args(args, namespace)
        if surplus:
            self.error(f"unrecognized arguments: {' '.join(surplus)}")
        return known, surplus

    def meant(self, name: str) -> str:
        """A question for the option whose name is closest, if any is close. Names have underscores."""
        near = difflib.get_close_matches("--" + name[2:].replace("-", "_"), self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""
