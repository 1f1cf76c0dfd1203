"""Prompts of every family resume from the prefix cache in another slot, as transformers would go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import spoiled
from test_family_preemption import go_on
from test_parity import ROWS, absorb, case, every_model, spoiled_session

from trtllm_replayssm.runtime.prefix_cache import PrefixCache

PLENTY = 1 << 26


@every_model
@pytest.mark.parametrize("chunk", [8, 10])
def test_a_prompt_that_grew_resumes_in_another_slot(name: str, chunk: int) -> None:
    """Its beginning was kept when there was no more of it; blocks of an indexer end at chunks of 8, and not at chunks of 10."""
    c = case(name)
    engine = replace(c.engine, config=replace(c.engine.config, max_num_tokens=ROWS * chunk))
    session = spoiled_session(engine)
    cache, prompt = PrefixCache(session, PLENTY), c.ids[0].tolist()
    for length in (chunk, 2 * chunk, 4 * chunk):
        session.admit(0)
        held = cache.resume(prompt[: length + 1], 0).resumed
        for start in range(held, length, chunk):
            absorb(session, c.ids[:1, start : start + chunk])
        cache.keep(prompt, length, 0, session.hidden[0, -1])
    # What lies in the slot is of no use to the cache any more.
    for pool in session.pools.values():
        spoiled(pool)
    session.admit(1)
    assert cache.resume(prompt, 1).resumed == 4 * chunk
    go_on(c, session, 1, 0, 4 * chunk)
