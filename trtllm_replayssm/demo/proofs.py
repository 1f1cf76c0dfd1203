"""What the demo proves, each claim with the figure that was measured in this very run and the limit it is held to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.console import LOGGER, bytes_text
from trtllm_replayssm.demo.runs import Meter, Run, drafted, forced, greedy, interrupted, uncached
from trtllm_replayssm.demo.subject import Subject
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.options import SpeculationOptions

#: Largest difference of float32 logits (standard deviation about 1) that counts as equal.
TOLERANCE = 1e-4
INTRUDER = "Another request in the same slot."
#: Decode steps of every run.
STEPS = 64
WINDOW, DRAFTS = 16, 3
MAX_SEQ_LEN = 512
#: What a trained model writes for the reader.
SHOWN = SamplingParams(max_tokens=256, temperature=0.5, top_p=0.95, seed=2)


@dataclass(frozen=True)
class Proof:
    """claim holds if measured does, which says it in figures."""

    claim: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Demo:
    """model: of transformers. llm: the engine with ReplaySSM. ordinary: a session of an engine with window 1."""

    subject: Subject
    model: Any
    llm: LLM
    ordinary: Session
    prompts: tuple[Tensor, ...]

    @classmethod
    def prepare(cls, subject: Subject, folder: Path) -> Demo:
        """Converts the model and builds two engines: ReplaySSM's, and window 1, an ordinary decoder.

        Raises UserError when transformers is missing or ``folder`` cannot be used.
        """
        model_dir, checkpoint_dir = subject.folder or folder / "model", folder / "checkpoint"
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", "give the demo a new folder")
        LOGGER.info("transformers %s %s: %s", "loads" if subject.folder else "makes", model_dir, subject.what)
        model = subject.make(model_dir)
        LOGGER.info(
            "trtllm-replayssm convert --model_dir %s --output_dir %s --dtype float32", model_dir, checkpoint_dir
        )
        convert(model_dir, checkpoint_dir, dtype="float32")
        engines = {window: folder / f"engine_window_{window}" for window in (WINDOW, 1)}
        for window, engine_dir in engines.items():
            options = BuildOptions(
                max_batch_size=len(subject.prompts),
                max_seq_len=MAX_SEQ_LEN,
                replay_window=window,
                max_draft_len=DRAFTS if window > 1 else 0,
            )
            LOGGER.info(
                "trtllm-replayssm build --checkpoint_dir %s --output_dir %s --max_batch_size %d --max_seq_len %d"
                " --replay_window %d --max_draft_len %d",
                *(checkpoint_dir, engine_dir, options.max_batch_size, MAX_SEQ_LEN, window, options.max_draft_len),
            )
            build_engine(checkpoint_dir, engine_dir, options)
        llm = LLM(engines[WINDOW])
        prompts = tuple(torch.tensor(llm.tokenizer.encode(text)) for text in subject.prompts)
        return cls(subject, model, llm, Session(Engine.load(engines[1])), prompts)

    def prove(self) -> Iterator[Proof]:
        """The proofs, one after the other."""
        session = self.llm.session
        plain_meter, ordinary_meter, verify_meter = Meter(session), Meter(self.ordinary), Meter(session)
        plain = greedy(session, plain_meter, self.prompts, STEPS)
        reference = uncached(self.model, self.prompts, plain.tokens)
        yield equal(f"prefill and {STEPS} decode steps equal transformers", plain.logits, reference)
        same = int((plain.logits.argmax(-1) == reference.argmax(-1)).sum())
        count = reference[..., 0].numel()
        yield Proof("transformers would have chosen the same tokens", f"{same} of {count}", same == count)
        yield from self.generated(plain)
        chunked = forced(session, Meter(session), self.prompts, plain.tokens, chunk=5)
        yield equal("prompts cut into chunks of 5 tokens change nothing", chunked.logits, plain.logits)

        verified, rejected, offered = drafted(session, verify_meter, self.prompts, plain.tokens)
        what = f"verify steps with {rejected} of {offered} drafts rejected equal the run without drafts"
        yield equal(what, verified.logits, plain.logits, and_also=0 < rejected < offered)
        intruder = torch.tensor(self.llm.tokenizer.encode(INTRUDER))
        resumed = interrupted(session, Meter(session), self.prompts, plain.tokens, intruder)
        yield equal("requests preempted halfway go on unchanged in another slot", resumed.logits, plain.logits)

        every_step = forced(self.ordinary, ordinary_meter, self.prompts, plain.tokens)
        yield equal("an engine that rewrites the state at every step says the same", every_step.logits, plain.logits)
        yield from traffic(plain_meter, ordinary_meter, verify_meter)

    def generated(self, run: Run) -> Iterator[Proof]:
        """The Python API, which schedules by itself, against the run that was driven step by step."""
        same, count = self.same_texts(self.llm, run)
        yield Proof("LLM.generate gives the same tokens", f"{same} of {count} texts", same == count)
        speculating = LLM(self.llm.engine.folder, speculation=SpeculationOptions("ngram"))
        same, count = self.same_texts(speculating, run)
        found = speculating.scheduler.statistics
        measured = (
            f"{same} of {count} texts, in steps of {found.acceptance_length:.2f} tokens:"
            f" {found.num_accepted_draft_tokens} of {found.num_draft_tokens} drafts accepted"
        )
        # Random weights repeat themselves or not, as it happens.
        useful = found.acceptance_length > 1 or not self.subject.trained
        yield Proof("and so it does with drafts from the text itself (n-grams)", measured, same == count and useful)

    def same_texts(self, llm: LLM, run: Run) -> tuple[int, int]:
        """How many of the prompts ``llm`` continues with the tokens of ``run``, and how many there are."""
        outputs = llm.generate(list(self.subject.prompts), SamplingParams(max_tokens=STEPS, end_id=-1))
        assert isinstance(outputs, list)
        return sum(o.outputs[0].token_ids == tokens for o, tokens in zip(outputs, run.tokens.tolist())), len(outputs)

    def text(self) -> str:
        """The first prompt and what the model makes of it; random weights make noise, which is not worth reading."""
        if not self.subject.trained:
            return ""
        prompt = self.subject.prompts[0]
        output = self.llm.generate(prompt, SHOWN)
        assert not isinstance(output, list)
        return prompt + output.outputs[0].text


def traffic(plain: Meter, ordinary: Meter, verify: Meter) -> Iterator[Proof]:
    """What the steps moved. Bytes are counted from the cursors before and after every step, and from the pools' sizes."""
    meters = (plain, ordinary, verify)
    unexplained = sum(meter.unexplained for meter in meters)
    steps = sum(meter.steps for meter in meters)
    yield Proof(
        "a checkpoint changes in memory exactly when its cursor says so",
        f"{unexplained} exceptions in {steps} steps",
        unexplained == 0,
    )
    yield Proof(
        f"state rewrites in {plain.steps} decode steps, ordinary and with ReplaySSM",
        f"{ordinary.rewrites} and {plain.rewrites}; {verify.rewrites} in {verify.steps} verify steps",
        plain.rewrites * WINDOW <= plain.steps and ordinary.rewrites == ordinary.steps,
    )
    before, after = ordinary.moved / ordinary.steps, plain.moved / plain.steps
    yield Proof(
        "recurrent bytes a decode step moves, ordinary and with ReplaySSM",
        f"{bytes_text(before)} and {bytes_text(after)}: {before / after:.2f} times fewer",
        after < before,
    )
    snapshots, replay = verify.size.state_per_draft(1 + DRAFTS), verify.moved / verify.steps
    yield Proof(
        f"the same for a verify step of {1 + DRAFTS} tokens, with a state saved per token (by formula) and with ReplaySSM",
        f"{bytes_text(snapshots)} and {bytes_text(replay)}: {snapshots / replay:.2f} times fewer",
        replay < snapshots,
    )


def equal(claim: str, got: Tensor, want: Tensor, and_also: bool = True) -> Proof:
    """Holds if the largest difference stays within TOLERANCE; NaN never does."""
    difference, std = float((got - want).abs().max()), float(want.std())
    measured = f"largest difference {difference:.1e} (limit {TOLERANCE:.0e}) in logits of std {std:.2f}"
    return Proof(claim, measured, difference <= TOLERANCE and and_also)


@dataclass(frozen=True)
class Report:
    """All proofs of a run. where: device, and whose plugin functions ran on it. text: of a trained model."""

    proofs: list[Proof]
    where: str
    seconds: float
    text: str = ""


def run_demo(subject: Subject, folder: Path) -> Report:
    """Takes the model through everything under ``folder``, on the GPU where there is one, and proves it."""
    start = time.perf_counter()
    demo = Demo.prepare(subject, folder)
    proofs = list(demo.prove())
    text, engine = demo.text(), demo.llm.engine
    return Report(proofs, f"{engine.device}, {engine.plugins.name} plugins", time.perf_counter() - start, text)
