"""A session: the state pools of an engine's slots, and the steps that advance them.

A slot is the place of one running request. The session keeps, for every slot, pools (checkpoints, rings, KV caches) and a
cursor row on the device, and a copy of the cursors on the host, which follows the same rule and is never read back.
A request's life: ``admit``, ``prefill``, then ``step`` and ``commit`` in turn. Under tensor parallelism every rank makes
the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import Cursor, RowMode, Step
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS
from trtllm_replayssm.runtime.devices import check_memory
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.graphs import graphs_wanted
from trtllm_replayssm.runtime.prediction import Prediction, TorchPrediction
from trtllm_replayssm.runtime.slot_state import SlotCursors, SlotState, layer_pools, recurrences
from trtllm_replayssm.runtime.staging import Staging
from trtllm_replayssm.runtime.step_input import PerRow, StepInput
from trtllm_replayssm.runtime.steps import BoundPools, DirectSteps, PackedSteps, Steps


class Session:
    """The running requests of one engine.

    cursors: int32 ``[slots, CURSOR_WORDS]`` and pools: ``[slots, ...]`` by name, on the device.
    max_batch_size: slots that can take part in a step; the snapshot slots behind them only hold state.
    """

    def __init__(self, engine: Engine, snapshot_slots: int = 0, cuda_graphs: bool | None = None) -> None:
        """Allocates the pools. Raises EngineError when they do not fit into the device's memory.

        cuda_graphs: whether decode steps run as CUDA graphs where the engine has the CUDA kernels; None for what the
        environment says (runtime.graphs.SWITCH). Results are the same, bit by bit.
        """
        self.engine, config = engine, engine.config
        self.replay = config.replay
        self.max_batch_size = config.max_batch_size
        self.slots = config.max_batch_size + snapshot_slots
        check_memory(engine.device, 0, self.slots, config.slot_bytes(), config.built)
        self.layout = config.pools()
        allocated = {name: pool.allocate(self.slots, engine.device) for name, pool in self.layout.items()}
        self.cursors = allocated.pop("cursors")
        self.pools, self.bound = allocated, BoundPools(allocated)
        self.staging = Staging(engine.device)
        self.graphs = graphs_wanted() if cuda_graphs is None else cuda_graphs
        self.steps = self.steps_for(self.graphs)
        self.host = self.cursors.cpu().clone()
        #: Per slot: tokens of the last step that no commit has settled, and whether they are folded already.
        self.pending = torch.zeros(self.slots, dtype=torch.int32)
        self.absorbed = torch.zeros(self.slots, dtype=torch.bool)
        self.written = torch.zeros(self.slots, dtype=torch.int32)
        #: Slots that took part in the last step, as ``active`` rows from a slot on.
        self.took_part = (0, torch.zeros(0, dtype=torch.bool))
        #: How often a slot's checkpoint was rewritten, prefill included.
        self.rewrites = 0
        #: What the head read in the last step, ``[rows, T, hidden_size]``; it feeds an MTP head.
        self.hidden: Tensor = torch.empty(0)

    def steps_for(self, cuda_graphs: bool) -> Steps:
        engine = self.engine
        if engine.config.engine_flavour == "tensorrt":
            # It knows TensorRT, which embedded engines do without.
            from trtllm_replayssm.runtime.tensorrt.steps import plan_steps

            return plan_steps(engine, self.cursors, self.pools, self.staging, cuda_graphs)
        if engine.plugins.name == "cuda":
            return PackedSteps(engine, self.cursors, self.pools, self.staging, cuda_graphs)
        return DirectSteps(engine, self.cursors, self.bound, self.staging)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def warm_up(self, kv_len: int | None = None) -> int:
        """Capture the CUDA graphs that decode and full verify steps will need, so that no request waits for it.

        kv_len: tokens of a request up to which; by default max_seq_len. Changes nothing that a slot holds. Returns how many
        graphs there are then: 0 where steps do not run as graphs.
        """
        longest = self.engine.config.max_seq_len if kv_len is None else kv_len
        return self.steps.warm_up(longest)

    @torch.no_grad()
    def step(
        self,
        token_ids: Tensor | Sequence[Sequence[int]],
        first_slot: int = 0,
        query_lens: PerRow | None = None,
        modes: PerRow | None = None,
        active: PerRow | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Run one step of the slots ``first_slot ...``, one per row; nothing counts before ``commit``.

        token_ids: integers ``[rows, T]``: sampled token and drafts of a DECODE row, prompt tokens of an ABSORB row. On a GPU
        they may lie there already: then nothing waits for them, and they must be in the vocabulary.
        query_lens: valid tokens of each row, ``[rows]``; all T by default. modes: RowMode of each row; DECODE by default.
        active: bool ``[rows]``; rows that are not neither read nor write their slot, and their logits mean nothing.
        last_only: logits of each row's last valid token only.

        A step whose tokens were not committed counts as rejected, except where they are folded already (ABSORB, and the
        one token of a T = 1 step that filled the window): those must be committed in full first.

        Returns float32 ``[rows, T, vocab_size]``, or ``[rows, 1, vocab_size]``. Raises UserError, before anything is
        changed, when the step does not fit the engine or the slots.
        """
        asked = StepInput.create(token_ids, query_lens, modes, active, self.engine.decoder.vocab_size)
        length = asked.token_ids.shape[1]
        short_prompts = length < self.prompt_width and bool((asked.modes[asked.active] == RowMode.ABSORB).all())
        given = asked.widened(self.prompt_width) if short_prompts else asked
        rows, tokens = given.token_ids.shape
        self.check_step(given, first_slot)
        self.check_logits(given, last_only)
        here = slice(first_slot, first_slot + rows)
        slot_ids = torch.where(given.active, torch.arange(rows), -1).int()
        attributes = AdvanceAttributes(self.replay.window)
        plan = advance(attributes, self.host[here], slot_ids, given.query_lens, given.modes, tokens)
        live, ends = given.active, plan[:, Step.COMMITTED] + plan[:, Step.QUERY_LEN]
        self.took_part = (first_slot, live.clone())
        self.pending[here] = torch.where(live, given.query_lens, self.pending[here])
        self.absorbed[here] = torch.where(live, plan[:, Step.FOLD_TO] > plan[:, Step.COMMITTED], self.absorbed[here])
        self.written[here] = torch.maximum(self.written[here], ends)
        self.rewrites += int((live & (plan[:, Step.FOLD_TO] > plan[:, Step.FOLDED])).sum())

        hidden, logits = self.steps.run(given, first_slot, int(ends.max()), last_only)
        self.hidden = hidden[:, :length]
        return logits[:, :length]

    @cached_property
    def prompt_width(self) -> int:
        """Fewest tokens a row of a step that takes prompts alone.

        With read copies a short step answers from the copy and a long one from the checkpoint. What a prompt leaves behind must
        not depend on how many tokens other prompts bring to its step, so that all of them are long, if the engine has any.
        """
        if self.replay.state_read_dtype == "same":
            return 1
        return min(MAX_VERIFY_TOKENS + 1, self.engine.config.prefill_chunk)

    @cached_property
    def prediction(self) -> Prediction:
        """Runs the decoder's prediction head, where the checkpoint has one."""
        engine = self.engine
        if engine.config.engine_flavour == "tensorrt":
            from trtllm_replayssm.runtime.tensorrt.prediction import PlanPrediction

            return PlanPrediction(engine, self.cursors, self.pools, self.staging, self.graphs)
        return TorchPrediction(engine, self.bound)

    def check_step(self, given: StepInput, first_slot: int) -> None:
        """Raises UserError when the rows do not fit the slots they are meant for."""
        rows, tokens = given.token_ids.shape
        config, here = self.engine.config, slice(first_slot, first_slot + rows)
        if first_slot < 0 or first_slot + rows > self.max_batch_size:
            raise UserError(
                f"{rows} rows from slot {first_slot} do not fit max_batch_size {self.max_batch_size}",
                "build the engine with a larger --max_batch_size",
            )
        if rows * tokens > config.max_num_tokens:
            raise UserError(
                f"a step of {rows} x {tokens} tokens is more than max_num_tokens {config.max_num_tokens}",
                "prefill in smaller chunks, or build the engine with a larger --max_num_tokens",
            )
        absorbs, live = given.modes == RowMode.ABSORB, given.active
        if bool((live & ~absorbs & (given.query_lens > self.replay.verify_tokens)).any()):
            raise UserError(
                f"a decode row takes at most {self.replay.verify_tokens} tokens, got {int(given.query_lens.max())}",
                "build the engine with a larger --max_draft_len, or use RowMode.ABSORB for prompt tokens",
            )
        if bool((live & self.absorbed[here]).any()):
            slot = first_slot + int((live & self.absorbed[here]).nonzero()[0])
            raise UserError(f"the last step of slot {slot} is folded already and must be committed first")
        # Drafts may reach past the end: the caches have room for them, and they are cut off when they are accepted.
        spare = torch.where(absorbs, 0, self.replay.max_draft_len)
        held = self.host[here, Cursor.COMMITTED]
        full = (held >= config.max_seq_len) | (held + given.query_lens > config.max_seq_len + spare)
        if bool((live & full).any()):
            row = int((live & full).nonzero()[0])
            raise UserError(
                f"{int(given.query_lens[row])} more tokens in slot {first_slot + row}, which holds {int(held[row])}, exceed"
                f" max_seq_len {config.max_seq_len}",
                "build the engine with a larger --max_seq_len",
            )

    def check_logits(self, given: StepInput, last_only: bool) -> None:
        """Raises UserError for the logits of all tokens of a prefill, where the engine's plans were not built for them."""
        plans, verify_tokens = self.engine.config.tensorrt, self.replay.verify_tokens
        if plans is None or plans.gather_context_logits or last_only or given.token_ids.shape[1] <= verify_tokens:
            return
        if bool((given.active & (given.modes == RowMode.ABSORB) & (given.query_lens > 1)).any()):
            raise UserError(
                "this engine gives the logits of a prefill's last token only", "build it with --gather_context_logits"
            )

    def commit(self, first_slot: int, accepted: PerRow) -> None:
        """Keep the first ``accepted[r]`` tokens of each row of the last step, the sampled token included; drop the rest.

        accepted: ``[rows]`` of 0..query_len; 0 in rows that were not active, which leaves what they folded before, and did
        not commit, as it is. Raises UserError, before anything is changed, when a row was given fewer tokens, or folded them
        already and must keep them all.
        """
        self.check_slot(first_slot)
        counts = torch.as_tensor(accepted).cpu().int()
        here = slice(first_slot, first_slot + len(counts))
        pending, absorbed = self.pending[here], self.absorbed[here]
        if counts.shape != pending.shape:
            raise UserError(f"accepted has shape {list(counts.shape)}; slots {first_slot} to {self.slots - 1} are left")
        wrong = (counts < 0) | (counts > pending) | (absorbed & (counts != pending))
        held = absorbed & (counts == 0)
        if bool(held.any()):
            # A step that failed, or one of other slots in between, keeps nobody else from being committed.
            wrong &= ~held | self.active(first_slot, len(counts))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            only = "exactly" if absorbed[row] else "at most"
            raise UserError(
                f"slot {first_slot + row} can commit {only} {int(pending[row])} tokens of its last step, not {int(counts[row])}"
            )
        self.host[here, Cursor.COMMITTED] += counts
        self.cursors[here, Cursor.COMMITTED] += self.staging.send(counts)[0]
        self.pending[here], self.absorbed[here] = torch.where(held, pending, 0), held

    def active(self, first_slot: int, count: int) -> Tensor:
        """Which of these slots took part in the last step, bool ``[count]``."""
        (first, rows), found = self.took_part, torch.zeros(self.slots, dtype=torch.bool)
        found[first : first + len(rows)] = rows
        return found[first_slot : first_slot + count]

    def prefill(self, slot: int, token_ids: Tensor | Sequence[int], chunk: int | None = None) -> Tensor:
        """Append tokens that are all known to be kept, and commit them; returns the last one's logits ``[vocab_size]``.

        token_ids: integers ``[n]``, n >= 1. chunk: most tokens of one step; by default EngineConfig.prefill_chunk.
        Raises UserError, before anything is changed, when they do not fit.
        """
        self.check_slot(slot)
        if chunk is not None and chunk < 1:
            raise UserError(f"chunk is {chunk}; it must be 1 or more")
        config = self.engine.config
        given = StepInput.create(torch.as_tensor(token_ids)[None], None, None, None, self.engine.decoder.vocab_size)
        size, ids = chunk or config.prefill_chunk, given.token_ids[0]
        held = int(self.host[slot, Cursor.COMMITTED])
        if held + len(ids) > config.max_seq_len:
            raise UserError(
                f"{len(ids)} more tokens in slot {slot}, which holds {held}, exceed max_seq_len {config.max_seq_len}",
                "build the engine with a larger --max_seq_len",
            )
        for piece in ids.split(size):
            logits = self.step(piece[None], slot, modes=[RowMode.ABSORB], last_only=True)
            self.commit(slot, [len(piece)])
        return logits[0, 0]

    # ---- slots -------------------------------------------------------------------------------------------------------

    def committed(self, slots: slice = slice(None)) -> list[int]:
        """Tokens that each slot holds."""
        return self.host[slots, Cursor.COMMITTED].tolist()

    def slot_cursors(self, slot: int) -> SlotCursors:
        """Where the slot stands. Raises UserError when there is no such slot, or its last step must be committed first."""
        self.check_slot(slot)
        if self.absorbed[slot]:
            raise UserError(f"the last step of slot {slot} is folded already and must be committed first")
        row = self.host[slot]
        return SlotCursors(int(row[Cursor.COMMITTED]), int(row[Cursor.FOLDED]), int(self.written[slot]))

    def check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise UserError(f"slot {slot} does not exist; the session has {self.slots}")

    def place(self, slot: int, cursors: SlotCursors) -> None:
        """Set the slot's cursors, on host and device; an uncommitted step is forgotten."""
        self.host[slot].zero_()
        self.host[slot, Cursor.COMMITTED], self.host[slot, Cursor.FOLDED] = cursors.committed, cursors.folded
        self.cursors[slot].copy_(self.staging.send(self.host[slot])[0])
        self.written[slot] = cursors.written
        self.settle(slice(slot, slot + 1))

    def settle(self, slots: slice) -> None:
        """No step of these slots is open any more."""
        self.pending[slots], self.absorbed[slots] = 0, False

    def admit(self, slot: int) -> None:
        """Make the slot ready for a new request, whatever it holds; only its cursor row changes."""
        self.check_slot(slot)
        self.place(slot, SlotCursors())

    def save(self, slot: int, device: torch.device | str | None = None) -> SlotState:
        """A copy of the slot's state, by default on the same device; tokens that were not committed are left out."""
        cursors, tensors = self.slot_cursors(slot), {}
        for name, pool in self.pools.items():
            row = self.held(name, pool[slot], cursors.committed)
            tensors[name] = row.to(device or row.device, copy=True, memory_format=torch.contiguous_format)
        return SlotState(self.engine.config.fingerprint, self.engine.rank, cursors, tensors)

    def restore(self, slot: int, state: SlotState) -> None:
        """Put a saved state into any slot, whatever it holds. Raises UserError for a state of another engine or rank."""
        self.check_slot(slot)
        if (state.fingerprint, state.rank) != (self.engine.config.fingerprint, self.engine.rank):
            raise UserError("the saved state belongs to another engine or rank")
        for name, tensor in state.tensors.items():
            self.held(name, self.pools[name][slot], state.cursors.committed).copy_(tensor)
        self.place(slot, state.cursors)

    def held(self, name: str, slot: Tensor, length: int) -> Tensor:
        """Of a slot of that pool what its first ``length`` tokens need: a cache up to there, anything else whole."""
        pool = self.layout[name]
        return slot[:, pool.rows(0, length)] if pool.kind == "kv" else slot

    @torch.no_grad()
    def materialise(self, source: int, destination: int, prefix_len: int) -> None:
        """Make ``destination`` stand for the first ``prefix_len`` tokens of ``source``, its ring empty.

        Possible for prefixes that end in the source's ring, ``folded <= prefix_len <= committed``, and no more than
        ``verify_tokens`` before the last position that was ever written, because the convolution ring is that long.
        Raises UserError otherwise, before anything is changed.
        """
        self.check_slot(destination)
        cursors = self.slot_cursors(source)
        if source == destination:
            raise UserError("materialise needs two different slots")
        earliest = max(cursors.folded, self.conv_reach(cursors.written))
        if not earliest <= prefix_len <= cursors.committed:
            raise UserError(
                f"slot {source} cannot give its first {prefix_len} tokens; {earliest} to {cursors.committed} are possible"
            )
        for name, recurrence in recurrences(self.engine.decoder, self.engine.weights, self.pools, self.replay).items():
            pools = layer_pools(self.pools, name)
            self.engine.plugins.materialise(recurrence, pools, source, destination, cursors.folded, prefix_len)
        for name, pool in self.pools.items():
            kind = self.layout[name].kind
            if kind in ("kv", "conv"):
                self.held(name, pool[destination], prefix_len).copy_(self.held(name, pool[source], prefix_len))
        self.place(destination, SlotCursors(prefix_len, prefix_len, cursors.written))

    def conv_reach(self, written: int) -> int:
        """Shortest prefix whose last ``kernel - 1`` tokens no convolution ring has lost, after ``written`` positions."""
        rings = [pool.shape[0] for pool in self.layout.values() if pool.kind == "conv"]
        return max(0, written - self.replay.verify_tokens) if any(written > rows for rows in rings) else 0

    # ---- memory ------------------------------------------------------------------------------------------------------

    def state_bytes(self) -> dict[str, int]:
        """Bytes of all slots by what they are for: ``state``, ``copy``, ``ring``, ``conv``, ``kv`` and ``cursor``."""
        totals: dict[str, int] = {}
        for pool in self.layout.values():
            totals[pool.kind] = totals.get(pool.kind, 0) + self.slots * pool.slot_bytes
        return totals
