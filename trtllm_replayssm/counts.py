"""Counts that users give, in options and files: at least so much, and no more than any machine could mean."""

from __future__ import annotations

from trtllm_replayssm.errors import UserError

#: No count is larger: token ids, positions and rows are 32-bit integers in steps and kernels.
LARGEST = 2**31 - 1


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raises UserError, which calls the count ``name``, unless it is an integer from ``least`` to LARGEST."""
    if type(value) is not int:
        raise UserError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise UserError(f"{name} is {integer_text(value)}; it must be {least} or more")
    if value > LARGEST:
        raise UserError(f"{name} is {integer_text(value)}; it must be {LARGEST} or less")


def integer_text(value: int) -> str:
    """The integer, or how long it is where nobody would read it."""
    text = str(value)
    return text if len(text) <= 20 else f"a number of {len(text.removeprefix('-'))} digits"
