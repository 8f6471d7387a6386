"""A plan is found ahead for the night that recurs, and when the night comes it is tried without a search.

The store, the process that looks ahead and the re-planner are real; the device is played: it tells what it
measured, counts tasks by the minute, raises alarms and says how trials end.
"""

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.planner.api.apart import StoreReaders
from stageloom.planner.dispatch.ports import StoredRow, TelemetryWrite
from stageloom.planner.replan.observing import ahead, library, observe
from stageloom.planner.replan.recurring import MINUTE_US
from stageloom.planner.replan.regime_finder import RegimeFinder
from stageloom.planner.replan.service import Replanner
from stageloom.planner.schema.replan import RegimeInfo, ReplanInfo
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.expected import expected_regimes, replanned_devices
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.regime_view import regime_infos
from stageloom.planner.store.replans import end_replan, replan_infos
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, DeviceState, ModelLoad, Origin, UsualLoad
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    CoreRange,
    ExecutorFact,
    ExecutorTime,
    Ledger,
    MachineFacts,
    Row,
    RowData,
    StateChange,
    TaskCounters,
    TrialEnded,
    encode_row,
)
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.search.arrangements import Arrangement, arranged_plan
from stageloom.shared.search.compose import ModelChoice
from tests.planner.processes import until
from tests.store.helpers import NANO, add_model, enrol
from tests.store.migrated import new_store

CLASS = "cpu-2-core"
BOOT = 7
ONE, TWO = ExecutorOptions(), ExecutorOptions(intra_op_threads=2)
TIMES_US = {"left": (20_000.0, 12_500.0), "right": (40_000.0, 25_000.0)}  # on one thread, and on two
NIGHT, DAY = 8.0, 30.0  # tasks a second of each model; two lanes carry 33


class Planner:
    """A store, what looks ahead there, the re-planner, and a device that runs two lanes of one thread."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.store = new_store(folder, clock=self.clock)
        self.rows, self.alarms = 0, 0
        self.searched: list[Any] = []
        enrol(self.store)
        self.artifacts = {
            name: add_model(self.store, folder, name, 4 + at) for at, name in enumerate(TIMES_US)
        }
        choices = self.choices()
        self.lanes = arranged_plan(choices, Arrangement(2, 1, (1, 1), (ONE, ONE)), [0, 1])
        self.wide = arranged_plan(choices, Arrangement(1, 2, (1, 1), (TWO, TWO)), [0, 1])
        self.store.write(add_plan, "lanes", self.lanes, "sequential")
        self.store.write(push, Push(device=NANO, plan="lanes", decided_by="operator"))
        self.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact(ONE.name),), 2))
        self.measures()
        self.due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
        pool: Any = SimpleNamespace(workers=1, where="nowhere", submit=self._submit, close=lambda: None)
        fleet: Any = SimpleNamespace(desired_changed=lambda *_: None)
        self.replanner = Replanner(self.store, fleet, pool, self.clock, self.due)
        self.replanner.start()
        readers = StoreReaders(folder, "")
        self.finder = RegimeFinder(self.store, readers, self.clock, lambda: self.replanner.idle)

    def choices(self) -> list[ModelChoice]:
        return [
            ModelChoice(name=name, artifact=digest, graph=self.store.graph(digest))
            for name, digest in self.artifacts.items()
        ]

    def measures(self) -> None:
        """The device tells what its models take."""
        for name, times_us in TIMES_US.items():
            for options, time_us in zip((ONE, TWO), times_us, strict=True):
                self.tells(
                    ExecutorTime(
                        self.artifacts[name], options.name, options.intra_op_threads, 1, CLASS, time_us, 9
                    )
                )

    def brings_version(self, folder: Path) -> None:
        """Another version of one model runs from now on, in two lanes as before."""
        self.artifacts["left"] = add_model(self.store, folder, "left-2", 6)
        self.lanes = arranged_plan(self.choices(), Arrangement(2, 1, (1, 1), (ONE, ONE)), [0, 1])
        self.store.write(add_plan, "lanes-2", self.lanes, "sequential")
        self.store.write(push, Push(device=NANO, plan="lanes-2", decided_by="operator"))
        self.measures()

    def _submit(self, *asked: Any) -> Any:
        self.searched.append(asked)
        raise AssertionError("nothing need be searched")

    def close(self) -> None:
        self.finder.close()
        self.replanner.close()
        self.store.close()

    def tells(self, data: RowData, at_us: int | None = None) -> None:
        self._append([(data, self.clock.wall_us() if at_us is None else at_us)])

    def _append(self, told: list[tuple[RowData, int]]) -> None:
        rows = [
            StoredRow(BOOT, self.rows + at, at_us, KIND_OF[type(data)], encode_row(Row(at_us, data)), data)
            for at, (data, at_us) in enumerate(told)
        ]
        self.rows += len(rows)
        LinkStore(self.store).append_telemetry(
            [TelemetryWrite(NANO, tuple(rows), (Ledger(BOOT, self.rows, 0),))]
        )

    def serves(self, *phases: tuple[float, int]) -> None:
        """So many tasks a second of each model, for so many minutes, until now."""
        rates = [per_s for per_s, minutes in phases for _ in range(minutes)]
        began_us = self.clock.wall_us() - len(rates) * MINUTE_US
        self._append(
            [
                (TaskCounters(name, 60_000_000, round(60 * per_s), round(60 * per_s), 0, 0, 0, 0), at_us)
                for at, per_s in enumerate(rates)
                for at_us in [began_us + at * MINUTE_US]
                for name in TIMES_US
            ]
        )

    def alarm(self, per_s: float) -> int:
        """Other tasks come; the device runs the plan of two lanes."""
        self.alarms += 1
        replan = LinkStore(self.store).record_alarm(
            NANO,
            Alarm(
                boot=BOOT,
                number=self.alarms,
                at_us=self.clock.wall_us(),
                cause="regime",
                value=3.0,
                threshold=2.0,
                plan=self.lanes.digest,
                loads=tuple(ModelLoad(name, per_s, took[0], 0, 0) for name, took in TIMES_US.items()),
                samples=(),
                usual=tuple(UsualLoad(per_s, 200_000) for _ in TIMES_US),
            ),
        )
        assert replan is not None
        return replan

    def answered(self, replan: int) -> ReplanInfo:
        self.due.put((NANO, replan))
        assert until(lambda: self.newest().outcome != "pending" or self.newest().generation > 0)
        return self.newest()

    def newest(self) -> ReplanInfo:
        return self.store.read(replan_infos, limit=1)[0]

    def regimes(self) -> list[RegimeInfo]:
        return self.store.read(regime_infos, NANO)

    def tried(self, info: ReplanInfo, plan: Plan, verdict: str, state: DeviceState) -> None:
        """The device tried what was pushed against the plan that it runs."""
        at_us = self.clock.wall_us()
        ended = TrialEnded(
            info.epoch, info.generation, Origin.PLANNER, "trial", verdict, plan.digest, self.lanes.digest,
            1.4, 1.3, 1.5, 9, at_us, at_us,
        )  # fmt: skip
        self.tells(ended)
        self.tells(StateChange(info.epoch, info.generation, state, plan.digest, Origin.PLANNER))


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[Planner]:
    made = Planner(tmp_path)
    yield made
    made.close()


def test_a_plan_found_ahead_for_a_night_that_recurs_is_tried_first_when_it_comes_and_proven_by_that(
    planner: Planner,
) -> None:
    """1. Two nights and days, and an alarm by day that led to nothing. 2. A look ahead finds a plan for the
    longer of the two regimes, and the next look one for the other. 3. By night that one is pushed unsearched.
    4. It wins its trial, and is proven from then on."""
    planner.serves((NIGHT, 40), (DAY, 30), (NIGHT, 40), (DAY, 30))
    planner.store.write(end_replan, planner.alarm(DAY), "nothing to try")
    ((device, replan),) = planner.store.read(replanned_devices, 0)
    assert device == NANO and planner.replanner.idle
    assert planner.finder.look(NANO, replan)
    assert planner.finder.look(NANO, replan)
    assert not planner.finder.look(NANO, replan), "everything that recurs is known"
    by_day, by_night = planner.regimes()
    assert [one.arrivals_per_s for one in by_night.loads] == [NIGHT, NIGHT]
    assert by_night.proven_at_us is None and by_night.expected_at_us is not None
    assert by_night.chance is not None and by_night.chance > 0.8
    (night,) = (
        one
        for one in planner.store.read(expected_regimes, NANO, CLASS)
        if one.rates[0].arrivals_per_s == NIGHT
    )
    assert night.plan.structure == planner.wide.structure
    assert (by_day.digest, by_day.chance) == (planner.lanes.digest, None), "what ran is expected to stay"

    info = planner.answered(planner.alarm(NIGHT))
    assert (info.how, info.digest, planner.searched) == ("expected", night.plan.digest, [])
    assert "1 lane of 2 threads" in info.remark

    planner.tried(info, night.plan, "commit", DeviceState.COMMITTED)
    proven, _ = planner.regimes()
    assert proven.proven_at_us is not None and proven.expected_at_us is None
    assert (proven.digest, planner.newest().outcome) == (night.plan.digest, "committed")


def test_what_won_or_was_found_ahead_with_another_version_of_a_model_answers_no_alarm_about_this_one(
    planner: Planner, tmp_path: Path
) -> None:
    """The plan that won is known here, and was priced before: nothing else would say that it is of another
    version, and that it may not take the place of the one that runs."""
    planner.serves((NIGHT, 40), (DAY, 30), (NIGHT, 40), (DAY, 30))
    planner.store.write(end_replan, planner.alarm(DAY), "nothing to try")
    ((_, replan),) = planner.store.read(replanned_devices, 0)
    assert planner.finder.look(NANO, replan) and planner.finder.look(NANO, replan)
    info = planner.answered(planner.alarm(NIGHT))
    planner.tried(info, planner.wide, "commit", DeviceState.COMMITTED)

    planner.brings_version(tmp_path)
    replan = planner.alarm(NIGHT)
    seen = observe(planner.store, NANO, replan, planner.clock.wall_us())
    assert (library(planner.store, seen), ahead(planner.store, seen)) == ([], [])
    info = planner.answered(replan)
    assert (info.how, info.reason) == ("arranged", "")
    pushed = planner.store.read(plan_info, info.plan)
    assert decode_plan(pushed.wire).models[0].artifact == planner.artifacts["left"]
    assert planner.finder.look(NANO, replan), "nothing is known of the regimes with this version"
