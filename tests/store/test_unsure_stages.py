"""What a planner asks a device to measure: stages that nobody is sure of, and nothing else."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
from sqlalchemy.orm import Session

from stageloom.planner.api import routes
from stageloom.planner.costs import measured
from stageloom.planner.costs.drift import unsure_blocks
from stageloom.planner.costs.measured import STALE_S, device_costs
from stageloom.planner.costs.records import OperatorCost
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.schema.device import DeviceProfileReply, DeviceProfileRequest
from stageloom.planner.store.costs import operator_costs, stage_costs
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import open_requests, request_profile
from stageloom.planner.store.store import Store
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.bound import bind
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.messages.control import Desired
from stageloom.shared.messages.telemetry import (
    Ledger,
    OperatorTiming,
    ProfileResult,
    RowData,
    RowKind,
    StageProfileResult,
    StageTiming,
)
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import MeasuredStage, fitted
from stageloom.shared.search.interference import Interference, Sample
from tests.planner.api.context import QuietFleet, answer_of, planner_context
from tests.shared.test_merge import siblings
from tests.store.helpers import NANO, enrol, row

CLASS = "cpu-2-core"
OPERATORS = 6
WIDE = StageSchedule((Stage(((0,), (1,), (2,))), Stage(((3,),)), Stage(((4,),)), Stage(((5,),))))


class Planner:
    """A store with one model and one plan of it, and what its API answers."""

    def __init__(self, store: Store, clock: ManualClock, folder: Path) -> None:
        self.store, self.fleet, self.clock = store, QuietFleet(), clock
        self.api = planner_context(store, clock, self.fleet)
        enrol(store)
        self.artifact, blob = pack_artifact(siblings(*[None] * OPERATORS), b"wide")
        (folder / "wide.artifact").write_bytes(blob)
        store.add_model("wide", folder / "wide.artifact", self.artifact)
        self.plan = plan_of(self.artifact, WIDE)
        store.write(add_plan, "plan", self.plan, "ios")
        self._sequence = 0

    def ask(self, plan: str = "plan", *, unsure_only: bool = True) -> tuple[int, ...]:
        """Numbers of the requests that came of it."""
        wanted = DeviceProfileRequest(device=NANO, plan=plan, unsure_only=unsure_only, wait_s=0.0)
        reply = answer_of(self.api, routes.DEVICE_PROFILE, wanted)
        assert isinstance(reply, DeviceProfileReply)
        return reply.requests

    def answered(self, kind: RowKind, *data: RowData) -> Sequence[tuple[DeviceId, Desired]]:
        """A device's answers arrive; returns what is desired anew then."""
        rows = [row(self._sequence + at, one, kind=kind) for at, one in enumerate(data)]
        self._sequence += len(rows)
        return LinkStore(self.store).append_telemetry(
            [TelemetryWrite(NANO, tuple(rows), (Ledger(7, self._sequence, 0),))]
        )

    def operators(self) -> None:
        """All operators were measured: 1 ms each."""
        times = tuple(OperatorTiming(op, 1000.0, 1.0, 9) for op in range(OPERATORS))
        (request,), _ = self.store.write(request_profile, NANO, ["wide"])
        self.answered(RowKind.PROFILE_RESULT, ProfileResult(request, self.artifact, 1, CLASS, times, True))

    def stages(self, request: int, *times: StageTiming) -> Sequence[tuple[DeviceId, Desired]]:
        """Stages of the plan were measured; returns what is desired anew then."""
        result = StageProfileResult(request, self.plan.digest, 0, CLASS, times, 4000.0, True)
        return self.answered(RowKind.STAGE_PROFILE_RESULT, result)


def plan_of(artifact: Digest, *schedules: StageSchedule) -> Plan:
    """Replicas of a model, each by its own schedule."""
    model = ModelPlan(name="wide", artifact=artifact, replicas=len(schedules))
    combined = tuple(CombinedBlock((Member(0, at, 0),), one) for at, one in enumerate(schedules))
    return Plan(models=(model,), combined=combined)


@pytest.fixture
def planner(store: Store, clock: ManualClock, tmp_path: Path) -> Planner:
    return Planner(store, clock, tmp_path)


@pytest.mark.promise("interference-model-sure-where")
def test_a_profile_asks_nothing_once_all_is_sure_and_asks_again_when_it_is_old(
    planner: Planner, clock: ManualClock
) -> None:
    """1. Nothing is known: asked. 2. Measured: not asked, no generation. 3. A month later: asked again."""
    planner.operators()
    (request,) = planner.ask()
    (told,) = planner.fleet.told
    assert told.stage_profile is not None and told.stage_profile.combined_blocks == (0,)
    assert told.stage_profile.request == request
    planner.stages(request, StageTiming(0, 1500.0, 1.0, 9), StageTiming(1, 2900.0, 1.0, 9, 3))
    assert planner.ask() == () and len(planner.fleet.told) == 1
    clock.advance(STALE_S + 60.0)
    assert planner.ask() == (request + 1,)


def test_an_operators_own_wish_is_carried_out_however_sure_the_planner_is(planner: Planner) -> None:
    planner.operators()
    (request,) = planner.ask()
    planner.stages(request, StageTiming(0, 1500.0, 1.0, 9), StageTiming(1, 2900.0, 1.0, 9, 3))
    assert planner.ask() == ()
    assert len(planner.ask(unsure_only=False)) == 1
    told = planner.fleet.told[-1]
    assert told.stage_profile is not None and told.stage_profile.combined_blocks == ()


@pytest.mark.parametrize("batch", [1, 2])
def test_who_waits_for_a_plans_stages_is_told_how_many_were_measured(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Where none is kept, as its members have different batches, as well."""
    first, second = (
        ModelPlan(name=name, artifact=planner.artifact, batch=size) for name, size in (("a", 1), ("b", batch))
    )
    ops = tuple(range(2 * OPERATORS))
    stages = StageSchedule((Stage((ops[:OPERATORS],)), Stage((ops[OPERATORS:],))))
    block = CombinedBlock((Member(0, 0, 0), Member(1, 0, 0)), stages)
    planner.plan = Plan(models=(first, second), combined=(block,))
    planner.store.write(add_plan, "both", planner.plan, "ios")
    (before,) = planner.ask("both", unsure_only=False)
    planner.stages(before, StageTiming(1, 1000.0, 1.0, 9))

    def answer(device: DeviceId, desired: Desired) -> None:
        assert desired.stage_profile is not None
        times = StageTiming(0, 1500.0, 1.0, 9), StageTiming(1, 2900.0, 1.0, 9)
        planner.stages(desired.stage_profile.request, *times)

    monkeypatch.setattr(planner.fleet, "desired_changed", answer)
    planner.clock.advance(1.0)
    reply = answer_of(planner.api, routes.DEVICE_PROFILE, DeviceProfileRequest(device=NANO, plan="both"))
    assert reply.stages == 2
    assert bool(planner.store.read(stage_costs, CLASS, planner.plan.executor)) == (batch == 1)


def test_stages_that_ran_as_one_are_kept_as_the_one_group_that_they_were(planner: Planner) -> None:
    planner.operators()
    (request,) = planner.ask()
    planner.stages(request, StageTiming(1, 2900.0, 1.0, 9, 3), StageTiming(0, 1500.0, 1.0, 9, 2))
    (found,) = planner.store.read(stage_costs, CLASS, planner.plan.executor)
    assert found.groups == ((3, 4, 5),)
    assert found.seconds == pytest.approx(2.9e-3)


def test_the_stages_of_a_second_plan_are_asked_for_once_those_of_the_first_are_measured(
    planner: Planner,
) -> None:
    """A value holds one plan to measure. Until it can hold the second one, no generation is taken: to a
    device whose plan was rejected, one without a new request says to try the plan again."""
    other = plan_of(planner.artifact, StageSchedule((Stage(tuple((op,) for op in range(OPERATORS))),)))
    planner.store.write(add_plan, "other", other, "ios")
    (first,) = planner.ask(unsure_only=False)
    (second,) = planner.ask("other", unsure_only=False)
    assert {told.generation for told in planner.fleet.told} == {1}
    ((device, desired),) = planner.stages(first, StageTiming(0, 1500.0, 1.0, 9))
    assert (device, desired.generation, desired.plan_digest) == (NANO, 2, None)
    assert desired.stage_profile is not None and desired.stage_profile.request == second
    assert [entry.decided_by for entry in planner.store.read(generation_history, NANO)[0]] == ["profile"] * 2
    last = StageProfileResult(second, other.digest, 0, CLASS, (), 4000.0, True)
    assert planner.answered(RowKind.STAGE_PROFILE_RESULT, last) == []


def test_models_that_a_message_has_no_room_for_are_asked_for_as_others_are_answered(planner: Planner) -> None:
    numbers, desired = planner.store.write(request_profile, NANO, ["wide"] * 70)
    assert [profile.request for profile in desired.profiles] == numbers[:64]
    (more,), same = planner.store.write(request_profile, NANO, ["wide"])
    assert same == desired, "there is no room for it, so no generation either"
    told, pushes = set(numbers[:64]), 0
    for first in range(0, 70, 10):
        some = numbers[first : first + 10]
        assert told >= set(some)
        results = [ProfileResult(number, planner.artifact, 1, CLASS, (), True) for number in some]
        for _, value in planner.answered(RowKind.PROFILE_RESULT, *results):
            told |= {profile.request for profile in value.profiles}
            pushes += 1
    assert more in told and pushes == 1
    assert (
        planner.answered(RowKind.PROFILE_RESULT, ProfileResult(more, planner.artifact, 1, CLASS, (), True))
        == []
    )


def test_an_answer_of_a_revoked_device_is_kept_and_asks_it_for_nothing_more(planner: Planner) -> None:
    numbers, _ = planner.store.write(request_profile, NANO, ["wide"] * 70)
    planner.store.write(revoke_device, NANO)
    result = ProfileResult(numbers[0], planner.artifact, 1, CLASS, (), True)
    assert planner.answered(RowKind.PROFILE_RESULT, result) == []
    assert planner.store.read(open_requests, numbers) == numbers[1:]
    with pytest.raises(InputError, match="revoked"):
        planner.store.write(request_profile, NANO, ["wide"])


# What a device class learned


P = ParamSpec("P")
T = TypeVar("T")


class Known:
    """Measurements of one device class: every operator takes 1 ms at any batch up to one; stages by a law."""

    def __init__(self, stages: Sequence[MeasuredStage], most: int = 1) -> None:
        self.stages = list(stages)
        self.most = most

    def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `Store.read`, of two functions."""
        known: dict[Any, Any] = {operator_costs: self.operator_costs, stage_costs: self.stage_costs}
        result: T = known[function](*args, **kwargs)
        return result

    def operator_costs(
        self, device_class: str, artifact: Digest, batch: int, executor: ExecutorOptions
    ) -> dict[int, OperatorCost]:
        if batch > self.most:
            return {}
        return {op: OperatorCost(op, 1000.0, 1.0, 9, 1) for op in range(OPERATORS)}

    def stage_costs(self, device_class: str, executor: ExecutorOptions) -> list[MeasuredStage]:
        return self.stages if device_class == CLASS else []


TEACHER, PUPIL = Digest("aa" * 32), Digest("bb" * 32)
GRAPH = siblings(*[None] * OPERATORS)


def graph_of(artifact: Digest) -> Graph:
    if artifact not in (TEACHER, PUPIL):
        raise InputError("it was removed")
    return GRAPH


def lessons(artifact: Digest) -> list[MeasuredStage]:
    """Stages of up to three groups of an artifact; what runs beside the longest takes a third."""
    rng, found = random.Random(8), []
    for _ in range(60):
        ops = rng.sample(range(OPERATORS), rng.randint(1, 3))
        groups = tuple((op,) for op in sorted(ops))
        seconds = 1e-3 * (1.0 + (len(ops) - 1) / 3.0) * rng.uniform(0.98, 1.02)
        found.append(MeasuredStage(((artifact, 0, OPERATORS),), 1, groups, seconds, samples=9))
    return found


@pytest.mark.promise("interference-model-sure-where")
def test_what_one_model_taught_serves_another_of_the_same_class_and_of_no_other() -> None:
    known = Known(lessons(TEACHER))
    bound = bind(plan_of(PUPIL, WIDE), {PUPIL: GRAPH})
    taught = device_costs(known, CLASS, ExecutorOptions(), [(PUPIL, 1)], graph_of=graph_of)
    assert taught.stages == (), "they are another model's"
    assert unsure_blocks(bound, taught) == ()
    stranger = device_costs(known, "another", ExecutorOptions(), [(PUPIL, 1)], graph_of=graph_of)
    assert unsure_blocks(bound, stranger) == (0,)


@pytest.mark.promise("plans-were-looked-kept")
def test_a_batch_that_was_not_measured_is_priced_by_what_one_task_took_and_nobody_is_sure_of_it() -> None:
    at_one = device_costs(Known([]), CLASS, ExecutorOptions(), [(PUPIL, 8)], graph_of=graph_of)
    at_eight = device_costs(Known([], most=8), CLASS, ExecutorOptions(), [(PUPIL, 8)], graph_of=graph_of)
    for op in range(OPERATORS):
        assert at_eight.operator_s(PUPIL, GRAPH, OpId(op), 8) == 1e-3
        assert at_one.operator_s(PUPIL, GRAPH, OpId(op)) == 1e-3
        ratio = at_one.estimate_s(GRAPH, OpId(op), 8) / at_one.estimate_s(GRAPH, OpId(op))
        assert at_one.operator_s(PUPIL, GRAPH, OpId(op), 8) == pytest.approx(1e-3 * ratio) and ratio > 1.0
        assert at_eight.is_measured(PUPIL, OpId(op), 8) and not at_one.is_measured(PUPIL, OpId(op), 8)


def test_replicas_that_run_alike_are_asked_for_once() -> None:
    other = StageSchedule((Stage(((0,), (1,))), Stage(((2,), (3,))), Stage(((4,), (5,)))))
    bound = bind(plan_of(PUPIL, WIDE, other, WIDE), {PUPIL: GRAPH})
    costs = device_costs(Known([]), CLASS, ExecutorOptions(), [(PUPIL, 1)], graph_of=graph_of)
    assert unsure_blocks(bound, costs) == (0, 1)


def test_the_stages_of_a_removed_model_teach_nothing_and_stop_nothing() -> None:
    known = Known(lessons(Digest("cc" * 32)))
    costs = device_costs(known, CLASS, ExecutorOptions(), [(PUPIL, 1)], graph_of=graph_of)
    assert costs.interference is not None and costs.interference.samples == 0


def test_a_class_is_fitted_again_only_when_it_measured_something(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []

    def counted(taught: Sequence[Sample], rates: DeviceRates) -> tuple[DeviceRates, Interference]:
        fits.append(len(taught))
        return fitted(taught, rates)

    monkeypatch.setattr(measured, "fitted", counted)
    known = Known(lessons(TEACHER))
    executor = ExecutorOptions(intra_op_threads=7)
    for _ in range(3):
        device_costs(known, CLASS, executor, [(PUPIL, 1)], graph_of=graph_of)
    known.stages.append(MeasuredStage(((TEACHER, 0, OPERATORS),), 1, ((0,), (5,)), 1.3e-3))
    device_costs(known, CLASS, executor, [(TEACHER, 1)], graph_of=graph_of)
    assert fits == [60, 61]
