"""What models take alone, by runtime and threads: measured, and as the agent's `auto` wants it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.edge_agent.bench.in_process import is_installed, measure_service_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeName
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.auto import Times, widths

EXECUTOR_OF: Final = {RuntimeName.ONNXRUNTIME: "onnx", RuntimeName.OPENVINO: "openvino"}


@dataclass(frozen=True)
class TimesAlone:
    """Seconds of one run by runtime and threads, then by model; or why the runtime does not take it."""

    taken: Mapping[tuple[RuntimeName, int], Mapping[str, float | str]]

    @classmethod
    def measure(
        cls, models: Sequence[ModelUnderTest], seconds: float, progress: Callable[[str], None]
    ) -> "TimesAlone":
        """With every installed runtime, for each number of threads that a lane of this machine may have."""
        taken = {}
        for runtime in filter(is_installed, RuntimeName):
            for threads in widths(len(os.sched_getaffinity(0))):
                progress(f"timing each model alone on {runtime.value}, threads={threads}")
                taken[runtime, threads] = measure_service_s(models, runtime, seconds, threads)
        return cls(taken)

    @property
    def runtimes(self) -> list[RuntimeName]:
        """Those that are installed."""
        return list(dict.fromkeys(runtime for runtime, _ in self.taken))

    def alone(self, model: str) -> dict[RuntimeName, float | str]:
        """By runtime, on one thread."""
        return {runtime: found[model] for (runtime, threads), found in self.taken.items() if threads == 1}

    def best(self, model: str) -> tuple[float, RuntimeName] | None:
        """The shortest time on one thread; None where no runtime takes the model."""
        times = [(taken, one) for one, taken in self.alone(model).items() if isinstance(taken, float)]
        return min(times, key=lambda pair: pair[0], default=None)

    def of(self, model: str) -> Times:
        """As an agent would have measured it."""
        return {
            ExecutorOptions(name=EXECUTOR_OF[runtime], intra_op_threads=threads): taken
            for (runtime, threads), found in self.taken.items()
            if isinstance(taken := found[model], float)
        }
