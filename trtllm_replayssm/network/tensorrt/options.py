"""How a plan is built: what is asked of TensorRT's builder besides the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.files import output_file

#: Called with a phase of the build, the steps done and their number; False stops the build.
Report = Callable[[str, int, int], bool | None]


@dataclass(frozen=True)
class PlanOptions:
    """Names and meanings are those of ``trtllm-build`` and ``trtexec``.

    capability: of the GPU, (major, minor); None for the one at hand. aliased_plugins: plugin layers may declare that an output
    is the memory of an input. strip_plan: leave the weights out of the plan; they are put back by a refit. weight_streaming:
    let the engine keep weights on the host and stream them. weight_sparsity: use kernels for weights of which two in four are
    zero. monitor_memory: report in the log what the builder uses. input_timing_cache, output_timing_cache: files of
    measurements, which make a second build quick and alike. report: is told of progress.
    """

    capability: tuple[int, int] | None = None
    aliased_plugins: bool = False
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
        if self.aliased_plugins:
            # Without it the builder refuses plugins that declare aliases.
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
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
        """Write what a build has measured, whole or not at all. Raises UserError when it cannot be written."""
        path = self.output_timing_cache
        if path is None:
            return
        with output_file(path) as file:
            file.write(config.get_timing_cache().serialize())


def progress_monitor(trt: Any, report: Report) -> Any:
    """TensorRT's progress monitor that calls ``report``. Phases may be nested; each ends with done equal to total."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.totals: dict[str, int] = {}
            #: What went wrong in here: TensorRT stops at the next step, and loses what is raised.
            self.fault: BaseException | None = None

        def told(self, phase_name: str, done: int, total: int) -> bool:
            try:
                return report(phase_name, done, total) is not False
            except BaseException as fault:  # Ctrl-C arrives here, too
                self.fault = self.fault or fault
                return False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.totals[phase_name] = num_steps
            self.told(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            total = self.totals.get(phase_name, step + 1)
            return self.told(phase_name, min(step + 1, total), total) and self.fault is None

        def phase_finish(self, phase_name: str) -> None:
            total = self.totals.pop(phase_name, 0)
            self.told(phase_name, total, total)

    return Monitor()
