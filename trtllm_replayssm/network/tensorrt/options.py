"""How a plan is built: what is asked of TensorRT's builder besides the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.errors import UserError

#: Called with a phase of the build, the steps done and their number; False stops the build.
Report = Callable[[str, int, int], bool | None]


@dataclass(frozen=True)
class PlanOptions:
    """Names and meanings are those of ``trtllm-build`` and ``trtexec``.

    capability: of the GPU, (major, minor); None for the one at hand. strip_plan: leave the weights out of the plan; they are
    put back by a refit. weight_streaming: let the engine keep weights on the host and stream them. weight_sparsity: use
    kernels for weights of which two in four are zero. monitor_memory: report in the log what the builder uses.
    input_timing_cache, output_timing_cache: files of measurements, which make a second build quick and alike. report: is told
    of progress.
    """

    capability: tuple[int, int] | None = None
    strip_plan: bool = False
    weight_streaming: bool = False
    weight_sparsity: bool = False
    monitor_memory: bool = False
    input_timing_cache: Path | None = None
    output_timing_cache: Path | None = None
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    report: Report | None = None

    def config(self, tensorrt: TensorRT, builder: Any) -> Any:
        """TensorRT's builder config for these options.

        Raises UserError when the timing cache cannot be read, EngineError when there is no such GPU.
        """
        trt, config = tensorrt.module, builder.create_builder_config()
        # A float32 router must choose the experts that torch chooses: no shortened mantissas.
        config.clear_flag(trt.BuilderFlag.TF32)
        for wanted, flag in (
            (self.strip_plan, trt.BuilderFlag.STRIP_PLAN),
            (self.weight_streaming, trt.BuilderFlag.WEIGHT_STREAMING),
            (self.weight_sparsity, trt.BuilderFlag.SPARSE_WEIGHTS),
            (self.monitor_memory, trt.BuilderFlag.MONITOR_MEMORY),
        ):
            if wanted:
                config.set_flag(flag)
        config.profiling_verbosity = getattr(trt.ProfilingVerbosity, self.profiling_verbosity.upper())
        tensorrt.set_capability(config, self.capability)
        if self.report is not None:
            config.progress_monitor = progress_monitor(trt, self.report)
        if self.input_timing_cache is not None or self.output_timing_cache is not None:
            self.load_timing_cache(config)
        return config

    def load_timing_cache(self, config: Any) -> None:
        path, content = self.input_timing_cache, b""
        if path is not None:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"the timing cache {path} cannot be read: {error.strerror}") from None
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, False):
            raise UserError(
                f"the timing cache {path} is not one of this TensorRT and GPU", "leave out --input_timing_cache"
            )

    def save_timing_cache(self, config: Any) -> None:
        """Write what a build has measured, whole or not at all."""
        if self.output_timing_cache is None:
            return
        temporary = self.output_timing_cache.with_name(self.output_timing_cache.name + ".part")
        temporary.write_bytes(bytes(config.get_timing_cache().serialize()))
        temporary.replace(self.output_timing_cache)


def progress_monitor(trt: Any, report: Report) -> Any:
    """TensorRT's progress monitor that calls ``report``. Phases may be nested; each ends with done equal to total."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.totals[phase_name] = num_steps
            report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            total = self.totals[phase_name]
            return report(phase_name, min(step + 1, total), total) is not False

        def phase_finish(self, phase_name: str) -> None:
            total = self.totals.pop(phase_name)
            report(phase_name, total, total)

    return Monitor()
