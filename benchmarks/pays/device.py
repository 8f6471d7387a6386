"""A planner and an agent as processes, with measured models, under the plan that needs no choice."""

import contextlib
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from benchmarks.processes import PLANNER, DemoFailed, System
from benchmarks.runner import progress
from stageloom.edge_agent.bench.in_process import is_installed
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.times_alone import EXECUTOR_OF
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.tables import AlarmRow
from stageloom.planner.store.telemetry import telemetry_rows
from stageloom.planner.store.trials import trial_infos
from stageloom.planner.twin.compiled import compile_ahead
from stageloom.planner.twin.compiled.compile_cache import is_compiled
from stageloom.shared.errors import ExitCode
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import PlanActivated, QueueSample, RowKind
from stageloom.shared.plan import ExecutorOptions, Plan, Resource, decode_plan
from stageloom.shared.policy.queues import variance
from stageloom.shared.search.arrangements import Times
from stageloom.shared.text import counted

DEVICE: Final = "bench"
DAY_PLAN: Final = "day"
_PATIENCE_S: Final = 90.0
COMMITTED: Final = "committed"
PENDING: Final = "pending"
_PROFILES: Final = 3  # a measurement that other programs disturb is refused
_ANSWERS: Final = (ExitCode.OK, ExitCode.FAILED)  # times of whole models may be there, some operators' not
_BEHIND: Final = 10  # niceness: a tenth beside one who is not nice
_ROWS: Final = 100_000


@dataclass(frozen=True)
class QueueMoment:
    """The queues at one instant of the device's clock."""

    at_us: int
    variance_s2: float
    oldest_age_s: float


class PaysDevice(System):
    """Enrolled, with settings untouched; `day` is the plan that it begins with.

    A planner has a machine of its own. Here it gets what the device leaves, and searches without Ray.
    """

    def __init__(self, folder: Path, models: Sequence[ModelUnderTest], profile_s: float) -> None:
        super().__init__(folder, DEVICE, {}, patience_s=_PATIENCE_S, STAGELOOM_PLANNER_SEARCH="local")
        self.models = models
        self.times_s: dict[tuple[str, int], dict[str, float]] = {}  # by executor and threads, then by model
        self.profiles: dict[tuple[str, int], list[int]] = {}  # by the same, the requests
        self._profile_s = profile_s

    def prepare(self) -> None:
        """Measure the models, and run the plan of all that.

        Raises:
            DemoFailed: a step did not work.
        """
        self.measure()
        self.planner("plan", "create", self.device, "--name", DAY_PLAN, *self.chosen)
        self.run_plan(DAY_PLAN)

    def measure(self) -> None:
        """Start, import the models, measure each on every executor with one thread and with one per core.

        What a planner would else compile in its first minute is compiled before.

        Raises:
            DemoFailed: a step did not work.
        """
        compile_kernels()
        self.start()
        _put_behind(self.processes.running["planner"].pid)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as commands:
            list(commands.map(self._add, self.models))
        for executor in (executor for runtime, executor in EXECUTOR_OF.items() if is_installed(runtime)):
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                self._profile(executor, threads)

    def _add(self, model: ModelUnderTest) -> None:
        words = ("model", "add", f"{model.name}={model.path}", "--json")
        self.processes.call(f"model-add-{model.name}", PLANNER, *words)

    def alone_s(self, model: str) -> float:
        """On one thread of the executor that is fastest then."""
        return min(times.get(model, math.inf) for (_, threads), times in self.times_s.items() if threads == 1)

    def times(self, model: str) -> Times:
        """As an agent would have measured the model."""
        return {
            ExecutorOptions(name=executor, intra_op_threads=threads): times[model]
            for (executor, threads), times in self.times_s.items()
            if model in times
        }

    @property
    def chosen(self) -> list[str]:
        """All models, as commands want them."""
        return [word for model in self.models for word in ("--model", model.name)]

    def _profile(self, executor: str, threads: int) -> None:
        how = ("--executor", executor, "--threads", str(threads), "--budget", f"{self._profile_s:g}s")
        times: dict[str, float] = {}
        requests: list[int] = []
        missing = {model.name: "" for model in self.models}
        for _ in range(_PROFILES):
            chosen = (word for name in missing for word in ("--model", name))
            found = self.planner("device", "profile", self.device, *chosen, *how, answers=_ANSWERS)
            requests += found["requests"]
            times |= {one["model"]: one["whole_us"] / 1e6 for one in found["measured"] if one["whole_us"]}
            missing = {one["model"]: one["reason"] for one in found["measured"] if one["model"] not in times}
            if not missing:
                break
        else:
            why = "; ".join(f"{name}: {reason or 'no time came'}" for name, reason in missing.items())
            raise DemoFailed(
                f"{executor} with {counted(threads, 'thread')} was not measured in {_PROFILES} tries ({why});"
                " end what else keeps this machine busy, and try again"
            )
        self.profiles[executor, threads] = requests
        self.times_s[executor, threads] = times

    def run_plan(self, name: str) -> None:
        """Push a plan without a trial; returns once it is committed."""
        generation = self.planner("plan", "push", self.device, name, "--now")["generation"]

        def committed() -> bool:
            report = self.store.read(device_info, self.device).report
            state = report.state.value if report.state is not None else ""
            return report.generation >= generation and state == COMMITTED

        self.until(f"plan {name} to be committed", committed)

    def replanning(self, on: bool) -> None:
        """Whether alarms are answered; all else stays as it is by default."""
        self.planner("device", "replan", self.device, "--on" if on else "--off")

    def plan(self, name_or_digest: str) -> Plan:
        """As the planner keeps it."""
        return decode_plan(self.store.read(plan_info, name_or_digest).wire)

    def active(self) -> Digest | None:
        """The plan that runs, as the planner knows."""
        return self.store.read(device_info, self.device).report.active

    def replans(self, since_us: int) -> list[ReplanInfo]:
        """Begun since a moment of the device's clock, oldest first."""
        found = self.store.read(replan_infos, self.device, limit=200)
        return sorted((one for one in found if one.at_us >= since_us), key=lambda one: one.at_us)

    def alarms(self, since_us: int, until_us: int) -> int:
        """Alarms between two moments of the device's clock."""
        return self.store.read(_alarms, self.device, since_us, until_us)

    def trials(self, since_us: int) -> list[TrialInfo]:
        """Begun since a moment of the device's clock and ended, oldest first."""
        found = self.store.read(trial_infos, self.device)
        return sorted((one for one in found if one.began_us >= since_us), key=lambda one: one.began_us)

    def settled(self) -> bool:
        """No re-plan is under way."""
        return all(one.outcome != PENDING for one in self.replans(0))

    def activations(self, since_us: int) -> list[tuple[int, str]]:
        """When the device went over to which plan, outside of trials."""
        kinds = [RowKind.PLAN_ACTIVATED]
        rows = self.store.read(telemetry_rows, self.device, kinds, since_us=since_us, limit=_ROWS)
        return sorted((row.at_us, row.data.plan) for row in rows if isinstance(row.data, PlanActivated))

    def queues(self, since_us: int) -> list[QueueMoment]:
        """The queues as the device sampled them."""
        kinds = [RowKind.QUEUE_SAMPLE]
        rows = self.store.read(telemetry_rows, self.device, kinds, since_us=since_us, limit=_ROWS)
        samples = sorted(
            ((row.at_us, row.data) for row in rows if isinstance(row.data, QueueSample)), key=itemgetter(0)
        )
        return [
            _moment(at_us, [one for _, one in together])
            for at_us, together in groupby(samples, key=itemgetter(0))
        ]


def _moment(at_us: int, queues: Sequence[QueueSample]) -> QueueMoment:
    work_s = [one.queued_work_us / 1e6 for one in queues]
    return QueueMoment(at_us, variance(work_s), max(one.oldest_age_us for one in queues) / 1e6)


def _alarms(session: Session, device: DeviceId, since_us: int, until_us: int) -> int:
    rows = select(func.count()).where(
        AlarmRow.device == device, AlarmRow.at_us >= since_us, AlarmRow.at_us < until_us
    )
    return int(session.scalar(rows) or 0)


def compile_kernels() -> None:
    """Compile the planner's twin, which it would else do in its first minute, beside what is measured."""
    if not is_compiled():
        progress("compiling the twin, once")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(compile_ahead).result()


def _put_behind(pid: int) -> None:
    """A process and whatever it starts come after what others run.

    It leads a session. Where the kernel shares the processor between sessions first (autogroup), niceness
    counts within one alone, so that the session's own is set.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), _BEHIND)
    with contextlib.suppress(OSError):  # no such kernel
        Path(f"/proc/{pid}/autogroup").write_text(str(_BEHIND))


def one_wide_lane(plan: Plan) -> Plan:
    """The same models and executors on one lane that has all cores: each task alone, with every thread."""
    cores = tuple(sorted({core for resource in plan.resources for core in resource.cores}))
    wide = [replace(options, intra_op_threads=len(cores)) for options in plan.executors]
    return replace(
        plan,
        lanes=1,
        resources=(Resource(cores=cores),),
        lane_resources=(0,),
        executor=wide[0],
        further_executors=tuple(wide[1:]),
        combined=tuple(replace(block, resources=()) for block in plan.combined),  # an express lane has some
    )


def lanes_of(plan: Plan) -> str:
    """The lanes of a plan and how its blocks run there, in words."""
    used = {plan.executors[one.executor] for one in plan.combined}
    options = sorted({f"{one.name} x{one.intra_op_threads}" for one in used})
    return f"{counted(plan.lanes, 'lane')}, {len(plan.combined)} blocks, {' and '.join(options)}"
