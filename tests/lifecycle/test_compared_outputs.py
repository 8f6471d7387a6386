"""A new version whose outputs are to agree: what the core asks for, and how the comparison ends."""

from collections import deque
from random import Random
from typing import Any

import pytest
from msgspec import structs

from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.output_runner import INPUTS, OutputRunner
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state
from stageloom.edge_agent.lifecycle.states import LinkState
from stageloom.edge_agent.worker.messages import CompareOutputs, OutputsCompared
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.engine.trial import TrialConfig, TrialRecord, TrialResult, Verdict
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Activation, DeviceState
from stageloom.shared.messages.outputs import OutputsVerdict
from stageloom.shared.messages.telemetry import TrialEnded
from tests.lifecycle import orders
from tests.lifecycle.driver import GOOD, Driver, desired, kinds
from tests.lifecycle.world import SOUND, World, plan
from tests.lifecycle.world import desired as plan_desired

ATTEMPT = (1, 1)
NEW = ev.PlanStaged(ATTEMPT, versions=("m",))
AGREES = OutputsVerdict(0.01, 32, True, "m", "o", 0.001)
DIFFERS = OutputsVerdict(0.01, 32, False, "m", "o", 0.5, 0.5, 0.5, 0.25, (0, 3), "1", "2")
RECORD = TrialRecord(candidate=Digest("a" * 64), control=Digest("b" * 64), environment="env", began_us=5)


def staged(answer: ev.PlanStaged = NEW, **fields: Any) -> tuple[Driver, list[ev.Action]]:
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.do(ev.Received(desired(1, **fields)))
    driver.do(orders.PlanVerified(ATTEMPT))
    return driver, driver.do(answer)


def test_new_versions_are_compared_before_they_run_if_that_was_asked_for() -> None:
    driver, actions = staged(compare_outputs=0.25)
    (asked,) = (one for one in actions if isinstance(one, orders.CompareOutputs))
    assert (asked.attempt, asked.tolerance) == (ATTEMPT, 0.25)
    assert driver.state is DeviceState.STAGED


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (NEW, {}),
        (ev.PlanStaged(ATTEMPT), {"compare_outputs": 0.25}),
        (NEW, {"compare_outputs": 0.25, "activation": Activation.NOW}),
    ],
    ids=["not asked for", "no version is new", "an order"],
)
def test_nothing_is_compared_otherwise(answer: ev.PlanStaged, fields: dict[str, Any]) -> None:
    driver, actions = staged(answer, **fields)
    assert "CompareOutputs" not in kinds(actions)
    assert driver.state is DeviceState.PROBATION


def test_nothing_is_activated_unseen_where_the_plan_to_compare_with_does_not_run() -> None:
    driver, _ = staged(ev.PlanStaged(ATTEMPT, alone=True), compare_outputs=0.25)
    assert driver.state is DeviceState.REJECTED
    assert "push it again" in driver.core.state.reason


def test_the_first_plan_of_a_device_has_nothing_to_differ_from() -> None:
    driver = Driver(LinkState()).online()
    driver.do(ev.Received(desired(1, compare_outputs=0.25)))
    driver.do(orders.PlanVerified(ATTEMPT))
    driver.do(ev.PlanStaged(ATTEMPT, alone=True))
    assert driver.state is DeviceState.PROBATION


def test_another_interface_is_rejected_before_anything_is_compared() -> None:
    driver, _ = staged(ev.PlanStaged(ATTEMPT, interface="other inputs", versions=("m",)), compare_outputs=1.0)
    assert driver.state is DeviceState.REJECTED


@pytest.mark.parametrize(
    ("verdict", "found", "then"),
    [(Verdict.COMMIT, AGREES, DeviceState.PROBATION), (Verdict.REJECT, DIFFERS, DeviceState.REJECTED)],
)
def test_the_row_tells_what_was_compared(verdict: Verdict, found: OutputsVerdict, then: DeviceState) -> None:
    driver, _ = staged(compare_outputs=0.01)
    driver.do(orders.TrialBegins(ATTEMPT, RECORD))
    result = TrialResult(verdict=verdict, reason=found.text(), outputs=found)
    actions = driver.do(orders.TrialDecided(ATTEMPT, GOOD.ref.digest, result))
    (row,) = (one for one in actions if isinstance(one, TrialEnded))
    assert (row.how, row.verdict, row.outputs, row.reason) == ("outputs", verdict.value, found, found.text())
    assert driver.state is then
    if then is DeviceState.PROBATION:
        driver.do(orders.ProbationPassed(ATTEMPT))
        assert not driver.core.state.proven, "its speed was compared with nothing"


def how_of(actions: list[ev.Action]) -> list[tuple[str, str, OutputsVerdict | None]]:
    return [(row.how, row.verdict, row.outputs) for row in actions if isinstance(row, TrialEnded)]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("verdict", [Verdict.REJECT, Verdict.REFUSED, Verdict.ABANDONED])
def test_a_comparison_that_has_no_figures_is_told_as_one(verdict: Verdict, *, begun: bool) -> None:
    driver, _ = staged(compare_outputs=0.01)
    if begun:
        driver.do(orders.TrialBegins(ATTEMPT, RECORD))
    result = TrialResult(verdict=verdict, reason="because")
    assert how_of(driver.do(orders.TrialDecided(ATTEMPT, GOOD.ref.digest, result))) == [
        ("outputs", verdict.value, None)
    ]


def test_a_comparison_that_a_newer_plan_another_environment_or_a_stop_ends_is_told_as_one() -> None:
    for ends in (ev.Received(desired(2, b"newer")), ev.EnvironmentChanged("15 W")):
        driver, _ = staged(compare_outputs=0.01)
        driver.do(orders.TrialBegins(ATTEMPT, RECORD))
        found = decode_state(encode_state(driver.disk))
        assert how_of(driver.do(ends)) == [("outputs", "abandoned", None)]
        assert how_of(Driver(found).booted) == [("outputs", "reject", None)]


def runner() -> tuple[OutputRunner, deque[str]]:
    said: deque[str] = deque()

    def begins(lasts: str) -> list[ev.Action]:
        said.append(lasts)
        return []

    keys = (PlanKey(1), PlanKey(2))
    config = TrialConfig(limit_s=30.0, stall_s=5.0)
    return OutputRunner(RECORD, ("m",), keys, tolerance=0.01, begins=begins, number=7, config=config), said


def test_the_candidate_runs_only_once_the_record_is_durable_and_once() -> None:
    one, said = runner()
    assert one.begin(0.0) == [] and list(said) == ["outputs are compared for up to 30 s"]
    assert one.recorded(1.0) == [CompareOutputs(7, 1, 2, ("m",), 0.01, INPUTS, 30.0)]
    assert one.recorded(1.5) == [] == one.again()
    assert one.progress(11.0) == (0, None, 20.0)
    one.compared(OutputsCompared(6, DIFFERS), 2.0)
    assert not one.over, "another comparison's answer"
    one.compared(OutputsCompared(7, AGREES), 3.0)
    assert one.result == TrialResult(
        verdict=Verdict.COMMIT, reason=AGREES.text(), seconds_s=3.0, outputs=AGREES
    )
    one.compared(OutputsCompared(7, DIFFERS), 4.0)
    assert one.result.verdict is Verdict.COMMIT


@pytest.mark.parametrize(
    ("answer", "verdict", "reason"),
    [
        (OutputsCompared(7, DIFFERS), Verdict.REJECT, "outputs_differ"),
        (OutputsCompared(7, AGREES, "1 left out"), Verdict.COMMIT, f"{AGREES.text()}; 1 left out"),
        (OutputsCompared(7, None, "no task came"), Verdict.ABANDONED, "no task came"),
        (OutputsCompared(7, None, "the new version fails", True), Verdict.REJECT, "the new version fails"),
    ],
)
def test_what_the_engine_answers_is_the_verdict(
    answer: OutputsCompared, verdict: Verdict, reason: str
) -> None:
    one, _ = runner()
    one.begin(0.0)
    one.recorded(0.0)
    one.compared(answer, 1.0)
    assert one.result is not None
    assert one.result.verdict is verdict
    assert one.result.reason.startswith(reason)


def test_a_crash_is_the_candidates_once_it_ran_and_silence_is_nobodys() -> None:
    before, _ = runner()
    before.begin(0.0)
    before.crashed("signal 11", 1.0)
    after, _ = runner()
    after.begin(0.0)
    after.recorded(0.0)
    after.crashed("signal 11", 1.0)
    silent, _ = runner()
    silent.begin(0.0)
    silent.recorded(1.0)
    silent.tick(36.0)
    assert not silent.over
    silent.tick(36.1)
    verdicts = [one.result.verdict for one in (before, after, silent) if one.result is not None]
    assert verdicts == [Verdict.ABANDONED, Verdict.REJECT, Verdict.ABANDONED]


class Versions(World):
    """All plans serve one model, each a version of its own; the engine answers with `found`."""

    found = AGREES
    dies = False

    def check(self, one: object) -> None:
        letter = one.wire.decode()  # type: ignore[attr-defined]
        digest = plan(letter).ref.digest
        facts = PlanFacts(digest, {"m": ModelSignature("m", (), ())}, {"m": digest})
        self.do(self.manager.checked(facts))

    def compare(self, order: CompareOutputs) -> None:
        if self.dies:
            assert self.manager.tries_plan, "no measurement is to blame"
            self.exit("signal 11")
        else:
            self.do(self.manager.outputs_compared(OutputsCompared(order.number, self.found), self.now_s))


@pytest.mark.parametrize("found", [AGREES, DIFFERS])
@pytest.mark.parametrize("seed", range(10))
def test_a_version_runs_if_and_only_if_it_agrees(seed: int, found: OutputsVerdict) -> None:
    world = Versions(Random(seed), {"g": SOUND, "a": SOUND}, LinkState(last_good=plan("g")))
    world.found = found
    world.settle(20.0)
    asked = plan_desired("a", 1)
    world.tell(ev.Received(structs.replace(asked, compare_outputs=0.01)))
    world.settle(60.0)
    assert world.running == ("a" if found.agrees else "g")
    assert ("a" in world.ran) is found.agrees, "it is not launched into before"
    assert [(row.how, row.outputs) for row in world.rows] == [("outputs", found)]


def test_an_engine_that_the_new_version_takes_down_is_its_fault() -> None:
    world = Versions(Random(3), {"g": SOUND, "a": SOUND}, LinkState(last_good=plan("g")))
    world.dies = True
    world.settle(20.0)
    asked = plan_desired("a", 1)
    world.tell(ev.Received(structs.replace(asked, compare_outputs=0.01)))
    world.settle(100.0)
    assert world.running == "g"
    assert not world.manager.tries_plan
    assert world.core.state.state is DeviceState.REJECTED
    assert "crashed while the new version ran" in world.core.state.reason
    assert [row.how for row in world.rows] == ["outputs"]
