"""validate of the flavour tensorrt: the same checks, over plans that a stand-in for TensorRT builds and runs (stand_in.py)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from stand_in import CudaEngine, StandIn

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.runtime.build import build_engine, engine_config
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
from trtllm_replayssm.runtime.tensorrt import engine as loading
from trtllm_replayssm.runtime.tensorrt.plans import Target
from trtllm_replayssm.validation import subject
from trtllm_replayssm.validation.report import Report, validate
from trtllm_replayssm.validation.subject import Settings

CAPABILITY = (9, 0)
SETTINGS = Settings("tensorrt", steps=20, device="cpu")
CHECKS = ("transformers", "embedded", "generate", "rollback", "resume", "copies", "aliases", "versions")


class Machine:
    """A machine with that TensorRT, for engines whose pools differ: a stand-in for each, and plans that tell which."""

    def __init__(self) -> None:
        self.stand_ins: list[StandIn] = []
        #: What the builds declared to TensorRT as one memory.
        self.aliased: list[bool] = []

    def tensorrt(self) -> TensorRT:
        """As loading finds it: its runtime knows the plans of all builds."""
        first = self.stand_ins[0]
        module = ModuleType("tensorrt")
        vars(module).update(vars(first.module), Runtime=lambda log: Runtime(self, first.module.Runtime(log)))
        found = TensorRT.of(module, "tensorrt")
        vars(found.features).update(first.features)
        return found

    def build(self, source: Path, folder: Path, options: BuildOptions) -> EngineConfig:
        """``build_engine`` as on such a machine."""
        if options.engine_flavour != "tensorrt":
            return build_engine(source, folder, options)
        stand_in = StandIn(engine_config(CheckpointConfig.read(source), options).pools())
        # A plan is a ticket: no two builds give the same.
        stand_in.networks += [None] * len(self.stand_ins)  # type: ignore[list-item]
        self.stand_ins.append(stand_in)
        self.aliased.append(options.aliased_state)
        tensorrt = stand_in.tensorrt()

        def network() -> tuple[Any, Any]:
            builder = tensorrt.builder(tensorrt_log(tensorrt.module))
            return tensorrt.create_network(builder), builder

        return build_engine(source, folder, options, target=Target(tensorrt, CAPABILITY, stand_in.plugins, network))


class Runtime:
    """Finds the stand-in whose plan it is given."""

    def __init__(self, machine: Machine, runtime: Any) -> None:
        self.machine, self.runtime = machine, runtime

    def deserialize_cuda_engine(self, content: Any) -> CudaEngine:
        runtime = self.runtime
        ticket = int("".join(filter(str.isdigit, bytes(content).decode())))
        runtime.stand_in = self.machine.stand_ins[ticket]
        return runtime.deserialize_cuda_engine(content)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(subject, "build_engine", machine.build)
    monkeypatch.setattr(loading, "load_tensorrt", lambda flavours: machine.tensorrt())
    monkeypatch.setattr(loading, "found_capability", lambda folder, device: CAPABILITY)
    return machine


def statuses(report: Report) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for result in report.results:
        found.setdefault(result.check, set()).add(result.status)
    return found


def test_plans_pass_the_checks(machine: Machine, tmp_path: Path) -> None:
    report = validate(["nemotron_h"], SETTINGS, tmp_path, CHECKS)
    assert [(r.claim, r.measured) for r in report.failed] == []
    assert statuses(report) == {check: {"passed"} for check in CHECKS}
    assert (report.flavour, report.where) == ("tensorrt", "cpu")
    # The engine, its ordinary twin, one for each read copy, and the one with declared aliases; references are embedded.
    assert sorted(machine.aliased) == [False, False, False, False, True]
    refused = {r.claim: r.measured for r in report.results if r.check == "versions"}
    assert "was built with TensorRT 10.0.0.1" in refused["an engine of another version of TensorRT is refused"]
    assert "built for compute capability 7.5" in refused["an engine of another compute capability is refused"]


def test_plans_that_compute_something_else_are_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An address that is bound wrongly: the plan reads one request's ring in place of the other's."""
    from stand_in import Context

    bind = Context.set_tensor_address

    def wrong(context: Context, name: str, memory: int) -> bool:
        shift = 256 if name.endswith("ring_x") else 0
        return bind(context, name, memory + shift)

    monkeypatch.setattr(Context, "set_tensor_address", wrong)
    report = validate(["mamba2"], SETTINGS, tmp_path, ("embedded",))
    assert [r.status for r in report.results] == ["failed"]
