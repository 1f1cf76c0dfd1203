"""Prefix cache: what prompts begin with in common is computed once.

A recurrent state cannot be cut like a KV cache, so the cache keeps two things of a prompt. Keys and values of every prefill
chunk hang in a tree whose edges are the chunks' tokens, and prompts share the nodes that they have in common. State and
convolution window are kept at few nodes only, because they are large: at the last boundary of a prompt, and where a prompt
parts from one that was there before. Prompts that begin like that go on from there.

Boundaries are where the scheduler cuts prompts in any case, after ``prefill_chunk`` tokens. Right after such a chunk the
checkpoint covers every token and the ring is empty, so that a request that resumes there runs the very steps that it would
have run anyway: the cache changes no bit of any result.

Under tensor parallelism every rank keeps its own share and comes to the same decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.devices import available_bytes
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.slot_state import SlotCursors

log = logging.getLogger(__name__)

#: How torch words it that a CPU has no memory; it is a RuntimeError like many others.
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"


@dataclass
class PrefixCacheStatistics:
    """queries: prompt tokens of the requests that were looked up; hits: those of them that need not be computed."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The state after a prefix. tensors: by pool, without the slot axis. hidden: ``[hidden_size]`` of the last token."""

    cursors: SlotCursors
    tensors: dict[str, Tensor]
    hidden: Tensor


@dataclass(eq=False)
class Node:
    """One chunk behind its parent's. rows: by cache ``[heads, n, dim]``, those that became final with the chunk's tokens."""

    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Match:
    """What the cache knows of a prompt.

    resumed: tokens that the slot was given. hidden: ``[hidden_size]`` of the last of them, None without any. wanted:
    prefixes of the prompt, in tokens, that the cache would like to keep.
    """

    resumed: int
    hidden: Tensor | None
    wanted: frozenset[int]


class PrefixCache:
    """Snapshots of one session's slots, at most ``max_bytes`` of them; those not used for the longest time go first."""

    def __init__(self, session: Session, max_bytes: int) -> None:
        """The memory is not reserved, it grows to ``max_bytes`` on the session's device.

        Raises UserError unless max_bytes is positive, and EngineError when the device does not have so much left.
        """
        if max_bytes < 1:
            raise UserError(f"the prefix cache has {max_bytes} bytes", "give it room for some states, or leave it out")
        available = available_bytes(session.engine.device)
        if available is not None and max_bytes > available:
            raise EngineError(
                f"the prefix cache needs {bytes_text(max_bytes)}, but {session.engine.device} has"
                f" {bytes_text(available)} free",
                "give it less",
            )
        self.session, self.max_bytes = session, max_bytes
        self.chunk = session.engine.config.prefill_chunk
        self.root = Node()
        #: Nodes with a snapshot, the one not used for the longest time first.
        self.recent: dict[Node, None] = {}
        self.nbytes = 0
        self.statistics = PrefixCacheStatistics()

    def resume(self, prompt: Sequence[int], slot: int) -> Match:
        """Put the longest prefix that is known into an admitted slot; the prompt's last token is always left to compute."""
        path = list(self.path(prompt, len(prompt) - 1))
        wanted = {len(prompt) // self.chunk, len(path)}
        known = max((depth for depth, node in enumerate(path, 1) if node.snapshot is not None), default=0)
        self.statistics.queries += len(prompt)
        self.statistics.hits += known * self.chunk
        missing = frozenset(depth * self.chunk for depth in wanted if depth > known)
        snapshot = path[known - 1].snapshot if known else None
        if snapshot is None:
            return Match(0, None, missing)
        self.use(path[known - 1])
        for depth, node in enumerate(path[:known]):
            for name, rows in node.rows.items():
                self.session.pools[name][slot, :, self.rows(name, depth * self.chunk)] = rows
        for name, tensor in snapshot.tensors.items():
            self.session.pools[name][slot] = tensor
        self.session.place(slot, snapshot.cursors)
        return Match(known * self.chunk, snapshot.hidden, missing)

    def keep(self, prompt: Sequence[int], length: int, slot: int, hidden: Tensor) -> None:
        """Remember the first ``length`` tokens of a prompt, all that the slot holds, unless that takes too much room.

        length: a multiple of the chunk. hidden: ``[hidden_size]``, of the last of them. Where there is no memory for it, the
        cache is emptied, so that others have it; ranks that work together would no longer agree, and the error is raised.
        """
        try:
            self.add(prompt, length, slot, hidden)
        except (RuntimeError, MemoryError) as error:
            if self.session.engine.group is not None or not lacks_memory(error):
                raise
            log.warning("the prefix cache is emptied, because there is no memory left: %s", error)
            self.clear()

    def add(self, prompt: Sequence[int], length: int, slot: int, hidden: Tensor) -> None:
        rows, state = self.pools_of("kv"), self.pools_of("state", "copy", "conv")
        snapshot_bytes = hidden.nbytes + sum(pool[slot].nbytes for pool in state.values())
        while True:
            path = list(self.path(prompt, length))
            if len(path) * self.chunk == length and path[-1].snapshot is not None:
                self.use(path[-1])
                return
            chunks = [
                {name: pool[slot, :, self.rows(name, start)] for name, pool in rows.items()}
                for start in range(len(path) * self.chunk, length, self.chunk)
            ]
            needed = snapshot_bytes + sum(piece.nbytes for chunk in chunks for piece in chunk.values())
            if self.nbytes + needed <= self.max_bytes:
                break
            if needed > self.max_bytes or not self.recent:
                return
            self.evict()
        # All copies first: where there is no memory for them, nothing has changed.
        copies = [{name: piece.clone() for name, piece in chunk.items()} for chunk in chunks]
        tensors = {name: pool[slot].clone() for name, pool in state.items()}
        snapshot = Snapshot(self.session.slot_cursors(slot), tensors, hidden.clone())
        node = path[-1] if path else self.root
        for start, copy in zip(range(len(path) * self.chunk, length, self.chunk), copies):
            tokens = tuple(prompt[start : start + self.chunk])
            child = node.children[tokens] = Node(tokens, node, copy)
            node = child
        node.snapshot = snapshot
        self.recent[node] = None
        self.nbytes += needed

    def path(self, prompt: Sequence[int], length: int) -> Iterator[Node]:
        """The nodes of the first ``length`` tokens, as far as they are known."""
        node = self.root
        for start in range(0, length - self.chunk + 1, self.chunk):
            found = node.children.get(tuple(prompt[start : start + self.chunk]))
            if found is None:
                return
            yield (node := found)

    def use(self, node: Node) -> None:
        self.recent[node] = self.recent.pop(node)

    def evict(self) -> None:
        """Forget the snapshot that was not used for the longest time, and the chunks that led to it alone."""
        node: Node | None = next(iter(self.recent))
        assert node is not None
        assert node.snapshot is not None
        del self.recent[node]
        self.nbytes -= node.snapshot.hidden.nbytes + sum(tensor.nbytes for tensor in node.snapshot.tensors.values())
        self.statistics.evictions += 1
        node.snapshot = None
        while node is not None and node.parent is not None and not node.children and node.snapshot is None:
            del node.parent.children[node.tokens]
            self.nbytes -= sum(rows.nbytes for rows in node.rows.values())
            node = node.parent

    def clear(self) -> None:
        while self.recent:
            self.evict()

    def rows(self, name: str, start: int) -> slice:
        """Rows of a cache that belong to the chunk from position ``start`` on."""
        return self.session.layout[name].rows(start, start + self.chunk)

    def pools_of(self, *kinds: str) -> dict[str, Tensor]:
        return {name: pool for name, pool in self.session.pools.items() if self.session.layout[name].kind in kinds}


def lacks_memory(error: Exception) -> bool:
    """Whether it says that a GPU or a CPU has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_OUT_OF_MEMORY in str(error)
