"""What must hold of the engines of a tiny model. Every check yields claims with the figures of this very run."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.demo.proofs import traffic
from trtllm_replayssm.demo.runs import Meter, admitted, drafted, forced, interrupted, uncached
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.plugins.read_copy import FORMATS
from trtllm_replayssm.plugins.reference.read_copy import quantise
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.validation.subject import DRAFTS, Subject

#: Largest difference of float32 logits in units of their standard deviation, and largest relative norm of 16-bit ones.
FLOAT32_LIMIT, SHORT_LIMIT = 1e-4, 3e-2
#: Steps that run before the clock starts, and steps that are timed.
WARM_STEPS, TIMED_STEPS = 4, 32


@dataclass(frozen=True)
class Outcome:
    """claim holds if measured does; ``holds`` is None where it cannot be asked here."""

    claim: str
    measured: str
    holds: bool | None


Check = Callable[[Subject], Iterator[Outcome]]


def close(claim: str, got: Tensor, want: Tensor, dtype: str, and_also: bool = True) -> Outcome:
    """By the largest difference in float32, by relative norm in shorter types; NaN is never close."""
    std = float(want.std())
    if dtype == "float32":
        difference, limit = float((got - want).abs().max()) / max(1.0, std), FLOAT32_LIMIT
        measured = f"largest difference {difference:.1e} (limit {limit:.0e}) in logits of std {std:.2f}"
    else:
        difference, limit = float((got - want).norm() / want.norm()), SHORT_LIMIT
        measured = f"relative norm of the difference {difference:.1e} (limit {limit:.0e})"
    return Outcome(claim, measured, difference <= limit and and_also)


def against_transformers(s: Subject) -> Iterator[Outcome]:
    claim = f"prefill and {s.settings.steps} decode steps equal transformers"
    if s.model is None:
        yield Outcome(claim, "transformers is not installed, or does not know the model", None)
        return
    yield close(claim, s.plain.logits, uncached(s.model, s.prompts, s.plain.tokens), s.settings.dtype)


def against_embedded(s: Subject) -> Iterator[Outcome]:
    other = forced(s.reference, Meter(s.reference), s.prompts, s.plain.tokens)
    yield close("the embedded engine on the CPU says the same", s.plain.logits, other.logits, s.settings.dtype)


def scheduled(s: Subject) -> Iterator[Outcome]:
    claim = "LLM.generate gives the same tokens"
    if s.settings.dtype != "float32":
        yield Outcome(claim, "of float32 models only: shorter types leave ties that a batch may turn", None)
        return
    params = SamplingParams(max_tokens=s.settings.steps, end_id=-1)
    outputs: Any = s.llm.generate([prompt.tolist() for prompt in s.prompts], params)
    same = sum(output.outputs[0].token_ids == tokens for output, tokens in zip(outputs, s.plain.tokens.tolist()))
    yield Outcome(claim, f"{same} of {len(outputs)} texts", same == len(outputs))


def chunks(s: Subject) -> Iterator[Outcome]:
    run = forced(s.session, Meter(s.session), s.prompts, s.plain.tokens, chunk=5)
    yield close("prompts cut into chunks of 5 tokens change nothing", run.logits, s.plain.logits, s.settings.dtype)


def rollback(s: Subject) -> Iterator[Outcome]:
    meter = Meter(s.session)
    run, rejected, offered = drafted(s.session, meter, s.prompts, s.plain.tokens)
    claim = f"verify steps with {rejected} of {offered} drafts rejected equal the run without drafts"
    yield close(claim, run.logits, s.plain.logits, s.settings.dtype, and_also=0 < rejected < offered)
    every_step = forced(s.ordinary, ordinary := Meter(s.ordinary), s.prompts, s.plain.tokens)
    claim = "an engine that rewrites the state at every step says the same"
    yield close(claim, every_step.logits, s.plain.logits, s.settings.dtype)
    for proof in traffic(s.meter, ordinary, meter):
        yield Outcome(proof.claim, proof.measured, proof.holds)


def resume(s: Subject) -> Iterator[Outcome]:
    run = interrupted(s.session, Meter(s.session), s.prompts, s.plain.tokens, s.intruder)
    claim = "requests preempted halfway go on unchanged in another slot"
    yield close(claim, run.logits, s.plain.logits, s.settings.dtype)
    half = s.settings.steps // 2
    last = forced(s.session, Meter(s.session), s.prompts, s.plain.tokens[:, :half]).logits[:, -1]
    saved = [s.session.save(slot, "cpu") for slot in range(len(s.prompts))]
    again = Session(s.llm.engine)
    for slot, state in enumerate(saved):
        again.restore(slot, state)
    logits = [last]
    for column in s.plain.tokens[:, half:].unbind(1):
        logits.append(again.step(column[:, None])[:, 0].cpu())
        again.commit(0, [1] * len(s.prompts))
    claim = "states saved on the host go on in a session of its own"
    yield close(claim, torch.stack(logits, 1), s.plain.logits[:, half:], s.settings.dtype)


def copies(s: Subject) -> Iterator[Outcome]:
    """Engines whose steps read narrow copies of their states. Judged by norms: what float32 rounds may move a code."""
    for read_dtype in FORMATS:
        claim = f"steps that read {read_dtype} copies say what the embedded engine on the CPU says"
        try:
            folder = s.engine(f"{read_dtype} copies", state_read_dtype=read_dtype)
        except UserError as error:
            yield Outcome(claim, error.message, None)
            continue
        plain = s.engine(f"{read_dtype} reference", "embedded", state_read_dtype=read_dtype)
        session = LLM(folder, device=s.settings.device).session
        reference = LLM(plain, device="cpu", plugin_impl="reference").session
        got, want = (forced(one, Meter(one), s.prompts, s.plain.tokens).logits for one in (session, reference))
        yield close(claim, got, want, read_dtype)
        states = [name.removesuffix("state") for name in session.pools if name.endswith(".state")]
        right = sum(same_copy(session, layer, len(s.prompts)) for layer in states)
        claim = f"{read_dtype} copies are those of their states, bit for bit"
        yield Outcome(claim, f"in {right} of {len(states)} layers", right == len(states))


def same_copy(session: Session, layer: str, slots: int) -> bool:
    """Whether the first slots' copies of a layer's states are what their definition says. layer: prefix of its pools."""
    read_dtype = session.replay.state_read_dtype
    expected = quantise(session.pools[f"{layer}state"][:slots].cpu(), read_dtype)
    return all(torch.equal(session.pools[f"{layer}{name}"][:slots].cpu(), copy) for name, copy in expected.items())


def graphs(s: Subject) -> Iterator[Outcome]:
    claim = "kernels launched one by one say what CUDA graphs say, twice"
    if s.llm.engine.device.type != "cuda":
        yield Outcome(claim, "there are no CUDA graphs on a CPU", None)
        return
    plain = Session(s.llm.engine, cuda_graphs=False)
    singly = forced(plain, Meter(plain), s.prompts, s.plain.tokens)
    # The graphs were captured in the run that all others are held against; this one only replays them.
    replayed = forced(s.session, Meter(s.session), s.prompts, s.plain.tokens)
    got, want = torch.stack((singly.logits, replayed.logits)), torch.stack((s.plain.logits, s.plain.logits))
    yield close(claim, got, want, s.settings.dtype)


def aliases(s: Subject) -> Iterator[Outcome]:
    """Which form of state in place works here is known only from here."""
    claim = "an engine whose aliases are declared to TensorRT says the same"
    if s.llm.engine.config.engine_flavour != "tensorrt":
        yield Outcome(claim, "of the flavour tensorrt only", None)
        return
    session = LLM(s.engine("aliased", aliased_state=True), device=s.settings.device).session
    run = forced(session, Meter(session), s.prompts, s.plain.tokens)
    yield close(claim, run.logits, s.plain.logits, s.settings.dtype)


def versions(s: Subject) -> Iterator[Outcome]:
    """Engines of other versions, and damaged ones, are refused in one sentence."""
    original = s.llm.engine.folder
    values = json.loads((original / "config.json").read_text(encoding="utf-8"))
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "plugin version": lambda own: own.update(plugin_version="0"),
        "format version": lambda own: own.update(format_version=own["format_version"] + 1),
    }
    if s.llm.engine.config.engine_flavour == "tensorrt":
        changes |= {
            "version of TensorRT": lambda own: own["tensorrt"].update(tensorrt_version="10.0.0.1"),
            "compute capability": lambda own: own["tensorrt"].update(compute_capability="7.5"),
        }
    else:
        changes["fingerprint"] = lambda own: own.update(fingerprint="0" * 64)
    for what, change in changes.items():
        changed = copy.deepcopy(values)
        change(changed["replayssm"])
        folder = s.folder / "other version"
        shutil.copytree(original, folder)
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            LLM(folder, device=s.settings.device)
            yield Outcome(f"an engine of another {what} is refused", "it was loaded", False)
        except UserError as error:
            yield Outcome(f"an engine of another {what} is refused", error.message, True)
        finally:
            shutil.rmtree(folder)


def benchmark(s: Subject) -> Iterator[Outcome]:
    """Times of steps. The models are tiny: what is seen is the cost of launching."""
    timed = {
        "decode step, ordinary": (s.ordinary, 1),
        "decode step, ReplaySSM": (s.session, 1),
        f"verify step of {1 + DRAFTS} tokens": (s.session, 1 + DRAFTS),
    }
    for what, (session, tokens) in timed.items():
        seconds = step_seconds(session, s, tokens)
        rate = len(s.prompts) / seconds
        yield Outcome(what, f"{1e3 * seconds:.3f} ms, {rate:.0f} steps/s over {len(s.prompts)} requests", seconds > 0)


def step_seconds(session: Session, s: Subject, tokens: int) -> float:
    """Mean time of a step of all requests that keeps one token each."""
    admitted(session, s.prompts)
    rows, device = len(s.prompts), session.engine.device
    ids = torch.full((rows, tokens), int(s.prompts[0][0]))
    start = 0.0
    for step in range(WARM_STEPS + TIMED_STEPS):
        if step == WARM_STEPS:
            wait(device)
            start = time.perf_counter()
        session.step(ids, modes=[RowMode.DECODE] * rows)
        session.commit(0, [1] * rows)
    wait(device)
    return (time.perf_counter() - start) / TIMED_STEPS


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CHECKS: dict[str, Check] = {
    "transformers": against_transformers,
    "embedded": against_embedded,
    "generate": scheduled,
    "chunks": chunks,
    "rollback": rollback,
    "resume": resume,
    "copies": copies,
    "graphs": graphs,
    "aliases": aliases,
    "versions": versions,
    "benchmark": benchmark,
}
