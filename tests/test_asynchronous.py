"""Coroutines over one scheduler: streams side by side, and a front that closes and opens."""

from __future__ import annotations

import asyncio

import pytest
import synthetic
from scheduling import MODEL, OPTIONS, alone, request, scheduler

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.asynchronous import AsyncScheduler
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.outputs import Update


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("scheduler") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


def test_coroutines_stream_at_the_same_time(engine: Engine) -> None:
    """Ten streams of which one is left early, one cannot be run, and one has an id in use."""

    async def stream(front: AsyncScheduler, name: int) -> list[int]:
        tokens = []
        async for update in front.generate(request(engine, name, [2 + name], max_tokens=5 + name)):
            assert update.error is None
            tokens += update.token_ids
        return tokens

    async def leave(front: AsyncScheduler) -> None:
        updates = front.generate(request(engine, 50, [60], max_tokens=60))
        async for update in updates:
            if update.token_ids:
                break
        await updates.aclose()  # type: ignore[attr-defined]

    async def scenario() -> list[list[int]]:
        made = scheduler(engine)
        async with AsyncScheduler(made) as front:
            left, *streams = (
                asyncio.create_task(leave(front)),
                *(asyncio.create_task(stream(front, n)) for n in range(9)),
            )
            await asyncio.sleep(0)
            with pytest.raises(UserError, match="running already"):
                await stream(front, 3)
            with pytest.raises(UserError, match="is empty"):
                await anext(front.generate(request(engine, 99, [], max_tokens=1)))
            tokens = await asyncio.gather(*streams)
            await left
            assert await asyncio.wait_for(stream(front, 50), 20)
            assert not made.busy
            assert not front.streams
        return tokens

    for name, tokens in enumerate(asyncio.run(scenario())):
        assert tokens == alone(engine, 0, [2 + name], max_tokens=5 + name).tokens


def test_a_front_that_is_closed_ends_its_streams_and_can_be_opened_again(engine: Engine) -> None:
    async def scenario() -> tuple[Update, list[int]]:
        front = AsyncScheduler(scheduler(engine))
        async with front:
            updates = front.generate(request(engine, 0, [2], max_tokens=60))
            await anext(updates)
        last = [update async for update in updates][-1]
        async with front:
            again = [update async for update in front.generate(request(engine, 0, [2], max_tokens=9))]
        return last, [token for update in again for token in update.token_ids]

    last, tokens = asyncio.run(scenario())
    assert isinstance(last.error, UserError)
    assert tokens == alone(engine, 0, [2], max_tokens=9).tokens
