"""What users run instead: onnxruntime and OpenVINO by their defaults, and tuned by hand for the cores that
there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from stageloom.edge_agent.bench.contestant import Contestant
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.rival_threads import AsynchronousRival, TaskOrder, ThreadedRival
from stageloom.edge_agent.bench.runtime_options import RuntimeName, RuntimeOptions


class Family(Enum):
    """Rivals of which the best one counts."""

    NAIVE = "naive"
    ONNXRUNTIME = "onnxruntime"
    OPENVINO_DEFAULT = "openvino_default"
    OPENVINO = "openvino"
    CUDA = "cuda"
    REDUCED = "reduced"  # in fewer bits than the model says, which is a default of OpenVINO and of CUDA
    BY_DEADLINE = "by_deadline"  # a hand-written loop that orders by deadline; no setting of any runtime


@dataclass(frozen=True)
class RivalSetting:
    """One way of serving the models with runtimes as they are. Tasks that are too late are given up."""

    name: str
    family: Family
    options: RuntimeOptions
    order: TaskOrder = TaskOrder.ARRIVAL

    @property
    def measures(self) -> bool:
        return False

    def make(self, models: Sequence[ModelUnderTest]) -> Contestant:
        """The rival, not started."""
        if self.options.hint == "THROUGHPUT":
            from stageloom.edge_agent.bench.openvino_rival import load_queues

            return AsynchronousRival(lambda: load_queues(self.options, models))
        from stageloom.edge_agent.bench.runtimes import load_runtime

        return ThreadedRival(
            lambda: load_runtime(self.options, models),
            len(models),
            workers=self.options.workers,
            order=self.order,
        )


def _onnxruntime(workers: int, threads: int, *, spinning: bool = False) -> RivalSetting:
    options = RuntimeOptions(workers=workers, threads=threads, spinning=spinning)
    name = f"ort_{workers}x{threads}" if workers else "ort_per_model"
    return RivalSetting(f"{name}_spin" if spinning else name, Family.ONNXRUNTIME, options)


def _openvino(name: str, *, workers: int = 0, threads: int = 0, hint: str = "") -> RivalSetting:
    options = RuntimeOptions(runtime=RuntimeName.OPENVINO, workers=workers, threads=threads, hint=hint)
    return RivalSetting(name, Family.OPENVINO, options)


NAIVE: Final = RivalSetting("naive", Family.NAIVE, RuntimeOptions(spinning=True))
"""A default onnxruntime session and a thread for each model."""


def tuned_onnxruntime(cores: int) -> tuple[RivalSetting, ...]:
    """All cores as threads of one worker, as pairs, and as a worker each: workers x threads. A model has one
    session; of workers with several threads each has its own."""
    shapes = [(1, cores), (cores // 2, 2), (cores, 1)]
    return tuple(_onnxruntime(*shape) for shape in dict.fromkeys(shapes) if shape[0])


def every_onnxruntime(cores: int) -> tuple[RivalSetting, ...]:
    """These, and what is likely to carry less: threads that spin, one core alone, more threads than cores."""
    others = (
        _onnxruntime(1, cores, spinning=True),
        _onnxruntime(1, 1),
        _onnxruntime(cores, 2),
        _onnxruntime(0, 1),
    )
    return _by_name([*tuned_onnxruntime(cores), *others])


def openvino_throughput() -> RivalSetting:
    """The throughput hint: OpenVINO chooses streams and threads, and has a queue of requests."""
    return _openvino("ov_throughput", hint="THROUGHPUT")


def openvino_by_core(cores: int) -> RivalSetting:
    """A single-thread worker for each core."""
    return _openvino(f"ov_{cores}x1", workers=cores, threads=1)


def every_openvino(cores: int) -> tuple[RivalSetting, ...]:
    """workers x threads, without pinning; one worker with a thread for each core among them."""
    alone = _openvino(f"ov_1x{cores}", workers=1, threads=cores)
    per_model = _openvino("ov_per_model", threads=1)
    return _by_name([openvino_by_core(cores), openvino_throughput(), alone, per_model])


def _by_name(settings: Sequence[RivalSetting]) -> tuple[RivalSetting, ...]:
    return tuple({one.name: one for one in settings}.values())


OPENVINO_LATENCY: Final = replace(_openvino("ov_latency", hint="LATENCY"), family=Family.OPENVINO_DEFAULT)
"""The latency hint and a thread for each model."""


def _cuda(name: str, workers: int) -> RivalSetting:
    return RivalSetting(name, Family.CUDA, RuntimeOptions(runtime=RuntimeName.CUDA, workers=workers))


NAIVE_CUDA: Final = _cuda("cuda_per_model", 0)
"""A session on the GPU and a thread for each model: what people do first there."""

CUDA: Final = (NAIVE_CUDA, _cuda("cuda_1", 1), _cuda("cuda_2", 2), _cuda("cuda_4", 4))
"""Workers, one session for each model on the GPU."""


def reduced(setting: RivalSetting) -> RivalSetting:
    """The same in the precision that its runtime chooses by default: OpenVINO bfloat16 on processors that
    have it, CUDA TF32."""
    options = replace(setting.options, float32=False)
    bits = "tf32" if setting.family is Family.CUDA else "bf16"
    return replace(setting, name=f"{setting.name}_{bits}", family=Family.REDUCED, options=options)


def by_deadline(chosen: Mapping[str, RuntimeName], cores: int) -> RivalSetting:
    """A single-thread worker for each core, the earliest deadline first, each model in its best runtime."""
    options = RuntimeOptions(chosen=chosen, workers=cores, threads=1)
    return RivalSetting(f"by_deadline_{cores}x1", Family.BY_DEADLINE, options, TaskOrder.DEADLINE)


def rival_settings(cores: int, *, openvino: bool, bfloat16: bool) -> tuple[RivalSetting, ...]:
    """All settings but `by_deadline`; `bfloat16` where it is what OpenVINO chooses by default."""
    tuned = (OPENVINO_LATENCY, *every_openvino(cores)) if openvino else ()
    return (NAIVE, *every_onnxruntime(cores), *tuned, *(map(reduced, tuned) if bfloat16 else ()))
