"""Names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """As a person knows it; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
