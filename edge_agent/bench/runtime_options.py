"""How models are loaded into a runtime, as its users write it down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class RuntimeName(Enum):
    """Runtimes that rivals use."""

    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    CUDA = "onnxruntime_cuda"  # onnxruntime's CUDA provider


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """For all models but those in `chosen` the runtime, and for all of them its threads."""

    runtime: RuntimeName = RuntimeName.ONNXRUNTIME
    chosen: Mapping[str, RuntimeName] = field(default_factory=dict)  # by model
    workers: int = 0  # threads that call, each for all models; 0: one for each model
    threads: int = 0  # inside an operator; 0: the runtime's default
    spinning: bool = False  # onnxruntime's threads keep a core busy while they wait
    hint: str = ""  # OpenVINO's PERFORMANCE_HINT, which chooses threads and streams
    float32: bool = True
    """It computes as the model says; else OpenVINO in bfloat16 where the processor has it, CUDA in TF32."""

    def runtime_of(self, model: str) -> RuntimeName:
        """What runs a model."""
        return self.chosen.get(model, self.runtime)
