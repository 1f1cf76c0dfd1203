"""Many prompts through ``LLM`` at once; slots are filled again as texts end.

Usage: python offline_batch.py ENGINE_DIR [PROMPTS.txt]    (one prompt a line)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trtllm_replayssm import LLM, SamplingParams

PROMPTS = [f"Item {i}: the state of a request is" for i in range(16)]


def main(engine_dir: Path, prompts: list[str]) -> None:
    llm = LLM(engine_dir)
    # Parameters of each prompt; a seed makes a sampled text the same in any batch.
    params = [
        SamplingParams(max_tokens=8 + 4 * (i % 4), temperature=0.8, top_p=0.95, seed=i) for i in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for output in outputs:
        print(f"[{output.request_id}] {output.prompt!r} -> {output.outputs[0].text!r}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{tokens} tokens of {len(outputs)} prompts in {seconds:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    given = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines() if len(sys.argv) == 3 else PROMPTS
    main(Path(sys.argv[1]), given)
