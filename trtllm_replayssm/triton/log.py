"""The log of a Triton server: kept for a while, and read for what ended it."""

from __future__ import annotations

import re
import time
from collections import deque

#: Lines that are kept, and seconds after which none is a reason for an end that comes later.
KEPT_LINES, RECENT = 1000, 60.0
#: What tells why a server ended, the plainest first; errors of Triton's and the model's last.
REASONS = (
    r"failed to load .*?: Internal: (?:TritonModelException: )?(.*?)(?:\\n|\"$)",
    r"^error: (.*)",
    r"^\S+: ((?:unrecognized|ambiguous|invalid) option .*|option .*)",
    r"^terminate called .*\n\s*what\(\): +(.*)",
    r"^[EF]\d.*?\] \"?(.*?)\"?$",
)
#: What a server may say when its model's process has ended in the middle of a message to it: no reason, but what follows.
CONSEQUENCE = "boost::interprocess"
#: Begin a line in the format of glog, which is Triton's and the model's, and a line of Triton's tables.
LOGGED, TABLE = r"[IWEF]\d{4} \d\d:\d\d:", r"[+|]"


class ServerLog:
    """The last lines that a server has written."""

    def __init__(self) -> None:
        self.lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)

    def add(self, line: str) -> None:
        self.lines.append((time.monotonic(), line.rstrip()))

    def clear(self) -> None:
        self.lines.clear()

    def reason(self) -> str | None:
        """The error that it has told of lately; None when there is none."""
        text = "\n".join(self.recent())
        for pattern in REASONS:
            found = [told.strip() for told in re.findall(pattern, text, re.MULTILINE)]
            if causes := [told for told in found if not told.startswith(CONSEQUENCE)]:
                return str(causes[-1])
        return None

    def last_words(self) -> str | None:
        """What came last from elsewhere than the log, the system's loader for example; None when nothing did."""
        said = [line for line in self.recent() if line.strip() and not re.match(f"{LOGGED}|{TABLE}", line)]
        return said[-1] if said else None

    def recent(self) -> list[str]:
        since = time.monotonic() - RECENT
        return [line for told, line in list(self.lines) if told >= since]
