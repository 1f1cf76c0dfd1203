"""Text through ``LLM``, then the layer below it: a session whose drafts are verified and rolled back.

Usage: python speculate.py ENGINE_DIR    (an engine that was built with --max_draft_len 3 or more)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.runtime.session import Session

PROMPT = "one two three one two three one two"


def lookup_drafts(tokens: list[int], count: int) -> list[int]:
    """Drafts from the text itself: what followed the last two tokens when they occurred before."""
    for start in range(len(tokens) - 3, -1, -1):
        if tokens[start : start + 2] == tokens[-2:]:
            return tokens[start + 2 : start + 2 + count]
    return []


def speculate(session: Session, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Greedy tokens of one request in slot 0, and the steps they took. Drafts change the steps, never the tokens."""
    known = session.engine.config.checkpoint.num_tokens
    session.admit(0)
    tokens = [*prompt, int(session.prefill(0, torch.tensor(prompt))[:known].argmax())]
    steps = 0
    while len(tokens) - len(prompt) < count:
        drafts = lookup_drafts(tokens, session.replay.max_draft_len)
        chosen = session.step([[tokens[-1], *drafts]])[0, :, :known].argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == chosen[right]:
            right += 1
        # The sampled token and the drafts that were right stay; the cursor does not move over the rest.
        session.commit(0, [1 + right])
        tokens += chosen[: 1 + right]
        steps += 1
    return tokens[len(prompt) :][:count], steps


def main(engine_dir: Path) -> None:
    llm = LLM(engine_dir)
    if llm.session.replay.max_draft_len == 0:
        print("this engine has no room for drafts: build it with --max_draft_len 3 to see fewer steps")
    output = llm.generate(PROMPT, SamplingParams(max_tokens=48, end_id=-1))
    plain = output.outputs[0].token_ids
    print(f"{PROMPT!r} goes on: {output.outputs[0].text!r}")
    tokens, steps = speculate(llm.session, llm.tokenizer.encode(PROMPT), 48)
    print(f"with drafts: the same tokens: {tokens == plain}, in {steps} steps instead of {len(plain) - 1}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python speculate.py ENGINE_DIR")
    main(Path(sys.argv[1]))
