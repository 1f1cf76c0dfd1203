"""Runs the checks, whatever fails on the way, and says what came out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import trtllm_replayssm
from trtllm_replayssm.doctor import Finding, diagnose
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins import PLUGIN_VERSION
from trtllm_replayssm.validation.catalogue import families_without_model
from trtllm_replayssm.validation.checks import CHECKS, Check, Outcome
from trtllm_replayssm.validation.subject import Settings, Subject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """One claim of one family. status: passed, failed, or skipped. seconds: since the claim before it."""

    family: str
    check: str
    claim: str
    measured: str
    status: str
    seconds: float

    @classmethod
    def of(cls, family: str, check: str, outcome: Outcome, seconds: float) -> Result:
        status = {True: "passed", False: "failed", None: "skipped"}[outcome.holds]
        return cls(family, check, outcome.claim, outcome.measured, status, round(seconds, 3))


@dataclass
class Report:
    """settings: as given. flavour, where: of the engines that were built. machine: what it has, as ``doctor`` finds it."""

    settings: Settings
    flavour: str = ""
    where: str = ""
    machine: tuple[Finding, ...] = ()
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "created": self.created,
            "package_version": trtllm_replayssm.__version__,
            "plugin_version": PLUGIN_VERSION,
            "passed": not self.failed,
            "engine_flavour": self.flavour,
            "device": self.where,
            "settings": asdict(self.settings),
            "machine": {finding.name: finding.value for finding in self.machine},
            "families_without_model": families_without_model(),
            "seconds": round(self.seconds, 1),
            "results": [asdict(result) for result in self.results],
        }


def validate(
    families: Sequence[str],
    settings: Settings,
    folder: Path,
    checks: Sequence[str] = tuple(CHECKS),
    told: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Builds the engines of every family under ``folder`` and checks them. told: hears of every result at once.

    A check that ends in an error has failed; the others go on.
    """
    report, began = Report(settings, machine=diagnose(folder).findings), time.perf_counter()
    if left_out := families_without_model():
        log.warning("not checked, because there is no tiny model: %s", ", ".join(left_out))
    for family in families:
        log.info("%s: making its checkpoint and engines", family)
        subject = attempt(report, family, "build", partial(prepared, family, settings, folder), told)
        if subject is None:
            continue
        engine = subject.llm.engine
        report.flavour, report.where = engine.config.engine_flavour, str(engine.device)
        for name in checks:
            run_check(report, subject, name, CHECKS[name], told)
    report.seconds = time.perf_counter() - began
    return report


def prepared(family: str, settings: Settings, folder: Path) -> Subject:
    """The subject with its engine built and loaded."""
    subject = Subject.create(family, settings, folder / family)
    assert subject.llm
    return subject


def run_check(report: Report, subject: Subject, name: str, check: Check, told: Callable[[Result], None]) -> None:
    began = time.perf_counter()

    def run() -> None:
        nonlocal began
        for outcome in check(subject):
            add(report, Result.of(subject.family, name, outcome, time.perf_counter() - began), told)
            began = time.perf_counter()

    attempt(report, subject.family, name, run, told)


def attempt(report: Report, family: str, check: str, action: Callable[[], Any], told: Callable[[Result], None]) -> Any:
    """What ``action`` returns; None, and a failed result, when it raises."""
    began = time.perf_counter()
    try:
        return action()
    except Exception as error:
        log.debug("%s, %s", family, check, exc_info=True)
        what = told_whole(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        outcome = Outcome(f"{check} runs to its end", " ".join(what.split()), False)
        add(report, Result.of(family, check, outcome, time.perf_counter() - began), told)
        return None


def told_whole(error: UserError) -> str:
    """The sentence, and what to do about it."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def add(report: Report, result: Result, told: Callable[[Result], None]) -> None:
    report.results.append(result)
    told(result)
