"""How a session's steps reach the device: row by row as they are, or packed into few shapes that CUDA graphs know."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from trtllm_replayssm.network.deferred import Cast, resolved
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.graphs import StepGraphs, StepShape
from trtllm_replayssm.runtime.staging import Staging
from trtllm_replayssm.runtime.step_input import StepInput

#: Shortest bound of the KV cache that a step is sized for.
SHORTEST_KV = 256
#: Rows in steps of which larger batches are padded.
ROW_STEP = 32
INT32: dict[str, Any] = {"dtype": torch.int32}


class Steps(Protocol):
    """Runs a step of the slots ``first_slot ...``, one per row.

    Returns what the head read ``[rows, T, hidden_size]``, until the next step, and float32 logits ``[rows, T or 1, vocab]``.
    kv_len: bound of the positions that any row sees. ``warm_up`` prepares decode and verify steps up to that bound, and
    returns how many of them run as graphs.
    """

    def run(self, given: StepInput, first_slot: int, kv_len: int, last_only: bool) -> tuple[Tensor, Tensor]: ...

    def warm_up(self, kv_len: int) -> int: ...


class BoundPools:
    """A session's pools as steps of some neighbouring slots see them."""

    def __init__(self, pools: Mapping[str, Tensor]) -> None:
        self.pools = pools
        self.known: dict[tuple[int, int], dict[str, Tensor]] = {}

    def of(self, slots: slice) -> dict[str, Tensor]:
        """Views by name whose row r is slot ``slots.start + r``."""
        key = slots.start, slots.stop
        if key not in self.known:
            self.known[key] = {name: pool[slots] for name, pool in self.pools.items()}
        return self.known[key]


class DirectSteps:
    """Each step as it is given. Rows must be slots, because torch addresses a row's state by its place."""

    def __init__(self, engine: Engine, cursors: Tensor, pools: BoundPools, staging: Staging) -> None:
        self.engine, self.cursors, self.pools, self.staging = engine, cursors, pools, staging
        self.attributes = AdvanceAttributes(engine.config.replay.window)

    def run(self, given: StepInput, first_slot: int, kv_len: int, last_only: bool) -> tuple[Tensor, Tensor]:
        rows, tokens = given.token_ids.shape
        slots = torch.where(given.active, torch.arange(rows), -1).int()
        ids, *per_row = self.staging.send(given.token_ids.cpu(), slots, given.query_lens, given.modes)
        here = slice(first_slot, first_slot + rows)
        info = self.engine.plugins.advance(self.attributes, self.cursors[here], *per_row, tokens)
        net, decoder = self.engine.network(self.pools.of(here), info, kv_len), self.engine.decoder
        hidden = decoder.hidden(net, ids, self.engine.config.replay)
        return hidden, decoder.logits(net, hidden, last_only)

    def warm_up(self, kv_len: int) -> int:
        return 0


class PackedSteps:
    """Active rows alone, padded to a bucket; the kernels find a row's state by its slot.

    A decode or verify step runs as a CUDA graph, or, with ``graphs`` off, launches the very same kernels one by one.
    """

    def __init__(
        self, engine: Engine, cursors: Tensor, pools: Mapping[str, Tensor], staging: Staging, graphs: bool
    ) -> None:
        self.engine, self.cursors, self.pools, self.staging = engine, cursors, dict(pools), staging
        self.attributes = AdvanceAttributes(engine.config.replay.window)
        self.positions = engine.config.max_seq_len + engine.config.replay.max_draft_len
        self.graphs = StepGraphs(engine.device) if graphs else None

    def run(self, given: StepInput, first_slot: int, kv_len: int, last_only: bool) -> tuple[Tensor, Tensor]:
        rows, tokens = given.token_ids.shape
        active = given.active.nonzero()[:, 0]
        count, whole = len(active), len(active) == rows
        shape = self.shape_for(count, rows, tokens, kv_len, last_only)
        slots, lengths, modes = (torch.full((shape.rows,), fill, **INT32) for fill in (-1, 1, int(RowMode.DECODE)))
        slots[:count] = active.int() + first_slot
        lengths[:count], modes[:count] = given.query_lens[active], given.modes[active]
        decode = tokens <= MAX_VERIFY_TOKENS
        captured = self.graphs.get(shape, self.forward) if self.graphs is not None and decode else None
        inputs = (
            torch.zeros(shape.input_size, **INT32, device=self.engine.device) if captured is None else captured.inputs
        )
        if given.token_ids.device.type == "cuda":
            self.staging.send_into(inputs[shape.rows * tokens :], slots, lengths, modes)
            chosen = given.token_ids if whole else given.token_ids[self.staging.send(active.int())[0]]
            shape.inputs(inputs)[0][:count] = chosen
        else:
            ids = torch.zeros(shape.rows, tokens, **INT32)
            ids[:count] = given.token_ids[active]
            self.staging.send_into(inputs, ids, slots, lengths, modes)
        if captured is None:
            hidden, logits = (resolved(result) for result in self.forward(shape, inputs))
        else:
            captured.graph.replay()
            hidden, logits = captured.hidden, captured.logits
        if whole:
            return hidden[:rows], logits[:rows].to(torch.float32, copy=captured is not None)
        # Rows that are not active get someone else's results, which mean nothing.
        places = torch.zeros(rows, **INT32)
        places[active] = torch.arange(count, **INT32)
        (places,) = self.staging.send(places)
        return hidden.index_select(0, places), logits.index_select(0, places).float()

    def warm_up(self, kv_len: int) -> int:
        """Capture every bucket of rows and of positions up to ``kv_len``, for one token a row and for a whole verify step."""
        if self.graphs is None:
            return 0
        config = self.engine.config
        rows = {row_bucket(count, config.max_batch_size) for count in range(1, config.max_batch_size + 1)}
        lengths = {
            kv_bucket(length, self.positions) for length in range(1, min(kv_len, self.positions) + 1, SHORTEST_KV)
        }
        lengths.add(kv_bucket(kv_len, self.positions))
        # The largest first: what it allocates serves the others.
        for count, length in sorted(product(rows, lengths), reverse=True):
            for tokens in {1, config.replay.verify_tokens}:
                self.graphs.get(StepShape(count, tokens, length, False), self.forward)
        return len(self.graphs.captured)

    def shape_for(self, count: int, rows: int, tokens: int, kv_len: int, last_only: bool) -> StepShape:
        """The shape that a step of ``count`` active rows is padded to; a prefill keeps its own."""
        if tokens > MAX_VERIFY_TOKENS:
            return StepShape(max(1, count), tokens, kv_len, last_only)
        padded = row_bucket(count, self.engine.config.max_batch_size)
        return StepShape(padded, tokens, kv_bucket(kv_len, self.positions), last_only)

    def forward(self, shape: StepShape, inputs: Tensor) -> tuple[Any, Any]:
        """What the head reads, and the logits, in the dtype of the head where their conversion can be put off."""
        ids, slots, lengths, modes = shape.inputs(inputs)
        info = self.engine.plugins.advance(self.attributes, self.cursors, slots, lengths, modes, shape.tokens)
        net, decoder = self.engine.network(self.pools, info, shape.kv_len), self.engine.decoder
        hidden = decoder.hidden(net, ids, self.engine.config.replay)
        logits = decoder.logits(net, hidden, shape.last_only)
        return hidden, logits.x if isinstance(logits, Cast) and logits.pending else logits


def row_bucket(count: int, most: int) -> int:
    """The smallest bucket of ``count`` rows: a power of two up to ROW_STEP, then a multiple of it, ``most`` at most."""
    size = 1
    while size < min(count, ROW_STEP):
        size *= 2
    return min(most, size if count <= ROW_STEP else -(-count // ROW_STEP) * ROW_STEP)


def kv_bucket(length: int, most: int) -> int:
    """The smallest bucket of ``length`` positions: a power of two from SHORTEST_KV on, ``most`` at most."""
    size = SHORTEST_KV
    while size < length:
        size *= 2
    return min(most, size)
