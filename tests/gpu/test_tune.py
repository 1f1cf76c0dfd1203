"""``tune`` on the GPU: real times, errors of the kernels that were timed, and a file that ``build`` takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from synthetic import REAL_HEADS, decoder, write_checkpoint

from trtllm_replayssm.cli.main import main
from trtllm_replayssm.runtime.engine_config import EngineConfig


@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_layer_is_tuned_and_built(tmp_path: Path, draft_len: int) -> None:
    """A read copy costs the outputs what its format loses, and the state nothing."""
    checkpoint, tuned = (
        write_checkpoint(tmp_path / "checkpoint", decoder(REAL_HEADS[:1]), dtype="bfloat16"),
        tmp_path / "t",
    )
    sizes = ["--batch_size", "64", "--draft_len", str(draft_len), "--windows", "8", "--error_tokens", "512"]
    kinds = ["--state_dtypes", "float32", "--read_dtypes", "same", "nvfp4", "--repeats", "3", "--max_error", "0.004"]
    assert main(["tune", "--checkpoint_dir", str(checkpoint), *sizes, *kinds, "--output", str(tuned)]) == 0
    same, copied = json.loads(tuned.read_text())["candidates"]
    for row in (same, copied):
        assert all(0 < microseconds < 1e4 for microseconds in row["times"].values())
        assert row["drift"]["state"] < 1e-4
    assert same["drift"]["last"] < 5e-3 and same["drift"]["last"] < copied["drift"]["last"] < 0.3
    assert same["drift"]["state"] == copied["drift"]["state"]
    build = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert main([*build, "--engine_flavour", "embedded", "--tuned", str(tuned)]) == 0
    replay = EngineConfig.read(tmp_path / "engine").replay
    assert (replay.window, replay.max_draft_len, replay.state_read_dtype) == (8, draft_len, "same")
