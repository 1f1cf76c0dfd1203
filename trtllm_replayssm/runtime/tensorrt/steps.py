"""A session's steps, executed by plans: the same interface as the steps that torch runs (runtime/steps.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.network.tensorrt.backend import bound_sizes
from trtllm_replayssm.network.tensorrt.build import DECODE, PREFILL, VERIFY
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.staging import Staging
from trtllm_replayssm.runtime.step_input import StepInput
from trtllm_replayssm.runtime.steps import row_bucket
from trtllm_replayssm.runtime.tensorrt.engine import TensorRTEngine
from trtllm_replayssm.runtime.tensorrt.models import DECODER, step_tokens
from trtllm_replayssm.runtime.tensorrt.plan import ALIGNMENT, Execution, Plan

#: Executions kept, each with a context and a graph; the one that was not used for longest goes first.
MAX_EXECUTIONS = 64
#: Words of int32 to whose multiples parts of the input buffer are aligned.
WORDS = ALIGNMENT // 4


@dataclass(frozen=True)
class Shape:
    """What an execution is prepared for. rows, from slot ``first`` on; columns: of ``step_tokens``."""

    profile: int
    first: int
    rows: int
    tokens: int
    logits: int
    columns: int

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the small inputs, all int32."""
        rows = self.rows
        return {
            "input_ids": (rows, self.tokens),
            "logit_positions": (rows, self.logits),
            "slot_ids": (rows,),
            "query_lens": (rows,),
            "modes": (rows,),
        }

    @property
    def words(self) -> int:
        """int32 words of the small inputs with the gaps between them."""
        return sum(aligned(sizes) for sizes in self.parts().values())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The small inputs in a buffer, int32 ``[words]`` or longer."""
        views, at = {}, 0
        for name, sizes in self.parts().items():
            views[name] = buffer[at : at + torch.Size(sizes).numel()].view(sizes)
            at += aligned(sizes)
        return views


class PlanSteps:
    """Row i of an execution is a slot, as the layers of TensorRT for attention and KV caches have it.

    Decode and verify steps begin at slot 0 and are padded to few numbers of rows, and to the T that their profile is built
    for, so that few executions, and graphs, serve them all. A prefill binds the pools at its slot. A step that is longer
    than a verify step runs row by row, prompt rows each in its length; rows that decode in it run together.
    """

    def __init__(
        self,
        engine: TensorRTEngine,
        cursors: Tensor,
        pools: Mapping[str, Tensor],
        staging: Staging,
        graphs: bool,
        plan: str = DECODER,
    ) -> None:
        """Prepares ``plan`` of the engine, which changes ``cursors`` and those of ``pools`` that it knows, in place."""
        self.engine, self.config, self.device, self.staging = engine, engine.config, engine.device, staging
        self.graphs = graphs
        self.plan = Plan(engine.tensorrt, engine.cuda_engines[plan], engine.device, engine.group)
        bound = {*self.plan.inputs, *self.plan.outputs}
        self.pools = {name: pool for name, pool in pools.items() if name in bound} | {"cursors": cursors}
        self.slot_shapes = {name: bound_sizes(pool) for name, pool in engine.config.pools().items() if name in bound}
        self.verify_tokens, self.longest = engine.config.replay.verify_tokens, engine.prefill_tokens
        self.with_hidden = "hidden_states" in bound
        self.with_previous = "previous_hidden" in bound
        self.executions: dict[Shape, Execution] = {}
        self.prefills: Execution | None = None
        self.buffers: dict[str, Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        """Buffers for the largest step, shared by all executions. Parts of a step's inputs start at aligned addresses."""
        config, decoder, activation = self.config, self.engine.decoder, self.config.checkpoint.torch_dtype
        rows, tokens = config.max_batch_size, max(self.longest, config.max_batch_size * self.verify_tokens)
        columns = step_tokens(config, self.longest)
        logits = self.longest if self.engine.gather_context_logits else 1
        sizes = {
            "inputs": (2 * tokens + 3 * rows + 8 * WORDS, torch.int32),
            "step_tokens": (rows * columns, torch.int32),
            "logits": (max(logits, rows * self.verify_tokens) * decoder.vocab_size, torch.float32),
        }
        if self.with_hidden:
            sizes["hidden_states"] = (tokens * decoder.hidden_size, activation)
        if self.with_previous:
            sizes["previous_hidden"] = (tokens * decoder.hidden_size, activation)
        self.buffers = {n: torch.zeros(size, dtype=dtype, device=self.device) for n, (size, dtype) in sizes.items()}

    # ---- steps -------------------------------------------------------------------------------------------------------

    def run(
        self, given: StepInput, first_slot: int, kv_len: int, last_only: bool, previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See runtime.steps.Steps. previous: what a prediction head reads, ``[rows, T, hidden_size]``.

        Without a prediction head nothing is kept of what the head read: ``[rows, T, 0]``.
        """
        rows, tokens = given.token_ids.shape
        if tokens <= self.verify_tokens:
            return self.padded(given, first_slot, tokens, last_only, previous)
        absorbs, decodes = (given.active & (given.modes == RowMode.ABSORB)), given.modes != RowMode.ABSORB
        hidden = torch.zeros(
            rows, tokens, self.hidden_width, dtype=self.config.checkpoint.torch_dtype, device=self.device
        )
        logits = torch.zeros(rows, 1 if last_only else tokens, self.engine.decoder.vocab_size, device=self.device)
        if bool((given.active & decodes).any()):
            width = self.verify_tokens
            live = given.active & decodes
            short = StepInput(given.token_ids[:, :width], torch.where(live, given.query_lens, 1), given.modes, live)
            part = None if previous is None else previous[:, :width]
            some, values = self.padded(short, first_slot, tokens, last_only, part)
            hidden[:, : some.shape[1]], logits[:, : values.shape[1]] = some, values
        for row in absorbs.nonzero()[:, 0].tolist():
            length = int(given.query_lens[row])
            part = None if previous is None else previous[row : row + 1, :length]
            some, values = self.prefill(given, row, first_slot + row, tokens, length, last_only, part)
            hidden[row, :length], logits[row, : values.shape[1]] = some[0], values[0]
        return hidden, logits

    def warm_up(self, kv_len: int) -> int:
        """See runtime.steps.Steps. Padding rows alone run, which touch no state; plans have no bound of positions."""
        most = self.config.max_batch_size
        for count in sorted({row_bucket(count, most) for count in range(1, most + 1)}, reverse=True):
            for tokens in {1, self.verify_tokens}:
                idle = torch.zeros(count, dtype=torch.int32)
                given = StepInput(torch.zeros(count, tokens, dtype=torch.int32), idle + 1, idle, idle > 0)
                # The first run prepares kernels, the second is captured.
                for _ in range(2):
                    self.padded(given, 0, tokens, False, None)
        return sum(execution.graph is not None for execution in self.executions.values())

    @property
    def hidden_width(self) -> int:
        return self.engine.decoder.hidden_size if self.with_hidden else 0

    def padded(
        self, given: StepInput, first_slot: int, step: int, last_only: bool, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A decode or verify step; ``step`` is the T of the cursors' rule."""
        rows, tokens = given.token_ids.shape
        width = 1 if tokens == 1 else self.verify_tokens
        count = row_bucket(first_slot + rows, self.config.max_batch_size)
        logits, columns = 1 if last_only else width, step_tokens(self.config, step)
        shape = Shape(DECODE if width == 1 else VERIFY, 0, count, width, logits, columns)
        here = slice(first_slot, first_slot + rows)
        slots = torch.where(given.active, torch.arange(first_slot, first_slot + rows), -1)
        values = {
            "input_ids": spread(given.token_ids, count, width, here, 0),
            "logit_positions": self.positions(spread(given.query_lens, count, None, here, 1), shape, last_only),
            "slot_ids": spread(slots, count, None, here, -1),
            "query_lens": spread(given.query_lens, count, None, here, 1),
            "modes": spread(given.modes, count, None, here, int(RowMode.DECODE)),
        }
        if previous is not None:
            self.view("previous_hidden", (count, width, previous.shape[2])).zero_()[here, :tokens] = previous
        hidden, found = self.execute(shape, values)
        return hidden[here, :tokens], found[here, : 1 if last_only else tokens]

    def prefill(
        self, given: StepInput, row: int, slot: int, step: int, length: int, last_only: bool, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The prompt tokens of one row."""
        lengths = given.query_lens[row : row + 1]
        shape = Shape(PREFILL, slot, 1, length, 1 if last_only else length, step_tokens(self.config, step))
        values = {
            "input_ids": given.token_ids[row : row + 1, :length],
            "logit_positions": self.positions(lengths, shape, last_only),
            "slot_ids": torch.zeros(1, dtype=torch.int32),
            "query_lens": lengths,
            "modes": given.modes[row : row + 1],
        }
        if previous is not None:
            self.view("previous_hidden", tuple(previous.shape)).copy_(previous)
        return self.execute(shape, values)

    @staticmethod
    def positions(lengths: Tensor, shape: Shape, last_only: bool) -> Tensor:
        """Tokens of each row that get logits, ``[rows, logits]``."""
        return (lengths[:, None] - 1) if last_only else torch.arange(shape.logits).expand(shape.rows, -1)

    # ---- executions --------------------------------------------------------------------------------------------------

    def execute(self, shape: Shape, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Fresh copies of ``hidden_states`` and ``logits``."""
        execution = self.execution(shape)
        self.send(shape, values)
        execution.run()
        width = self.engine.decoder.vocab_size
        logits = self.view("logits", (shape.rows, shape.logits, width)).clone()
        if not self.with_hidden:
            return logits.new_empty(shape.rows, shape.tokens, 0), logits
        return self.view("hidden_states", (shape.rows, shape.tokens, self.hidden_width)).clone(), logits

    def send(self, shape: Shape, values: Mapping[str, Tensor]) -> None:
        """Put the small inputs where the executions read them: those of the host in one copy."""
        target, flat = self.buffers["inputs"][: shape.words], torch.zeros(shape.words, dtype=torch.int32)
        elsewhere = {name: value for name, value in values.items() if value.device.type != "cpu"}
        for name, view in shape.views(flat).items():
            if name not in elsewhere:
                view.copy_(values[name])
        if self.device.type == "cuda":
            self.staging.send_into(target, flat)
        else:
            target.copy_(flat)
        for name, value in elsewhere.items():
            shape.views(target)[name].copy_(value)

    def execution(self, shape: Shape) -> Execution:
        """The execution for this shape, ready to run."""
        if shape.profile == PREFILL:
            # Every prefill has addresses of its own, and most have lengths of their own.
            self.prefills = self.prefills or Execution(self.plan, PREFILL, graph=False)
            self.bind(self.prefills, shape)
            return self.prefills
        found = self.executions.pop(shape, None)
        if found is None:
            found = Execution(self.plan, shape.profile, graph=self.graphs)
            self.bind(found, shape)
        self.executions[shape] = found
        if len(self.executions) > MAX_EXECUTIONS:
            self.executions.pop(next(iter(self.executions)))
        return found

    def bind(self, execution: Execution, shape: Shape) -> None:
        tensors, shapes = shape.views(self.buffers["inputs"]), shape.parts()
        tensors["step_tokens"], shapes["step_tokens"] = self.buffers["step_tokens"], (shape.rows, shape.columns)
        for name, pool in self.pools.items():
            slots = pool[shape.first :]
            # State is one memory, in and out.
            tensors[name] = tensors[f"{name}_out"] = slots
            shapes[name] = (shape.rows, *self.slot_shapes[name])
        tensors["logits"] = self.buffers["logits"]
        if self.with_hidden:
            tensors["hidden_states"] = self.buffers["hidden_states"]
        if self.with_previous:
            tensors["previous_hidden"] = self.buffers["previous_hidden"]
            shapes["previous_hidden"] = (shape.rows, shape.tokens, self.engine.decoder.hidden_size)
        execution.bind(shapes, tensors)

    def view(self, name: str, sizes: tuple[int, ...]) -> Tensor:
        return self.buffers[name][: torch.Size(sizes).numel()].view(sizes)


def plan_steps(
    engine: Engine, cursors: Tensor, pools: Mapping[str, Tensor], staging: Staging, graphs: bool
) -> PlanSteps:
    """The steps of an engine that ``Engine.load`` made of plans."""
    assert isinstance(engine, TensorRTEngine)
    return PlanSteps(engine, cursors, pools, staging, graphs)


def aligned(sizes: tuple[int, ...]) -> int:
    """int32 words that a tensor takes up to the next aligned address."""
    return -(-torch.Size(sizes).numel() // WORDS) * WORDS


def spread(values: Tensor, count: int, width: int | None, here: slice, fill: int) -> Tensor:
    """The rows ``values`` at ``here`` among ``count`` rows, and their columns among ``width``; ``fill`` elsewhere."""
    shape = (count,) if width is None else (count, width)
    whole = torch.full(shape, fill, dtype=torch.int32, device=values.device)
    whole[here if width is None else (here, slice(values.shape[1]))] = values.int()
    return whole
