"""A device whose clock changes gets costs of its own and another plan; one that is only noisy gets neither.

The device is simulated (`drifting`), the store and the re-planner are real.
"""

import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from stageloom.planner.costs.measured import device_costs
from stageloom.planner.dispatch.ports import ReportRecord, TelemetryWrite
from stageloom.planner.replan import learned
from stageloom.planner.replan.learned import SEARCHED, LearnedPolicy
from stageloom.planner.replan.observing import observe, recalibration
from stageloom.planner.replan.policy import How
from stageloom.planner.replan.service import Replanner
from stageloom.planner.schema.policy import PolicyVerdict
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.costs import calibration_of, operator_costs, renew_costs
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.policies import keep_verdict, store_policy
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.twin.stored import stored_times
from stageloom.shared.bound import bind
from stageloom.shared.clock import Clock, ManualClock, SystemClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, ProfileRequest, Report
from stageloom.shared.messages.telemetry import CoreRange, ExecutorFact, ExecutorTime, MachineFacts
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.costs import CostTable, MemberOf, combined_digest
from stageloom.shared.stage_string import parse
from tests.planner.processes import until
from tests.policy.maddpg.cases import network
from tests.replan.drifting import BOOT, CLASS, OPERATORS_US, DriftingDevice, InlinePool, planned
from tests.store.helpers import NANO, kept_schedule, row, verdict_on
from tests.store.migrated import new_store
from tests.store.test_checkpoints import PROVENANCE

SLOW = f"{CLASS}, 15 W"
SECOND_US = 1_000_000
YEAR_US = 365 * 86_400 * SECOND_US


class World:
    """One device, its planner's store and re-planner; the device runs the best plan for its full clock."""

    def __init__(
        self,
        folder: Path,
        *,
        idle: bool = True,
        clock: Clock | None = None,
        pool: InlinePool | None = None,
        began_us: int | None = None,
    ) -> None:
        self.store = new_store(folder, clock=clock)
        self.device = DriftingDevice(self.store, folder, idle=idle, began_us=began_us)
        self.due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
        self.replanner = Replanner(
            self.store,
            self.device,  # type: ignore[arg-type]
            pool or InlinePool(),
            clock or SystemClock(),
            self.due,
            profile_wait_s=0.2,
        )
        wide = planned(self.device, "greedy")
        self.store.write(add_plan, "wide", wide, "greedy")
        self.device.profile()
        self.device.profile_stages(wide)
        self.first = planned(self.device, "ios", costs=self.costs())
        self.store.write(add_plan, "first", self.first, "ios")
        self.store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
        self.device.runs(self.first)
        self.replanner.start()

    def close(self) -> None:
        self.replanner.close()
        self.store.close()

    def costs(self) -> CostTable:
        """Those of the device's class."""
        executor = planned(self.device, "greedy").executor
        models = [(self.device.artifact, 1)]
        return device_costs(self.store, CLASS, executor, models, graph_of=self.store.graph)

    def policy(self, body: bytes, verdict: PolicyVerdict | None = None) -> None:
        """A policy that was trained for the device's class and model; without a verdict it is unchecked."""
        self.store.database.change(
            store_policy,
            body,
            policy="maddpg",
            device_class=CLASS,
            provenance={**PROVENANCE, "models": {self.device.artifact: "branches"}},
            curves=[],
            trained_at_us=1,
            verdict=verdict,
            unchecked=verdict is None,
        )

    def answered(self, alarm: Alarm, meanwhile: Callable[[], object] = lambda: None) -> ReplanInfo:
        """What the planner made of an alarm; `meanwhile` happens while the re-plan waits for its turn."""
        replan = LinkStore(self.store).record_alarm(NANO, alarm)
        assert replan is not None
        meanwhile()
        self.due.put((NANO, replan))
        assert until(
            lambda: (
                self.store.read(replan_infos)[0].outcome != "pending"
                or self.store.read(replan_infos)[0].generation
            )
        )
        return self.store.read(replan_infos)[0]

    def pushed(self, replan: ReplanInfo) -> Plan:
        """The plan of a re-plan; the device tries it, and commits."""
        assert replan.generation, replan.reason
        plan = decode_plan(self.store.read(plan_info, replan.plan).wire)
        self.device.committed((replan.epoch, replan.generation), plan)
        return plan

    def twin_us(self, plan: Plan) -> float:
        """What the twin says a step takes on this device."""
        bound = bind(plan, self.device.graphs)
        times, _ = stored_times(self.store, NANO, bound)
        return times.of_plan(bound).step(0, 1, (1,)).seconds * 1e6

    def own_us(self) -> list[float]:
        """The operators' times that hold for the device."""
        found = self.store.read(
            operator_costs, self.store.read(calibration_of, NANO).costs_key, self.device.artifact
        )
        return [found[op].median_us for op in range(len(OPERATORS_US))]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.promise("device-whose-clock-falls")
def test_a_noisy_device_that_did_not_change_raises_no_alarm(world: World) -> None:
    """Ten minutes of 10 % noise, and five seconds of every minute in which steps take 1.6 times as long."""
    world.device.noise = 0.1
    assert world.device.serve(600) is None
    assert not world.store.read(calibration_of, NANO).own


@pytest.mark.promise("device-whose-clock-falls")
def test_a_clock_that_falls_by_half_means_new_costs_and_a_plan_that_is_better_for_them(world: World) -> None:
    """1. The clock falls: one alarm. 2. Costs are its own, from telemetry alone; its class keeps its own.
    3. A better plan for that clock is pushed. 4. No other alarm follows. 5. The clock comes back: so do the
    costs of the class, and the plan."""
    device = world.device
    device.noise = 0.05
    assert device.serve(60) is None
    device.clock = 0.5
    alarm = device.serve(60)
    assert alarm is not None and alarm.cause == "drift"
    replan = world.answered(alarm)
    assert device.asked == []
    assert world.store.read(calibration_of, NANO).own
    assert world.own_us() == pytest.approx([2.0 * us for us in OPERATORS_US], rel=0.25)
    assert world.store.read(operator_costs, CLASS, device.artifact)[4].median_us == 400.0
    plan = world.pushed(replan)
    assert device.step_us(plan) < device.step_us(world.first)
    assert device.serve(300) is None
    assert world.twin_us(plan) == pytest.approx(device.step_us(plan), rel=0.1)
    device.clock = 1.0
    alarm = device.serve(60)
    assert alarm is not None and alarm.cause == "drift"
    back = world.answered(alarm)
    assert not world.store.read(calibration_of, NANO).own
    assert world.pushed(back).structure == world.first.structure
    assert device.serve(300) is None


@pytest.mark.promise("drifted-device-costs-own")
def test_a_busy_device_whose_steps_were_not_traced_is_asked_for_a_profile_and_planned_by_its_steps(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, idle=False)
    device = world.device
    device.traced = False
    assert device.serve(60) is None
    device.clock = 0.5
    alarm = device.serve(60)
    assert alarm is not None
    world.answered(alarm)
    replan = world.store.read(replan_infos)[0]
    assert "its steps took 1." in replan.remark and "so it has costs of its own" in replan.remark
    assert {one.plan_digest for one in device.asked} == {world.first.digest}
    assert len({one.request for one in device.asked}) == 1
    ratio = device.step_us(world.first)
    device.clock = 1.0
    ratio /= device.step_us(world.first)
    assert world.own_us() == pytest.approx([ratio * us for us in OPERATORS_US], rel=0.01)
    world.close()


@pytest.mark.parametrize("ahead_us", [-50 * YEAR_US, -3600 * SECOND_US, 2 * 86_400 * SECOND_US])
def test_a_drift_is_judged_by_the_steps_since_the_last_one_whatever_the_clock_of_the_device_says(
    tmp_path: Path, ahead_us: int
) -> None:
    """Steps that were not traced take twice as long, and then twice as long again."""
    clock = ManualClock(wall_us=SystemClock().wall_us())
    world = World(tmp_path, idle=False, clock=clock, began_us=clock.wall_us() + ahead_us)
    device = world.device
    device.traced = False
    before_us = device.step_us(world.first)
    for _ in range(2):
        for minutes, falls in ((1, False), (2, True)):
            device.clock *= 0.5 if falls else 1.0
            clock.advance(60.0 * minutes)
            alarm = device.serve(60)
        assert alarm is not None and alarm.cause == "drift"
        replan = LinkStore(world.store).record_alarm(NANO, alarm)
        assert replan is not None
        found = recalibration(world.store, NANO, replan, clock.wall_us())
        assert found is not None
        plan, ratio, renewed, newest_us = found
        assert ratio == pytest.approx(device.step_us(plan) / before_us, rel=0.01)
        before_us = device.step_us(plan)
        world.store.write(renew_costs, NANO, renewed, plan.executor, ratio=ratio, steps_since_us=newest_us)
    world.close()


def test_what_steps_took_in_another_environment_hides_no_drift(tmp_path: Path) -> None:
    """In an environment that no alarm told of, such as another version of the executor, they took twice as
    long."""
    clock = ManualClock(wall_us=SystemClock().wall_us())
    world = World(tmp_path, idle=False, clock=clock, began_us=clock.wall_us())
    device = world.device
    device.traced = False
    clock.advance(60.0)
    assert device.serve(60) is None
    device.clock = 0.5
    clock.advance(120.0)
    alarm = device.serve(60)
    assert alarm is not None and alarm.cause == "drift"
    device.environment = SLOW
    device.profile_stages(world.first)
    replan = LinkStore(world.store).record_alarm(NANO, alarm)
    assert replan is not None
    found = recalibration(world.store, NANO, replan, clock.wall_us())
    assert found is not None and found[1] > 1.2
    world.close()


@pytest.mark.promise("another-power-mode-planned")
def test_another_power_mode_is_planned_with_costs_of_that_mode(world: World) -> None:
    """1. The mode changes, and with it the clock: one alarm, which is no drift. 2. Operators were not
    measured in that mode, so a profile comes first; costs of the old one stay. 3. With what its stages take
    another plan is better. 4. Back in the old mode its costs hold at once."""
    device = world.device
    assert device.serve(60) is None
    device.clock, device.environment = 0.5, SLOW
    for mode in (SLOW, CLASS):  # it was in that mode once before, and measured stages in it
        LinkStore(world.store).record_reports([ReportRecord(NANO, BOOT, Report(), device_class=mode)])
        if mode == SLOW:
            device.profile_stages(planned(device, "greedy"))
    alarm = device.serve(60)
    assert alarm is not None and (alarm.cause, alarm.environment) == ("power_mode", SLOW)
    replan = world.answered(alarm)
    assert [type(one) for one in device.asked] == [ProfileRequest]
    assert (
        world.store.read(device_info, NANO).device_class == SLOW
        and not world.store.read(calibration_of, NANO).own
    )
    assert world.own_us() == [2.0 * us for us in OPERATORS_US]
    assert world.store.read(operator_costs, CLASS, device.artifact)[4].median_us == 400.0
    plan = world.pushed(replan)
    assert device.step_us(plan) < device.step_us(world.first)
    device.clock, device.environment = 1.0, CLASS
    alarm = device.serve(60)
    assert alarm is not None and alarm.cause == "power_mode"
    back = world.answered(alarm)
    assert world.own_us() == list(OPERATORS_US) and len({one.request for one in device.asked}) == 1
    assert world.pushed(back).structure == world.first.structure


@pytest.mark.promise("schedule-learned-policy-lacks")
def test_why_a_trained_policy_had_no_say_is_kept_with_a_plan_that_was_pushed_and_without_one(
    world: World,
) -> None:
    """1. It cannot be read. 2. The device drifts: another plan is pushed. 3. Nothing is left to push."""
    world.policy(b"nothing")
    world.device.serve(60)
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None
    replan = world.answered(alarm)
    assert "not a checkpoint of maddpg" in replan.remark
    world.pushed(replan)
    again = world.answered(structs.replace(alarm, number=alarm.number + 1, cause="variance", plan=None))
    assert "not a checkpoint of maddpg" in again.remark


@pytest.mark.promise("policy-published-through-gate", "policy-fit-ignored-reason")
def test_a_policy_that_did_not_pass_its_check_is_not_asked_and_the_re_plan_says_so(world: World) -> None:
    """1. The only policy that fits failed: the others answer. 2. It passed since, and proposes."""
    space = Space.of(world.first, CLASS)
    body = encode(MaddpgCheckpoint(space, network(space)))
    world.policy(body, verdict_on(body, "its answers are all one"))
    world.device.serve(60)
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None
    replan = world.answered(alarm)
    name = digest_bytes([body])[:12]
    assert f"policy {name} did not pass its check: its answers are all one" in replan.remark
    seen = observe(world.store, NANO, replan.replan, SystemClock().wall_us())
    assert seen.learned == b"" and LearnedPolicy().fitting(seen, world.first) is None
    assert How.LEARNED not in {one.how for one in LearnedPolicy().at_once(seen)}
    world.store.write(keep_verdict, verdict_on(body))
    seen = observe(world.store, NANO, replan.replan, SystemClock().wall_us())
    assert seen.learned == body and seen.withheld == ""
    assert How.LEARNED in {one.how for one in LearnedPolicy().at_once(seen)}


def test_costs_of_an_executor_that_a_proposal_may_have_are_observed_too(world: World) -> None:
    """The device tried the model on another executor than the one that runs it."""
    has = MachineFacts((CoreRange(0, 1),), (ExecutorFact("onnx"), ExecutorFact("openvino")), 1)
    told = ExecutorTime(world.device.artifact, "openvino", 1, 1, CLASS, 5000.0, 9)
    rows = row(10_000, has), row(10_001, told)
    LinkStore(world.store).append_telemetry([TelemetryWrite(NANO, rows, ())])
    world.device.serve(60)
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None
    replan = world.answered(alarm)
    seen = observe(world.store, NANO, replan.replan, SystemClock().wall_us())
    other = ExecutorOptions(name="openvino")
    assert seen.costs.beside.keys() == {other} and seen.costs.under(other).executor == other


@pytest.mark.promise("schedule-learned-policy-lacks")
def test_a_schedule_that_a_policy_lacked_is_searched_for_meanwhile_and_there_for_the_next_proposal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The policy fits what runs, and has no schedules. 2. One is made at once for the plan that it wants.
    3. A longer search is kept, under the costs that hold for the device. 4. The next proposal takes it up."""
    monkeypatch.setattr(learned, "SEARCH_S", 0.0)
    space = Space.of(world.first, CLASS)
    world.policy(encode(MaddpgCheckpoint(space, network(space))))
    world.device.serve(60)
    world.device.clock = 0.5
    alarm = world.device.serve(60)
    assert alarm is not None
    replan = world.answered(alarm)
    assert "; policy " in replan.remark and " proposed " in replan.remark
    key = world.store.read(calibration_of, NANO).costs_key
    block = combined_digest([(world.device.artifact, 0, len(OPERATORS_US))])
    assert until(lambda: kept_schedule(world.store, key, 1, block, SEARCHED) is not None)
    kept = kept_schedule(world.store, key, 1, block, SEARCHED)
    seen = observe(world.store, NANO, replan.replan, SystemClock().wall_us())
    assert kept in seen.schedules[block, 1]
    policy = LearnedPolicy()
    assert policy.missing(seen) == ()
    (proposal,) = [one for one in policy.at_once(seen) if one.how is How.LEARNED]
    schedule = parse(kept or "")
    costs = seen.costs.for_members(parts_of(proposal.plan, world.device.graphs))
    assert costs.schedule_s(proposal.plan.combined[0].schedule) <= costs.schedule_s(schedule)  # type: ignore[arg-type]


def parts_of(plan: Plan, graphs: Mapping[Digest, Graph]) -> list[MemberOf]:
    bound = bind(plan, graphs)
    models = [(bound.models[member.model], member.block) for member in bound.combined[0].members]
    return [(model.plan.artifact, model.graph, model.blocks[block]) for model, block in models]
