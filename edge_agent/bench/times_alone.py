"""What models take alone, by runtime and threads: measured, and as the agent's `auto` wants it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.edge_agent.bench.in_process import is_installed, measure_service_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions
from stageloom.edge_agent.machine.control_groups import usable_cores
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.arrangements import Times, widths

EXECUTOR_OF: Final = {RuntimeName.ONNXRUNTIME: "onnx", RuntimeName.OPENVINO: "openvino"}
"""What runs a model whole as the runtime does. On a GPU none does: there the agent measures."""


@dataclass(frozen=True)
class TimesAlone:
    """Seconds of one run by runtime, threads and precision, then by model; or why it is not taken."""

    taken: Mapping[tuple[RuntimeName, int, str], Mapping[str, float | str]]

    @classmethod
    def measure(
        cls,
        models: Sequence[ModelUnderTest],
        seconds: float,
        progress: Callable[[str], None],
        *,
        bfloat16: bool = False,
    ) -> "TimesAlone":
        """With every installed runtime, for each number of threads that a lane of this machine may have.

        `bfloat16`: OpenVINO in this precision, too.
        """
        lanes = widths(len(usable_cores()))
        taken = {}
        for runtime in filter(is_installed, RuntimeName):
            reduces = bfloat16 and runtime is RuntimeName.OPENVINO
            for precision in ("fp32", "bf16") if reduces else ("fp32",):
                for threads in lanes if runtime is not RuntimeName.CUDA else lanes[:1]:
                    progress(f"timing each model alone on {runtime.value}, {threads=}, {precision}")
                    options = RuntimeOptions(
                        runtime=runtime, workers=1, threads=threads, float32=precision == "fp32"
                    )
                    taken[runtime, threads, precision] = measure_service_s(models, options, seconds)
        return cls(taken)

    @property
    def runtimes(self) -> list[RuntimeName]:
        """Those that are installed."""
        return list(dict.fromkeys(runtime for runtime, _, _ in self.taken))

    def alone(self, model: str) -> dict[RuntimeName, float | str]:
        """By runtime, on one thread in float32."""
        return {runtime: self.taken[runtime, 1, "fp32"][model] for runtime in self.runtimes}

    def best(self, model: str) -> tuple[float, RuntimeName] | None:
        """The shortest time on one thread; None where no runtime takes the model."""
        times = [(taken, one) for one, taken in self.alone(model).items() if isinstance(taken, float)]
        return min(times, key=lambda pair: pair[0], default=None)

    def shortest_s(self, model: str) -> float:
        """Of one run, with whatever runtime, threads and precision; infinity where none takes the model."""
        times = (found[model] for found in self.taken.values())
        return min((taken for taken in times if isinstance(taken, float)), default=math.inf)

    def of(self, model: str, *precisions: str) -> Times:
        """As an agent that may use these precisions beside float32 would have measured it on cores."""
        return {
            ExecutorOptions(name=EXECUTOR_OF[runtime], intra_op_threads=threads, precision=precision): taken
            for (runtime, threads, precision), found in self.taken.items()
            if runtime in EXECUTOR_OF
            and precision in ("fp32", *precisions)
            and isinstance(taken := found[model], float)
        }
