"""A Triton server on GPUs: clients of every interface get what the command gives, from one GPU and from two."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import synthetic
import torch

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions
from trtllm_replayssm.triton.installation import installed_server, package_folder

if TYPE_CHECKING:
    from served_ranks import Text

MISSING = [name for name in ("tritonclient", "aiohttp", "psutil") if find_spec(name) is None]
if installed_server() is None and package_folder() is None:
    MISSING.append("a Triton server (pip install '.[serve]')")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

#: Every recurrence in sizes that the kernels take, attention and experts; fewer slots than clients.
MODEL = HybridDecoder(
    synthetic.TEXT_VOCAB_SIZE,
    64,
    1e-5,
    (*synthetic.REAL_HEADS, Attention(4, 2, 64, 0.125), Moe(8, 3, 32, "swiglu", "softmax")),
)
OPTIONS = BuildOptions(max_batch_size=6, max_seq_len=2048, max_num_tokens=256)
REPLAY = ReplayConfig(window=8, max_draft_len=3)


@pytest.mark.parametrize(
    ("gpus", "options"),
    [(1, ()), (2, ()), (2, ("--speculative_decoding_mode", "ngram"))],
    ids=["one", "two", "two-ngram"],
)
def test_served_texts_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, options: tuple[str, ...]
) -> None:
    """With CUDA graphs; on two GPUs also after one of them was lost."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA GPUs")
    from served_ranks import check_end, check_interfaces, check_lost_rank
    from serving import serving

    # In every process: a checkout in the working folder must not hide the package.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    engine = tmp_path / "tiny"
    # No end token: random weights would end texts where nobody expects it.
    synthetic.write_engine(engine, MODEL, OPTIONS, text=True, tp_size=gpus, replay=REPLAY, eos_token_ids=())
    expected = generated(engine)
    with serving(engine, *options) as served:
        check_interfaces(served, engine.name, expected)
        assert served.settled()["replayssm_accepted_draft_tokens_total"] > 0
        if gpus > 1:
            check_lost_rank(served, engine.name, expected[0])
        check_end(served)


def generated(engine: Path) -> list[Text]:
    """What ``generate`` makes of the prompts."""
    from served_ranks import OUTPUT_TOKENS, PROMPTS, Text

    rows = engine.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    line = [
        sys.executable,
        "-m",
        "trtllm_replayssm",
        "generate",
        "--engine_dir",
        str(engine),
        "--input_file",
        str(rows),
    ]
    done = subprocess.run(
        [*line, "--max_output_len", str(OUTPUT_TOKENS)], capture_output=True, text=True, timeout=180, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(row) for row in done.stdout.splitlines()]
    return [Text(prompt, row["output_ids"], row["text"]) for prompt, row in zip(PROMPTS, found, strict=True)]
