"""From a model to a network, its profiles, and a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_replayssm.compat import TensorRT, collector_paused
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.base import DYNAMIC, Network
from trtllm_replayssm.network.packed import StoredWeight
from trtllm_replayssm.network.tensorrt.backend import TensorRTNetwork
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor
from trtllm_replayssm.network.tensorrt.options import PlanOptions
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginLayer, PluginOutput
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS
from trtllm_replayssm.plugins.pools import Pool

#: Numbers of the profiles; VERIFY is there only in an engine that takes drafts.
PREFILL, DECODE, VERIFY = 0, 1, 2


@dataclass(frozen=True)
class StepSizes:
    """What a plan is built for.

    max_batch_size: most rows of a decode or verify step. verify_tokens: tokens of a row in a verify step, 1 without drafts.
    prefill_tokens: most tokens of a prefill step, which has one row. prefill_logits: most of its tokens that get logits.
    usual_prefill: tokens of a prefill step that kernels are chosen for; None for the most. step_tokens: most columns of
    the input ``step_tokens``, where there is one.
    """

    max_batch_size: int
    verify_tokens: int
    prefill_tokens: int
    prefill_logits: int = 1
    usual_prefill: int | None = None
    step_tokens: int = 1

    def profiles(self) -> tuple[dict[str, tuple[int, int, int]], ...]:
        """Least, usual and most value of every dynamic size, for PREFILL, DECODE and VERIFY; never zero.

        Decoding and verifying have a profile each, in which T has one value: their kernels are compiled for it. A row with
        fewer drafts is padded.
        """
        rows, prefill, usual = self.max_batch_size, self.prefill_tokens, self.usual_prefill or self.prefill_tokens
        steps = [{"rows": (1, 1, 1), "tokens": (1, usual, prefill), "logits": (1, 1, self.prefill_logits)}]
        for count in sorted({1, self.verify_tokens}):
            steps.append({"rows": (1, rows, rows), "tokens": (count,) * 3, "logits": (1, count, count)})
        longest = self.step_tokens
        usual_columns = [longest, *(min(step["tokens"][1], longest) for step in steps[1:])]
        return tuple(step | {"step_tokens": (1, usual, longest)} for step, usual in zip(steps, usual_columns))


@dataclass(frozen=True)
class StepModel:
    """What is emitted.

    forward: outputs by name, from token ids int32 ``[rows, tokens]`` and the previous hidden states, in the ops of the network
    it is given. pools: this rank's state by name. activation: dtype of the residual stream. window: of the rings.
    hidden_size: width of the input ``previous_hidden [rows, tokens, hidden_size]``, as of a prediction head; None for none.
    """

    forward: Callable[[Network, Tensor, Tensor | None], Mapping[str, Tensor]]
    pools: Mapping[str, Pool]
    activation: torch.dtype
    window: int
    hidden_size: int | None = None


@dataclass(frozen=True)
class EmittedStep:
    """A finished network definition. Keep it until the plan is built: it holds the memory behind the constants.

    max_tokens: of one row and step; the KV cache, if there is one, holds no more.
    """

    emitter: Emitter
    weights: Mapping[str, StoredWeight]
    max_tokens: float

    @property
    def network(self) -> Any:
        return self.emitter.network

    def tensors(self) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
        """Direction (``in`` or ``out``), dtype and shape of every input and output by name."""
        network, dtype = self.network, self.emitter.dtype
        inputs = [("in", network.get_input(i)) for i in range(network.num_inputs)]
        outputs = [("out", network.get_output(i)) for i in range(network.num_outputs)]
        return {t.name: (direction, dtype(t), tuple(t.shape)) for direction, t in inputs + outputs}


def emit_step(
    tensorrt: TensorRT,
    network: Any,
    model: StepModel,
    weights: Mapping[str, StoredWeight],
    plugin_layer: PluginLayer,
    tp_size: int = 1,
    capability: tuple[int, int] | None = None,
    emitter: Emitter | None = None,
    backend: Callable[..., TensorRTNetwork] = TensorRTNetwork,
    with_step_tokens: bool = False,
) -> EmittedStep:
    """Write one step of a model into an empty network.

    Inputs: ``input_ids`` int32 ``[rows, tokens]``, ``logit_positions`` int32 ``[rows, logits]``, the cursors' inputs (see
    ``step_info``), the state pools, and ``previous_hidden`` where the model has it. Outputs: those of the model, usually
    ``logits`` float32 ``[rows, logits, vocab_size]``, and the state pools.
    weights: of this rank, on the CPU, alive until the plan is built. capability: of the GPU that the plan is for.
    with_step_tokens: whether the T of the cursors' rule is that of an input of its own; see ``step_info``.
    emitter: of ``network``, where inputs are declared in another way. backend: makes the backend from TensorRTNetwork's
    arguments, in their order.

    Raises EngineError when this TensorRT cannot express the model.
    """
    emitter = emitter or Emitter(tensorrt, network)
    token_ids = emitter.input("input_ids", torch.int32, (DYNAMIC, DYNAMIC))
    logit_positions = emitter.input("logit_positions", torch.int32, (DYNAMIC, DYNAMIC), ("rows", "logits"))
    step = step_info(emitter, model.window, plugin_layer, token_ids, with_step_tokens)
    net = backend(
        emitter,
        weights,
        model.pools,
        step,
        token_ids,
        logit_positions,
        model.activation,
        plugin_layer,
        tp_size,
        capability,
    )
    hidden = None
    if model.hidden_size is not None:
        hidden = emitter.input("previous_hidden", model.activation, (DYNAMIC, DYNAMIC, model.hidden_size))
    for name, output in model.forward(net, token_ids, hidden).items():
        emitter.mark_output(output, name)
    caches = (pool.positions for pool in model.pools.values() if pool.kind == "kv")
    return EmittedStep(emitter, weights, min(caches, default=math.inf))


def step_info(
    emitter: Emitter, window: int, plugin_layer: PluginLayer, token_ids: Tensor, with_step_tokens: bool = False
) -> Tensor:
    """The rows' plan int32 ``[rows, STEP_WORDS]``, from the plugin layer ``advance``; an input ``step`` of a cut network.

    Inputs of ``advance``: ``cursors`` int32 ``[rows, CURSOR_WORDS]``, also an output ``cursors_out``, and ``slot_ids``,
    ``query_lens``, ``modes`` int32 ``[rows]`` (plugins/advance.py). with_step_tokens: also ``step_tokens`` int32 ``[rows,
    T]``, of which only the shape is used. A step of fewer tokens than a profile has is padded; this T is the step's own.
    """
    if not plugin_layer.with_advance:
        return emitter.input("step", torch.int32, (DYNAMIC, STEP_WORDS))
    inputs = {"cursors": emitter.input("cursors", torch.int32, (DYNAMIC, CURSOR_WORDS))}
    for name in ("slot_ids", "query_lens", "modes"):
        inputs[name] = emitter.input(name, torch.int32, (DYNAMIC,))
    # T decides whether a row may be absorbed, and is known only as a size.
    inputs["token_ids"] = token_ids
    if with_step_tokens:
        names = ("rows", "step_tokens")
        inputs["token_ids"] = emitter.input("step_tokens", torch.int32, (DYNAMIC, DYNAMIC), names)
    outputs = (
        PluginOutput("step", (DYNAMIC, STEP_WORDS), torch.int32),
        PluginOutput("cursors_out", (DYNAMIC, CURSOR_WORDS), torch.int32, "cursors"),
    )
    emitter.plugin_layers.append((emitter.scope, "advance"))
    step, cursors = plugin_layer(emitter, "advance", AdvanceAttributes(window), inputs, outputs)
    emitter.mark_output(cursors, "cursors_out")
    return step


def add_profiles(emitter: Emitter, builder: Any, config: Any, sizes: StepSizes) -> None:
    """The profiles of StepSizes, numbered PREFILL, DECODE and VERIFY."""
    for ranges in sizes.profiles():
        profile = builder.create_optimization_profile()
        for name, symbols in emitter.inputs.items():
            bounds = [ranges[size] if isinstance(size, str) else (size,) * 3 for size in symbols]
            least, usual, most = zip(*bounds)
            profile.set_shape(name, least, usual, most)
        config.add_optimization_profile(profile)


def build_plan(step: EmittedStep, builder: Any, sizes: StepSizes, options: PlanOptions | None = None) -> Any:
    """The serialised engine, a buffer. ``builder`` is the one whose network was written.

    Raises EngineError when the sizes do not fit the network, when there is no such GPU, or when the builder fails or was
    stopped (its reasons are in TensorRT's log); UserError for a timing cache that cannot be used.
    """
    longest = max(sizes.prefill_tokens, sizes.verify_tokens)
    if longest > step.max_tokens:
        raise EngineError(
            f"a step of {longest} tokens does not fit into a KV cache of {step.max_tokens} positions",
            "lower --max_num_tokens, or raise --max_seq_len",
        )
    options = options or PlanOptions()
    config = options.config(step.emitter.tensorrt, builder)
    add_profiles(step.emitter, builder, config, sizes)
    with collector_paused():
        plan = builder.build_serialized_network(step.network, config)
    fault = getattr(config.progress_monitor, "fault", None)
    if fault is not None:
        raise fault
    if plan is None:
        raise EngineError("TensorRT could not build the engine", "its log, above, names the layer")
    options.save_timing_cache(config)
    return plan
