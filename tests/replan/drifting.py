"""A device whose clock may fall, as a seeded simulation: what it serves, what it says, what it answers.

It is made of the agent's own parts where those decide (`DriftWatch`, `Alarms`, `AlarmBox`), and writes into a
real store what an agent would send.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stageloom.edge_agent.lifecycle.session import AlarmBox
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.replan.alarms import Alarms, alarm_raised
from stageloom.edge_agent.replan.drift import DriftWatch
from stageloom.edge_agent.worker.messages import Stats, StepStats
from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.profiles import request_profile, request_stage_profile
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import bind
from stageloom.shared.clock import SystemClock
from stageloom.shared.engine.stats import ModelQueue, QueueSnapshot
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import DeviceId
from stageloom.shared.launch_list import LaunchList, lower
from stageloom.shared.messages.control import Alarm, AlarmAck, Desired, DeviceState, Origin
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    GroupSpan,
    Ledger,
    OperatorTiming,
    PlanActivated,
    ProfileResult,
    Row,
    RowData,
    StageProfileResult,
    StageTiming,
    StateChange,
    StepTimings,
    StepTrace,
    TrialEnded,
    encode_row,
)
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.trigger import Cause
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.stage_times import stage_spans
from tests.search.graphs import model
from tests.store.helpers import NANO, enrol

CLASS = "cpu-2-core"
BOOT = 7
BARRIER_US = 100.0
"""Where groups meet: the host's, so the clock of the device does not change it."""

_PREDECESSORS: list[list[int]] = [[]] + [
    row for head in (0, 3, 6, 9) for row in ([head], [head], [head + 1, head + 2])
]
OPERATORS_US = (30, 90, 90, 30, 400, 300, 30, 200, 150, 30, 60, 60, 30)
"""At the full clock, of four pairs of branches in a row: two gain side by side there, all at half of it."""


class InlinePool:
    """Runs what it is given at once."""

    workers = 1
    where = "inline"

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Nothing runs."""


class DriftingDevice:
    """Serves its plan second by second; `alarm` is the newest one that it raised."""

    def __init__(
        self, store: Store, folder: Path, seed: int = 1, *, idle: bool = True, began_us: int | None = None
    ) -> None:
        """`idle`: it has moments without tasks, in which it measures what it is asked to.

        `began_us`: what its own clock says at first.
        """
        self.store, self.idle = store, idle
        self.clock = 1.0  # over its full one
        self.traced = True
        self.environment = CLASS
        self.noise = 0.0  # of one second's mean, relatively
        self.rng = random.Random(seed)
        self.drift, self.alarms, self.box = DriftWatch(), Alarms(), AlarmBox(BOOT)
        self.now_s = 0.0
        self.asked: list[Any] = []
        self._rows = 0
        self._timelines: dict[tuple[str, float], list[tuple[int, float, float]]] = {}
        # It serves many minutes in a moment: they are over, as what a device tells of is.
        self._began_us = SystemClock().wall_us() - 3_600_000_000 if began_us is None else began_us
        enrol(store)
        _, graph = model("branches", _PREDECESSORS)
        self.artifact, blob = pack_artifact(graph, b"branches")
        path = folder / "branches.artifact"
        path.write_bytes(blob)
        store.add_model("branches", path, self.artifact)
        self.graphs = {self.artifact: graph}

    # -- what it is --

    def operator_us(self, op: int) -> float:
        return OPERATORS_US[op] / self.clock

    def step_us(self, plan: Plan) -> float:
        """One step of a plan of one combined block."""
        return sum(us for _, us in self.stages_us(plan))

    def stages_us(self, plan: Plan) -> list[tuple[int, float]]:
        """(first stage, microseconds) of the stages as they run."""
        items, times = self._items(plan)
        spans = stage_spans(items, times)
        assert spans is not None
        return [(first, end - begin) for first, (begin, end) in spans.items()]

    def _items(self, plan: Plan) -> tuple[LaunchList, list[tuple[int, float, float]]]:
        combined = bind(plan, self.graphs).combined[0]
        items = lower(combined.plan.schedule, combined.graph, combined.full_mask)
        at_us, times = 0.0, []
        for stage in sorted({item.stage for item in items}):
            these = [
                (i, sum(map(self.operator_us, item.ops)))
                for i, item in enumerate(items)
                if item.stage == stage
            ]
            longest = max(us for _, us in these) + (BARRIER_US if len(these) > 1 else 0.0)
            times += [(i, at_us, at_us + longest) for i, _ in these]
            at_us += longest
        return items, times

    # -- what it does --

    def runs(self, plan: Plan) -> None:
        """From now on."""
        self.plan = plan
        self.sends(PlanActivated(plan.digest, Origin.PLANNER, 1, 1))

    def serve(self, seconds: int) -> Alarm | None:
        """Second by second, until it raises an alarm; what it did reaches the planner by then."""
        rows: list[tuple[int, RowData]] = []
        step_us, plan = self.step_us(self.plan), self.plan.digest
        for _ in range(seconds):
            self.now_s += 1.0
            disturbed = 1.6 if self.noise and int(self.now_s) % 60 < 5 else 1.0  # for five seconds a minute
            factor = disturbed * self.rng.lognormvariate(0.0, self.noise) if self.noise else 1.0
            total_us = 30 * step_us * factor
            rows.append((self._at_us(), StepTimings(plan[:16], 0, 1, 30, round(total_us), 0)))
            rows += [(self._at_us(), self._trace(factor)) for _ in range(3) if self.traced]
            steps = StepStats(1, 0, 1, 30, 30, total_us * 1e-6, 0.0, 0.0)
            self.drift.add(Stats(self.now_s, 1, 0.0, (), (steps,)), plan, (("branches",),))
            if (alarm := self._glances()) is not None:
                break
        self._send(rows)
        return alarm

    def _glances(self) -> Alarm | None:
        found = (self._glance(self.now_s + tenth / 10) for tenth in range(10))
        return next((alarm for alarm in found if alarm is not None), None)

    def _glance(self, at_s: float) -> Alarm | None:
        queue = ModelQueue("branches", int(30 * at_s), 0, 0.0, 1, 0)
        ratio, mode = self.drift.ratio, self.environment
        glance = QueueSnapshot(at_s, PlanKey(1), None, (queue,))
        fired = self.alarms.glance(glance, {}, held=False, drift=ratio, power_mode=mode)
        if fired is None:
            return None
        if fired.firing.cause is Cause.DRIFT:
            self.drift.answered()
        running = RunnablePlan(PlanRef(self.plan.digest, Origin.PLANNER), self.plan.wire, ())
        self.box.take(alarm_raised(fired, running, self._at_us()), self.environment, at_s)
        alarm = self.box.due(at_s, 1.0)
        assert alarm is not None
        self.box.acknowledged(AlarmAck(boot=BOOT, number=alarm.number))
        return alarm

    def _timeline(self, plan: str, clock: float) -> list[tuple[int, float, float]]:
        if (plan, clock) not in self._timelines:
            self._timelines[plan, clock] = self._items(self.plan)[1]
        return self._timelines[plan, clock]

    def _trace(self, factor: float) -> StepTrace:
        times = self._timeline(self.plan.digest, self.clock)
        spans = tuple(
            GroupSpan(item, index, round(begin * factor), round(end * factor))
            for index, (item, begin, end) in enumerate(times)
        )
        return StepTrace(self.plan.digest[:16], 0, 1, 0, spans[-1].end_us, spans, whole=True)

    # -- what it says --

    def sends(self, *rows: RowData) -> None:
        self._send([(self._at_us(), data) for data in rows])

    def _send(self, rows: Sequence[tuple[int, RowData]]) -> None:
        stored = []
        for at_us, data in rows:
            body = encode_row(Row(at_us, data))
            stored.append(StoredRow(BOOT, self._rows, at_us, KIND_OF[type(data)], body, data))
            self._rows += 1
        LinkStore(self.store).append_telemetry(
            [TelemetryWrite(NANO, tuple(stored), (Ledger(BOOT, self._rows, 0),))]
        )

    def profile(self, request: int | None = None) -> None:
        """The operators, at today's clock; without a request somebody asks for them now."""
        if request is None:
            (request,), _ = self.store.write(request_profile, NANO, ["branches"])
        times = tuple(OperatorTiming(op, self.operator_us(op), 1.0, 9) for op in range(len(OPERATORS_US)))
        self.sends(ProfileResult(request, self.artifact, 1, self.environment, times, True))

    def profile_stages(self, plan: Plan, request: int | None = None) -> None:
        """The stages of a plan that the store knows; without a request somebody asks for them now."""
        if request is None:
            request, _ = self.store.write(request_stage_profile, NANO, plan.digest)
        stages = self.stages_us(plan)
        ends = [first for first, _ in stages[1:]] + [len(plan.combined[0].schedule.stages)]  # type: ignore[union-attr]
        times = tuple(
            StageTiming(first, us, 1.0, 9, end - first) for (first, us), end in zip(stages, ends, strict=True)
        )
        step_us, where = self.step_us(plan), self.environment
        self.sends(StageProfileResult(request, plan.digest, 0, where, times, step_us, True))
        self.drift.profiled(plan.digest, 1, {0: self.step_us(plan)})

    def committed(self, desired: tuple[int, int], plan: Plan) -> None:
        """It tried a plan, which won, and runs it."""
        self._tried(desired, plan, "commit", DeviceState.COMMITTED)
        self.runs(plan)

    def refused(self, desired: tuple[int, int], plan: Plan) -> None:
        """It tried a plan, which gained nothing."""
        self._tried(desired, plan, "no_gain", DeviceState.NO_GAIN)

    def _tried(self, desired: tuple[int, int], plan: Plan, verdict: str, state: DeviceState) -> None:
        ended = TrialEnded(
            *desired, Origin.PLANNER, "trial", verdict, plan.digest, self.plan.digest, 1.1, 1.05, 1.2, 9,
            self._at_us(), self._at_us(),
        )  # fmt: skip
        self.sends(ended, StateChange(*desired, state, plan.digest, Origin.PLANNER))

    def _at_us(self) -> int:
        return self._began_us + round(self.now_s * 1e6)

    # -- as the planner sees it --

    def online(self) -> frozenset[DeviceId]:
        return frozenset({NANO})

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        """It measures what it is asked to, if it has the time."""
        self.asked += [*desired.profiles, *([desired.stage_profile] if desired.stage_profile else [])]
        if not self.idle:
            return
        for one in desired.profiles:
            self.profile(one.request)
        if desired.stage_profile is not None:
            self.profile_stages(decode_plan(desired.stage_profile.plan), desired.stage_profile.request)


def planned(device: DriftingDevice, scheduler: str, **more: Any) -> Plan:
    """A plan of the device's model."""
    choice = ModelChoice(name="branches", artifact=device.artifact, graph=device.graphs[device.artifact])
    return compose([choice], scheduler=scheduler, **more)
