"""Which executor runs a model fastest on this device, and with how many threads: measured once, at first
sight, and remembered.

An agent that makes its plan itself serves at once, on what it knows. What it does not know it has the engine
process measure while nothing is to be served, one model on one executor after another. When all is known and
another plan is better, that plan takes over under the guard.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.edge_agent.config import AUTO, AgentConfig
from stageloom.edge_agent.lifecycle.events import PlanMeasured
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.machine.device import cpu_flags, device_class, has_bf16
from stageloom.edge_agent.machine.executors import machine_facts, usable_on_gpu
from stageloom.edge_agent.reporting.profiles import ENDED_TWICE
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import WayRequests
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, Origin, StageProfileRequest
from stageloom.shared.messages.telemetry import ExecutorTime, MachineFacts, RowData
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.arrangements import ON_GPU, Times, computing_lanes, express_of, widths
from stageloom.shared.search.auto import auto_plan
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.text import counted

FIRST_CHOICE: Final = ExecutorOptions(name="onnx")
"""Runs whatever was imported; others must show that they are faster."""

TIMES_NAME: Final = "executor_times"
"""The file in the agent's home that remembers."""

_PACKAGES: Final = {"onnx": "onnxruntime", "openvino": "openvino"}
GPU_PRECISIONS: Final = ("tf32", "fp16")
"""Of executors on a GPU, beside float32."""

_REDUCES: Final = {"openvino": ("bf16",), **dict.fromkeys(ON_GPU, GPU_PRECISIONS)}
"""Precisions that executors know beside float32, and are used where they are allowed."""
_MOST: Final = 1024  # times that are remembered


def installed() -> tuple[str, ...]:
    """Executors that this environment has: on the processor, then on a GPU."""
    on_cores = tuple(name for name, package in _PACKAGES.items() if find_spec(package) is not None)
    return (*on_cores, *usable_on_gpu())


def ways(executors: Sequence[str], cores: int, precision: str = "fp32") -> list[ExecutorOptions]:
    """How a model may be run, to be measured: on each executor, with the threads that a lane may have.

    `precision`: that is allowed beside float32, where an executor knows it.
    """
    return [
        ExecutorOptions(name=name, intra_op_threads=threads, precision=one)
        for name in executors
        for one in dict.fromkeys(("fp32", precision if precision in _REDUCES.get(name, ()) else "fp32"))
        for threads in (widths(cores) if name not in ON_GPU else (1,))
    ]


class _Time(Struct, frozen=True, array_like=True):
    """Seconds of one run of a whole model; infinity where it cannot run there."""

    executor: str
    threads: int
    precision: str
    seconds: float


class _Remembered(Struct, frozen=True):
    """What was measured in one environment, by artifact; the newest last."""

    environment: str
    times: dict[str, list[_Time]]


class ExecutorTimes:
    """What was measured on this device as it is now; another power mode or runtime makes it void."""

    def __init__(self, file: StateFile, environment: str) -> None:
        self.environment = environment
        self._file = file
        self._times_s: dict[str, dict[ExecutorOptions, float]] = {}
        body = file.load().body
        if body is not None:
            try:
                found = msgspec.msgpack.decode(body, type=_Remembered)
            except msgspec.MsgspecError:
                return  # of another version: measured again
            if found.environment == environment:
                self._times_s = {artifact: dict(map(_read, rows)) for artifact, rows in found.times.items()}

    def of(self, artifact: Digest) -> Times:
        """What is known of a model: seconds of one run of the whole one, infinity where it cannot run."""
        return self._times_s.get(artifact, {})

    def rows(self, of: Digest | None = None) -> list[ExecutorTime]:
        """What is known of float32, of one artifact or all, for the planner: one task at a time."""
        return [
            ExecutorTime(
                Digest(artifact),
                options.name,
                options.intra_op_threads,
                1,
                self.environment,
                seconds * 1e6 if seconds < math.inf else None,
                0,
                "" if seconds < math.inf else "it could not be measured",
            )
            for artifact, times_s in self._times_s.items()
            for options, seconds in times_s.items()
            if options.precision == "fp32" and of in (None, artifact)
        ]

    def note(self, artifact: Digest, executor: ExecutorOptions, seconds: float) -> None:
        """Remember what a model takes, in memory."""
        known = self._times_s.pop(artifact, {})
        self._times_s[artifact] = {**known, executor: seconds}
        while len(self._times_s) > _MOST:
            del self._times_s[next(iter(self._times_s))]

    def measured(self, of: Digest, way: ExecutorOptions, step_us: float | None, *, fatal: bool) -> None:
        """Note the shortest of some measurements; None: it cannot run so, if `fatal` whatever it took."""
        known_s = math.inf if fatal else self.of(of).get(way, math.inf)
        self.note(of, way, min(known_s, math.inf if step_us is None else step_us * 1e-6))

    def save(self, without: Collection[tuple[Digest, ExecutorOptions]] = ()) -> None:
        """All but these.

        Raises:
            StorageError: it cannot be written; the next start measures again.
        """
        times = {
            artifact: [_row(one) for one in known.items() if (Digest(artifact), one[0]) not in without]
            for artifact, known in self._times_s.items()
        }
        self._file.save(msgspec.msgpack.encode(_Remembered(self.environment, times)))


def _row(known: tuple[ExecutorOptions, float]) -> _Time:
    options, seconds = known
    return _Time(options.name, options.intra_op_threads, options.precision, seconds)


def _read(row: _Time) -> tuple[ExecutorOptions, float]:
    options = ExecutorOptions(name=row.executor, intra_op_threads=row.threads, precision=row.precision)
    return options, row.seconds


def told_at_start(config: AgentConfig) -> list[RowData]:
    """What the planner is to know of this device: its cores and executors, and what was measured on them."""
    times = ExecutorTimes(StateFile(config.home_path / TIMES_NAME), device_class())
    return [facts_now(config), *times.rows()]


def facts_now(config: AgentConfig) -> MachineFacts:
    """Its cores and executors alone."""
    usual = FIRST_CHOICE.name if config.executor == AUTO else config.executor
    return machine_facts(usual, config.intra_op_threads)


@dataclass(frozen=True)
class OwnModels:
    """The models of an agent that makes its plan itself."""

    choices: tuple[ModelChoice, ...]
    needs: tuple[ArtifactNeed, ...]  # of the same models
    cores: tuple[int, ...]
    precision: str = "fp32"  # that is allowed beside float32
    pinned: bool = True  # lanes keep to the cores

    def runnable(self, plan: Plan, counter: int = 0) -> RunnablePlan:
        """A plan of these models, ready to run."""
        return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, counter), plan.wire, self.needs)

    def best(self, times: ExecutorTimes) -> Plan:
        """The plan for what is known."""
        lacking = self.precision == "bf16" and not has_bf16(cpu_flags())  # times may be of another processor
        allowed = ("fp32",) if lacking else ("fp32", self.precision)
        known = [
            {o: taken for o, taken in times.of(one.artifact).items() if o.precision in allowed}
            for one in self.choices
        ]
        return auto_plan(self.choices, known, FIRST_CHOICE, self.cores, pinned=self.pinned)


class ExecutorChoice:
    """Has measured what is not known, and offers the better plan that follows."""

    def __init__(
        self,
        models: OwnModels,
        times: ExecutorTimes,
        running: Plan,
        wanted: Sequence[ExecutorOptions],
    ) -> None:
        """`running`: the plan that the agent begins with; `wanted`: the ways to run a model."""
        self._models = models
        self._times = times
        self._running = running
        self._asked = WayRequests(times, wanted)
        self._mixed = False  # measured in several environments
        self.problems: list[str] = []  # that were met since they were last looked at
        self._unmeasured: set[tuple[str, str]] = set()  # model and executor, of which that was said

    @property
    def left(self) -> int:
        """Measurements that are still to be made."""
        return len(self._asked.open)

    def requests(self) -> list[StageProfileRequest]:
        """What is to be measured; nothing where there is no choice, or once all is known."""
        return self._asked.of(list(zip(self._models.choices, self._models.needs, strict=True)))

    def answered(
        self, request: int, step_us: float | None, reason: str, environment: str, *, cannot: bool = False
    ) -> PlanMeasured | None:
        """A measurement ended, without a time where it was not made; the better plan after the last.

        `cannot`: the model cannot run so, which is remembered; on a busy device or a slow start the next
        start asks again. `environment`: of now; if another one than the times are of has come since the
        start, nothing of what was measured is believed or saved.
        """
        choice, options = self._asked.open.pop(request)
        if environment != self._times.environment and not self._mixed:
            self._mixed = True
            self.problems.append(
                "power mode or cores changed while models were measured: the next start measures again"
            )
        if self._mixed:
            return None
        if step_us is None and (choice.name, options.name) not in self._unmeasured:
            self._unmeasured.add((choice.name, options.name))  # other threads and rounds fail alike
            self.problems.append(f"model {choice.name!r} is not measured on {options.name}: {reason}")
        if step_us is not None or cannot:
            self._times.measured(choice.artifact, options, step_us, fatal=reason == ENDED_TWICE)
        if self._asked.open:
            return None
        try:
            self._times.save()
        except StorageError as error:
            self.problems.append(str(error))
        best = self._models.best(self._times)
        if best.structure == self._running.structure:
            return None
        return PlanMeasured(self._models.runnable(best), self._cause(best))

    def _cause(self, plan: Plan) -> str:
        """What was measured, for people."""
        said = []
        lanes, express = computing_lanes(plan), express_of(plan)
        if lanes != computing_lanes(self._running) and plan.resources:
            threads = max(options.intra_op_threads for options in plan.executors)
            said.append(f"{counted(lanes, 'lane')} of {counted(threads, 'thread')}")
        for index, model in enumerate(plan.models):
            options = next(plan.executors[c.executor] for c in plan.combined if c.members[0].model == index)
            times_s = self._times.of(model.artifact)
            alone = ExecutorOptions(name=FIRST_CHOICE.name, intra_op_threads=options.intra_op_threads)
            if options != alone and options in times_s and alone in times_s:
                where = (
                    options.name if options.precision == "fp32" else f"{options.name} in {options.precision}"
                )
                said.append(f"{model.name} {times_s[alone] / times_s[options]:.1f} times as fast on {where}")
            if model.cuts:
                said.append(f"{model.name} in {counted(model.num_blocks, 'block')}")
            if index in express:
                said.append(f"{model.name} in an express lane")
        return ", ".join(said) or "measured"
