"""TensorRT's reports: what they may not do while TensorRT holds its lock."""

from __future__ import annotations

import subprocess
import sys

#: An object of TensorRT whose last reference goes while TensorRT reports, in a cycle that only the collector finds; what is
#: allocated then calls the collector.
GARBAGE_IN_A_REPORT = """
import gc, logging
from trtllm_replayssm.compat import load_tensorrt
from trtllm_replayssm.network.tensorrt.log import tensorrt_log

tensorrt, kept, reports = load_tensorrt(("tensorrt_rtx",)), [], []
log = tensorrt_log(tensorrt.module)
# TensorRT reports a second logger, under the lock of the first.
first = tensorrt.module.Runtime(tensorrt.module.Logger(tensorrt.module.Logger.ERROR))

def drop(record):
    reports.append(record)
    kept.clear()
    return str([[n] for n in range(5000)])

handler = logging.StreamHandler()
handler.format = drop
logger = logging.getLogger("trtllm_replayssm.tensorrt")
logger.addHandler(handler)
logger.setLevel(logging.DEBUG)
cycle = {"runtime": tensorrt.module.Runtime(log)}
cycle["itself"] = cycle
kept.append(cycle)
del cycle
reports.clear()
builder = tensorrt.builder(log)
print("made with", "reports" if reports else "none")
"""


def test_nothing_of_tensorrt_is_collected_while_it_reports() -> None:
    """It would wait for the lock that the report holds; a builder was never made then."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", GARBAGE_IN_A_REPORT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "made with reports"
