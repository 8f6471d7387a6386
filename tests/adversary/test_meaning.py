"""What an enrolled device says is well formed and still not its to say: refused, told to people."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import FleetMember, LocalPlanRefused, TelemetryWrite
from stageloom.planner.store.costs import operator_costs, stage_costs
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.events import AGAIN_US, newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_infos
from stageloom.planner.store.profiles import (
    answer_reasons,
    open_requests,
    request_profile,
    request_stage_profile,
)
from stageloom.planner.store.store import Store
from stageloom.planner.store.trusted_time import notices
from stageloom.shared.clock import ManualClock
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import bulk
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Autonomy, Desired, LocalPlan
from stageloom.shared.messages.telemetry import (
    Ledger,
    OperatorTiming,
    ProfileResult,
    RowData,
    RowKind,
    RowRange,
    StageProfileResult,
    StageTiming,
    TelemetryBatch,
)
from stageloom.shared.plan import Plan
from tests.store.helpers import NANO, add_model, enrol, key, row, small_plan

GOOD = DeviceId("good")
CLASS = "cpu-2-core"
OPERATORS = 4
TIMES = tuple(OperatorTiming(op, 10.0, 1.0, 9) for op in range(OPERATORS))


class Rig:
    """A bad device (nano) and a good one of the same class; a model for each."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.sequence = store, 0
        enrol(store)
        enrol(store, GOOD, number=2)
        self.own = add_model(store, folder, "own", OPERATORS)
        self.others = add_model(store, folder, "others", 6)
        self.plans = {name: small_plan(store, name) for name in ("own", "others")}
        for name, plan in self.plans.items():
            store.write(add_plan, name, plan, "sequential")

    def pushed(self, autonomy: Autonomy = Autonomy.FULL, plan: str = "own") -> Desired:
        return self.store.write(push, Push(device=NANO, plan=plan, decided_by="operator", autonomy=autonomy))

    def tells(self, data: RowData, kind: RowKind, device: DeviceId = NANO) -> None:
        """A telemetry row of a device."""
        LinkStore(self.store).append_telemetry(
            [TelemetryWrite(device, (row(self.sequence, data, kind=kind),), ())]
        )
        self.sequence += 1

    def profiles(self, result: ProfileResult, device: DeviceId = NANO) -> None:
        self.tells(result, RowKind.PROFILE_RESULT, device)

    def stages(self, result: StageProfileResult) -> None:
        self.tells(result, RowKind.STAGE_PROFILE_RESULT)

    def asked(self, device: DeviceId = NANO) -> int:
        (request,), _ = self.store.write(request_profile, device, ["own"])
        return request

    def costs(self, artifact: Digest | None = None) -> int:
        """Operators that are known of the class."""
        return len(self.store.read(operator_costs, CLASS, artifact or self.own))

    def refusals(self) -> list[tuple[str, str]]:
        """Events of the bad device, (code, text)."""
        return [
            (code, text)
            for _, device, code, text in self.store.read(newest_events)
            if code.endswith("_refused")
        ]


@pytest.fixture
def rig(store: Store, tmp_path: Path) -> Rig:
    return Rig(store, tmp_path)


def local(plan: Plan, under: Desired, counter: int = 1) -> LocalPlan:
    return LocalPlan(
        boot=7,
        epoch=under.epoch,
        generation=under.generation,
        local_counter=counter,
        plan_digest=plan.digest,
        plan=plan.wire,
        artifacts=(),
        cause="variance",
    )


def paced(plan: Plan, interval_us: int = 5) -> Plan:
    models = tuple(replace(one, launch_interval_us=interval_us) for one in plan.models)
    return replace(plan, models=models)


# Plans made on the device


def test_a_plan_of_a_device_that_may_plan_alone_and_of_its_own_artifacts_is_adopted(rig: Rig) -> None:
    under, plan = rig.pushed(), paced(rig.plans["own"])
    adopted = LinkStore(rig.store).adopt_local(NANO, local(plan, under))
    assert adopted is not None and adopted.plan_digest == plan.digest
    assert adopted.generation == under.generation + 1
    assert rig.refusals() == []


def test_a_plan_of_artifacts_that_it_had_before_is_adopted(rig: Rig) -> None:
    """Until what is desired now has won its trial, the plan before runs, and that is what it re-plans."""
    rig.pushed()
    under = rig.pushed(plan="others")
    adopted = LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["own"]), under))
    assert adopted is not None and [need.digest for need in adopted.artifacts] == [rig.own]


@pytest.mark.promise("device-plans-alone-where")
def test_a_plan_of_a_device_whose_autonomy_is_off_is_refused_and_changes_nothing(rig: Rig) -> None:
    under = rig.pushed(Autonomy.OFF)
    with pytest.raises(LocalPlanRefused, match="may not plan alone"):
        LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["own"]), under))
    with pytest.raises(LocalPlanRefused, match="may not plan alone"):
        LinkStore(rig.store).adopt_local(GOOD, local(rig.plans["own"], Desired(epoch=0, generation=0)))
    assert {one.device: one.desired for one in LinkStore(rig.store).fleet()} == {NANO: under, GOOD: None}
    assert [code for code, _ in rig.refusals()] == ["local_plan_refused"] * 2


@pytest.mark.promise("device-plans-alone-where")
def test_an_artifact_that_it_was_never_given_is_neither_adopted_nor_served(rig: Rig) -> None:
    """1. The bad device plans with the good one's artifact. 2. It asks for its bytes all the same."""
    under = rig.pushed()
    rig.store.write(push, Push(device=GOOD, plan="others", decided_by="operator"))
    with pytest.raises(LocalPlanRefused, match=f"artifact {rig.others[:12]} was never assigned"):
        LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["others"]), under))
    core = DispatchCore(LinkStore(rig.store).fleet(), epoch=1, config=DispatchConfig())
    (answer,) = core.handle(
        ev.BulkReceived(b"r", key(1), bulk.ChunkRequest(digest=rig.others, offset_bytes=0)), 0.0
    )
    assert isinstance(answer, ev.Send) and isinstance(answer.message, Refused)
    assert answer.message.code is RefusalCode.NOT_FOUND
    (read,) = core.handle(
        ev.BulkReceived(b"g", key(2), bulk.ChunkRequest(digest=rig.others, offset_bytes=0)), 0.0
    )
    assert isinstance(read, ev.ReadChunk)


@pytest.mark.promise("device-plans-alone-where")
def test_an_illegal_plan_is_refused_before_anything_else_reads_it(rig: Rig) -> None:
    """Its cut is none of the artifact's: what reads plans of the store goes by their blocks."""
    under, plan = rig.pushed(), rig.plans["own"]
    illegal = replace(plan, models=tuple(replace(one, cuts=(1,)) for one in plan.models))
    with pytest.raises(LocalPlanRefused):
        LinkStore(rig.store).adopt_local(NANO, local(illegal, under))
    with pytest.raises(LocalPlanRefused, match="digest"):
        LinkStore(rig.store).adopt_local(NANO, structs.replace(local(plan, under), plan=b"\x90"))
    assert [one.plan for one in rig.store.read(plan_infos)] == ["others", "own"]


def test_a_late_plan_is_no_offence(rig: Rig) -> None:
    """An operator took the autonomy away meanwhile."""
    under = rig.pushed()
    rig.pushed(Autonomy.OFF)
    assert LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["own"]), under)) is None
    assert rig.refusals() == []


@pytest.mark.promise("device-plans-alone-where")
def test_a_flood_of_refused_plans_leaves_one_event_an_hour_and_a_notice(rig: Rig, clock: ManualClock) -> None:
    under = rig.pushed(Autonomy.OFF)
    for counter in range(20):
        with pytest.raises(LocalPlanRefused):
            LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["own"]), under, counter))
    assert len(rig.refusals()) == 1
    (notice,) = rig.store.read(notices)
    assert notice.startswith("device nano: local_plan_refused: it may not plan alone")
    clock.advance(AGAIN_US / 1e6 + 1)
    with pytest.raises(LocalPlanRefused):
        LinkStore(rig.store).adopt_local(NANO, local(paced(rig.plans["own"]), under))
    assert len(rig.refusals()) == 2


# Measurements


def test_an_answer_to_its_own_open_request_becomes_costs(rig: Rig) -> None:
    request = rig.asked()
    rig.profiles(ProfileResult(request, rig.own, 1, CLASS, TIMES[:2], False))
    rig.profiles(ProfileResult(request, rig.own, 1, "", TIMES[2:], True))
    assert rig.costs() == OPERATORS and rig.refusals() == []
    assert rig.store.read(answer_reasons, [request]) == {request: ""}


@pytest.mark.promise("measurements-answer-open-request")
def test_costs_that_nobody_asked_for_are_not_kept(rig: Rig) -> None:
    request = rig.asked(GOOD)
    rig.profiles(ProfileResult(request, rig.own, 1, CLASS, TIMES, True))
    rig.profiles(ProfileResult(request + 7, rig.own, 1, CLASS, TIMES, True))
    assert rig.costs() == 0
    assert rig.store.read(open_requests, [request]) == [request], "the good device may still answer"
    rig.profiles(ProfileResult(request, rig.own, 1, CLASS, TIMES, True), GOOD)
    assert rig.costs() == OPERATORS
    ((code, text),) = rig.refusals()
    assert code == "measurement_refused" and "was not made of this device" in text


def test_an_answered_request_is_closed(rig: Rig) -> None:
    request = rig.asked()
    rig.profiles(ProfileResult(request, rig.own, 1, CLASS, TIMES, True))
    rig.profiles(ProfileResult(request, rig.own, 1, CLASS, (OperatorTiming(0, 99.0, 1.0, 9),), True))
    assert rig.store.read(operator_costs, CLASS, rig.own)[0].median_us == 10.0


@pytest.mark.promise("measurements-answer-open-request")
@pytest.mark.parametrize(
    "change",
    [
        {"environment": "h100"},
        {"artifact": "others"},
        {"batch": 2},
        {"timings": (OperatorTiming(OPERATORS, 10.0, 1.0, 9),)},
        {"timings": (OperatorTiming(0, -1.0, 1.0, 9),)},
        {"timings": (OperatorTiming(0, 0.0, 1.0, 9),)},
        {"timings": (OperatorTiming(0, 1e-300, 0.0, 9),)},
        {"timings": (OperatorTiming(0, 1e15, 1.0, 9),)},
        {"timings": (OperatorTiming(0, 10.0, -1.0, 9),)},
        {"timings": (OperatorTiming(0, 10.0, 1e15, 9),)},
        {"timings": (OperatorTiming(0, 10.0, 1.0, 0),)},
        {"timings": (TIMES[0], OperatorTiming(1, math.inf, 1.0, 9))},
    ],
)
def test_times_of_another_class_artifact_or_size_are_not_kept_and_the_request_ends(
    rig: Rig, change: dict[str, object]
) -> None:
    request = rig.asked()
    told = {"artifact": rig.own, "batch": 1, "environment": CLASS, "timings": TIMES, "last": True, **change}
    if told["artifact"] == "others":
        told["artifact"] = rig.others
    result = ProfileResult(request=request, **told)  # type: ignore[arg-type]
    stored = row(0)  # as decoded: infinity has not passed the decoder, and would not pass here either
    write = TelemetryWrite(NANO, (replace(stored, kind=RowKind.PROFILE_RESULT, data=result),), ())
    LinkStore(rig.store).append_telemetry([write])
    assert rig.costs() == rig.costs(rig.others) == 0
    assert rig.store.read(operator_costs, "h100", rig.own) == {}
    (reason,) = rig.store.read(answer_reasons, [request]).values()
    assert reason.startswith("refused: ")
    assert len(rig.refusals()) == 1


@pytest.fixture
def stage_request(rig: Rig) -> int:
    request, _ = rig.store.write(request_stage_profile, NANO, "own")
    return request


def stages_kept(rig: Rig) -> int:
    return len(rig.store.read(stage_costs, CLASS, rig.plans["own"].executor))


def test_stages_of_its_own_open_request_become_costs(rig: Rig, stage_request: int) -> None:
    timing = StageTiming(0, 40.0, 1.0, 9, 1)
    rig.stages(StageProfileResult(stage_request, rig.plans["own"].digest, 0, CLASS, (timing,), 40.0, True))
    assert stages_kept(rig) == 1 and rig.refusals() == []


@pytest.mark.promise("measurements-answer-open-request")
@pytest.mark.parametrize(
    ("change", "timing"),
    [
        ({"plan": "others"}, {}),
        ({"environment": "h100"}, {}),
        ({"combined_block": 999_999}, {}),
        ({"step_us": -1.0}, {}),
        ({"step_us": 1e15}, {}),
        ({}, {"stage": 999_999}),
        ({}, {"stages": 0}),
        ({}, {"stages": 1_000_000}),
        ({}, {"median_us": -5.0}),
        ({}, {"median_us": 1e15}),
    ],
)
def test_stages_that_cannot_be_are_not_kept(
    rig: Rig, stage_request: int, change: dict[str, object], timing: dict[str, float]
) -> None:
    one = {"stage": 0, "median_us": 40.0, "spread_us": 1.0, "runs": 9, "stages": 1, **timing}
    plan = rig.plans["others" if change.get("plan") else "own"].digest
    told = {"combined_block": 0, "environment": CLASS, "step_us": 40.0, "last": True, **change, "plan": plan}
    result = StageProfileResult(request=stage_request, timings=(StageTiming(**one),), **told)  # type: ignore[arg-type]
    rig.stages(result)
    assert stages_kept(rig) == 0
    assert len(rig.refusals()) == 1


def test_refused_measurements_hold_up_no_other_devices_rows(rig: Rig) -> None:
    """Both are in one transaction."""
    bad = ProfileResult(99, rig.own, 1, CLASS, TIMES, True)
    request = rig.asked(GOOD)
    good = ProfileResult(request, rig.own, 1, CLASS, TIMES, True)
    LinkStore(rig.store).append_telemetry(
        [
            TelemetryWrite(NANO, (row(0, bad, kind=RowKind.PROFILE_RESULT),), ()),
            TelemetryWrite(GOOD, (row(0, good, kind=RowKind.PROFILE_RESULT),), ()),
        ]
    )
    assert rig.costs() == OPERATORS


# Ledgers


@pytest.fixture
def core() -> Iterator[DispatchCore]:
    yield DispatchCore([FleetMember(NANO, key(1))], epoch=1, config=DispatchConfig())


def batch(*ledgers: Ledger, rows: int = 0) -> TelemetryBatch:
    ranges = (RowRange(7, 0, rows - 1),) if rows else ()
    return TelemetryBatch(rows=(row(0).body,) * rows, ranges=ranges, ledgers=ledgers)


@pytest.mark.promise("ledger-cannot-refused")
@pytest.mark.parametrize(
    "wrong",
    [
        batch(Ledger(7, 4, 5)),
        batch(Ledger(7, 0, 2**39)),
        batch(Ledger(7, 3, 0), rows=4),
        batch(Ledger(7, 4, 1), rows=4),
        batch(Ledger(7, 4, 0), Ledger(7, 5, 0)),
    ],
)
def test_a_ledger_that_cannot_be_is_refused(core: DispatchCore, wrong: TelemetryBatch) -> None:
    (answer,) = core.handle(ev.TelemetryReceived(b"r", key(1), wrong), 0.0)
    assert isinstance(answer, ev.Send) and isinstance(answer.message, Refused)
    assert answer.message.code is RefusalCode.MALFORMED
    assert core.backlog_rows == 0


@pytest.mark.parametrize(
    "right",
    [batch(Ledger(7, 5, 5)), batch(Ledger(7, 6, 2), rows=4), batch(Ledger(7, 4, 0), Ledger(8, 9, 9), rows=4)],
)
def test_a_ledger_that_balances_is_taken(core: DispatchCore, right: TelemetryBatch) -> None:
    (action,) = core.handle(ev.TelemetryReceived(b"r", key(1), right), 0.0)
    assert isinstance(action, ev.AppendTelemetry)
