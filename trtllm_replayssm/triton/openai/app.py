"""The front's handlers: what comes by HTTP goes to the Triton server, and the answer back."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.sampling import MASK64, SamplingParams
from trtllm_replayssm.runtime.tokenizer import Tokenizer
from trtllm_replayssm.triton.openai.answers import Chat, Completion, Form, Json, joined, usage
from trtllm_replayssm.triton.openai.backend import Backend, Piece
from trtllm_replayssm.triton.openai.chat import ChatTemplate
from trtllm_replayssm.triton.openai.failures import Failure, NotFoundError, failures
from trtllm_replayssm.triton.openai.protocol import (
    CHAT,
    COMPLETION,
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    Wanted,
    chat_logprobs,
    check_keys,
    prompts_of,
    wanted,
)

#: Largest body of a request, in bytes; a prompt of a million tokens is smaller.
MAX_BODY = 64 << 20


@dataclass(frozen=True)
class Choice:
    """One continuation to make. index: its place in the answer."""

    index: int
    token_ids: list[int]
    params: SamplingParams


class Front:
    """The interface of one engine, behind one Triton server."""

    def __init__(self, engine_dir: Path, model: str, backend: Backend) -> None:
        """model: name under which the engine is served. Raises UserError for an engine without a tokenizer."""
        self.config, self.model, self.backend = EngineConfig.read(engine_dir), model, backend
        self.tokenizer, self.template = Tokenizer(engine_dir), ChatTemplate(engine_dir)
        self.created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[failures])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.one_model)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    # ---- what is served ----------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if await self.backend.is_ready() else 503)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.description()]})

    async def one_model(self, request: web.Request) -> web.Response:
        self.check_model(request.match_info["name"])
        return web.json_response(self.description())

    def description(self) -> Json:
        longest = self.config.max_seq_len
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "trtllm-replayssm",
            "max_model_len": longest,
        }

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise NotFoundError(f"model {name!r} is not served here", f"it is {self.model}")

    # ---- continuations -----------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        given = check_keys(await body(request), COMPLETION, "prompt")
        self.check_model(given.get("model"))
        asked = wanted(given, DEFAULT_MAX_TOKENS, given.get("logprobs"), seed=secrets.randbits(31))
        prompts = [p if isinstance(p, list) else self.tokenizer.encode(p) for p in prompts_of(given)]
        form = Completion(self.model, self.token_text, asked.params.logprobs is not None)
        return await self.answer(request, form, asked, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        given = check_keys(await body(request), CHAT, "messages")
        self.check_model(given.get("model"))
        asked = wanted(given, None, chat_logprobs(given), seed=secrets.randbits(31))
        text = self.template.prompt(given["messages"], given.get("chat_template_kwargs", {}))
        # The template has written the special tokens already.
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        form = Chat(self.model, self.token_text, asked.params.logprobs is not None)
        return await self.answer(request, form, asked, [prompt])

    async def answer(
        self, request: web.Request, form: Form, asked: Wanted, prompts: Sequence[list[int]]
    ) -> web.StreamResponse:
        choices = self.choices(asked, prompts)
        read = sum(map(len, prompts))
        if asked.stream:
            return await self.stream(request, form, asked, choices, read)
        pieces = await gathered([self.whole(choice) for choice in choices])
        return web.json_response(form.answer(pieces, usage(read, sum(len(piece.token_ids) for piece in pieces))))

    def choices(self, asked: Wanted, prompts: Sequence[list[int]]) -> list[Choice]:
        """Every continuation. Raises UserError, before any is begun, for prompts that do not fit."""
        if len(prompts) * asked.n > MAX_CHOICES:
            raise UserError(f"{len(prompts)} prompts with n {asked.n} are more than {MAX_CHOICES} continuations")
        known, longest = self.config.checkpoint.num_tokens or self.config.decoder().vocab_size, self.config.max_seq_len
        for token in asked.params.stop_token_ids:
            if token >= known:
                raise UserError(f"end token {token} does not exist; the model has ids 0 to {known - 1}")
        made: list[Choice] = []
        for prompt in prompts:
            if not prompt:
                raise UserError("a prompt is empty", "it needs at least one token")
            for token in prompt:
                if not 0 <= token < known:
                    raise UserError(f"token id {token} does not exist; the model has ids 0 to {known - 1}")
            room = longest - len(prompt)
            if (asked.max_tokens or 1) > room:
                raise UserError(
                    f"{len(prompt)} prompt tokens and {asked.max_tokens or 1} output tokens are more than the model's {longest}"
                )
            for i in range(asked.n):
                params = replace(
                    asked.params, max_tokens=asked.max_tokens or room, seed=(asked.params.seed + i) & MASK64
                )
                made.append(Choice(len(made), prompt, params))
        return made

    async def whole(self, choice: Choice) -> Piece:
        return joined([piece async for piece in self.backend.stream(choice.token_ids, choice.params)])

    async def stream(
        self, request: web.Request, form: Form, asked: Wanted, choices: Sequence[Choice], read: int
    ) -> web.StreamResponse:
        """Server-sent events. Headers wait for the first piece, so that a request that cannot be run has an error status."""
        pieces = merged([self.pieces(choice) for choice in choices])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        opened: set[int] = set()
        tokens = 0

        async def send(data: Json | None) -> None:
            if data is not None:
                await response.write(f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())

        try:
            async for index, piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                if index not in opened:
                    opened.add(index)
                    await send(form.opening(index))
                tokens += len(piece.token_ids)
                await send(form.chunk(index, piece))
        except ConnectionResetError:
            # Nobody is there to be told.
            raise
        except Exception as error:
            if not response.prepared:
                raise
            await send(Failure.of(error).body())
        else:
            if asked.include_usage:
                await send(form.usage_chunk(usage(read, tokens)))
        finally:
            await pieces.aclose()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def pieces(self, choice: Choice) -> AsyncIterator[tuple[int, Piece]]:
        async for piece in self.backend.stream(choice.token_ids, choice.params):
            yield choice.index, piece

    def token_text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)


async def body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {error}") from None


async def gathered(works: Sequence[Any]) -> list[Piece]:
    """Results of all; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(sources: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[Any, None]:
    """Items of all sources as they come. When one fails, so does this; leaving it early ends them all."""
    items: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()

    async def pump(source: AsyncIterator[Any]) -> None:
        try:
            async for item in source:
                items.put_nowait((True, item))
            items.put_nowait((False, None))
        except Exception as error:
            items.put_nowait((False, error))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            more, item = await items.get()
            if more:
                yield item
            elif item is not None:
                raise item
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
