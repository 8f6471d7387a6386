"""From an alarm to a pushed plan and its outcome: a real planner process, and a device that only talks."""

import json
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageloom.planner.api import routes
from stageloom.planner.replan.decide import KEPT_BY_REGIME
from stageloom.planner.schema.device import DeviceProfileRequest
from stageloom.shared import failpoint
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Alarm, AlarmAck, DeviceState, ModelLoad, Origin
from stageloom.shared.messages.telemetry import (
    OperatorTiming,
    PlanActivated,
    ProfileResult,
    StageProfileResult,
    StageTiming,
    StateChange,
    TrialEnded,
)
from stageloom.shared.plan import decode_plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.space import Space
from tests.e2e.fleet import four_free_ports
from tests.metrics.collector import collector
from tests.planner.fake_device import BOOT, FakeDevice
from tests.planner.processes import PlannerProcess, ask, ok, until
from tests.policy.maddpg.cases import saying

SETTINGS = '[planner]\ndead_after_s = 600\nsearch = "local"\n'
"""These devices never say that they live, and no test here is about Ray."""
_NUMBERS = count(1)


def stock(home: Path, model_file: Path) -> None:
    """One model, and its first plan."""
    ok(home, "model", "add", str(model_file), "--name", "branches", "--shape", "x=2x8")
    ok(home, "plan", "create", "--model", "branches", "--executor", "null", "--name", "first")


def new_device(home: Path) -> FakeDevice:
    """Of a class of its own, so that it shares no costs with any other."""
    name = f"device-{next(_NUMBERS)}"
    return FakeDevice(ok(home, "device", "token").strip(), name, device_class=name)


class Rig:
    """A device that runs its planner's first plan."""

    def __init__(self, planner: PlannerProcess, device: FakeDevice) -> None:
        self.home, self.device = planner.home, device
        self.next_row = self.revision = 0
        device.enrol()
        device.hello()
        ok(self.home, "plan", "push", device.name, "first")
        self.first = self.desired()
        self.profiled()

    def desired(self) -> control.Desired:
        """The next desired value."""
        wanted: control.Desired = self.device.expect("control", control.TO_DEVICE, control.Desired)
        return wanted

    def rows(self, *data: Any, at_us: int = 1_700_000_000_000_000) -> None:
        """Send telemetry."""
        self.device.rows(self.next_row, list(data), at_us=at_us)
        self.next_row += len(data)

    def profiled(self) -> None:
        """Say what the operators cost: two that take 1 ms each, and a cheap sum."""
        times = tuple(OperatorTiming(op, us, 1.0, 9) for op, us in enumerate((1000.0, 1000.0, 10.0)))
        artifact = self.first.artifacts[0].digest
        wanted = DeviceProfileRequest(device=DeviceId(self.device.name), models=("branches",), wait_s=0.0)
        (request,) = ask(self.home, routes.DEVICE_PROFILE, wanted).requests
        self.first = self.desired()
        self.rows(ProfileResult(request, artifact, 1, self.device.device_class, times, True))

    def alarm(
        self,
        number: int,
        plan: Digest | None,
        *,
        queued: int = 8,
        at_us: int = 1_000_000,
        cause: str = "variance",
        per_s: float = 100.0,
    ) -> None:
        """Fire, and read on until it is acknowledged; a plan that comes first is kept in `pushed`."""
        message = Alarm(
            boot=BOOT,
            number=number,
            at_us=at_us,
            cause=cause,
            value=0.5,
            threshold=0.0625,
            plan=plan,
            loads=(ModelLoad("branches", per_s, 2010.0, queued, 300_000),),
            samples=(),
        )
        self.device.send("control", control.TO_PLANNER, message)

    def acknowledged(self, number: int) -> None:
        """Wait for the acknowledgement of an alarm."""
        ack = self.device.expect("control", control.TO_DEVICE, AlarmAck)
        assert (ack.boot, ack.number) == (BOOT, number)

    def replans(self) -> list[dict[str, Any]]:
        """What `stageloom replan list` says of the device, newest first."""
        found: list[dict[str, Any]] = json.loads(ok(self.home, "replan", "list", self.device.name, "--json"))
        return found

    def reports(self, desired: control.Desired, state: DeviceState) -> None:
        """Say what state a generation is in."""
        self.revision += 1
        report = control.Report(
            revision=self.revision,
            epoch=desired.epoch,
            generation=desired.generation,
            seen=desired.plan_digest,
            active=self.first.plan_digest,
            origin=Origin.PLANNER,
            state=state,
        )
        self.device.report(report)

    def ended(self, desired: control.Desired, verdict: str, state: DeviceState, **figures: Any) -> None:
        """Tell how the trial of a generation ended, 2 s after the alarm at 1 s."""
        assert desired.plan_digest is not None
        ended = TrialEnded(
            epoch=desired.epoch,
            generation=desired.generation,
            origin=Origin.PLANNER,
            how=figures.get("how", "trial"),
            verdict=verdict,
            candidate=desired.plan_digest,
            control=self.first.plan_digest,
            ratio=figures.get("ratio"),
            ratio_low=figures.get("low"),
            ratio_high=figures.get("high"),
            pairs=figures.get("pairs", 0),
            began_us=1_500_000,
            decided_us=3_000_000,
            reason="",
        )
        change = StateChange(
            desired.epoch, desired.generation, state, desired.plan_digest, Origin.PLANNER, "why"
        )
        self.rows(ended, change, at_us=3_000_000)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[PlannerProcess]:
    """One for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("replanning")
    (folder / "planner.toml").write_text(SETTINGS)
    process = PlannerProcess(folder / "home", "--config", str(folder / "planner.toml"))
    stock(process.home, model_file)
    yield process
    process.stop()


@pytest.fixture
def rig(planner: PlannerProcess) -> Iterator[Rig]:
    """A new device."""
    with new_device(planner.home) as device:
        yield Rig(planner, device)


@pytest.mark.promise("alarm-sent-until-acknowledged")
def test_an_alarm_is_stored_acknowledged_and_answered_with_a_plan_whose_trial_is_recorded(rig: Rig) -> None:
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    pushed = rig.desired()
    assert pushed.plan_digest not in (None, rig.first.plan_digest)
    assert pushed.activation is control.Activation.TRIAL
    (replan,) = rig.replans()
    assert replan["outcome"] == "pending"
    assert (replan["cause"], replan["value"], replan["threshold"]) == ("variance", 0.5, 0.0625)
    assert (replan["epoch"], replan["generation"]) == (pushed.epoch, pushed.generation)

    rig.ended(pushed, "commit", DeviceState.COMMITTED, ratio=1.1, low=1.05, high=1.15, pairs=9)
    assert pushed.plan_digest is not None
    active = PlanActivated(pushed.plan_digest, Origin.PLANNER, pushed.epoch, pushed.generation)
    rig.rows(active, at_us=3_250_000)
    (replan,) = rig.replans()
    assert replan["outcome"] == "committed"
    assert (replan["ratio"], replan["ratio_low"], replan["ratio_high"]) == (1.1, 1.05, 1.15)
    assert replan["trigger_to_decision_ms"] == 2000.0
    assert replan["trigger_to_active_ms"] == 2250.0
    compared = json.loads(ok(rig.home, "plan", "compare", rig.device.name, "--json"))
    assert compared["trial"]["candidate"] == pushed.plan_digest
    assert compared["trial"]["verdict"] == "commit" and compared["predicted_ratio"] > 0.0
    assert "verdict   commit by trial" in ok(rig.home, "plan", "compare", rig.device.name)
    with collector() as (url, spans):
        ok(rig.home, "plan", "trace", rig.device.name, "--otlp", url)
    generations = json.loads(ok(rig.home, "plan", "history", rig.device.name, "--json"))
    ways = sorted(span.name for span in spans)
    assert ways == [*["plan"] * len(generations), "search", "trial"]
    assert len({span.trace_id for span in spans if span.name != "plan"}) == 1
    assert replan["plan"] in ok(rig.home, "replan", "list", rig.device.name)
    explained = json.loads(ok(rig.home, "plan", "explain", rig.device.name, "--json"))
    assert explained["digest"] == pushed.plan_digest
    assert explained["decided"]["replan"]["replan"] == replan["replan"]
    assert explained["decided"]["trial"]["verdict"] == "commit"
    looked_at = {one["digest"]: one["last"]["verdict"] for one in explained["others"]}
    assert looked_at[pushed.plan_digest] == "taken" and len(looked_at) > 1


@pytest.mark.promise("alarm-sent-until-acknowledged")
def test_a_repeated_alarm_is_acknowledged_again_and_begins_nothing(rig: Rig) -> None:
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    assert len(rig.replans()) == 1


@pytest.mark.promise("alarm-sent-until-acknowledged")
@pytest.mark.more
def test_kill_9_before_an_alarm_is_acknowledged_leaves_one_replan_for_it(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device sends again what was not acknowledged; what was stored before the kill counts once."""
    home = tmp_path / "home"
    settings = tmp_path / "planner.toml"
    settings.write_text(SETTINGS)
    address = ("--listen", f"127.0.0.1:{four_free_ports()}", "--config", str(settings))
    monkeypatch.setenv(failpoint.VARIABLE, "planner.alarm.ack=kill@1")
    planner = PlannerProcess(home, *address)
    monkeypatch.delenv(failpoint.VARIABLE)
    stock(home, model_file)
    with new_device(home) as device:
        rig = Rig(planner, device)
        rig.alarm(1, rig.first.plan_digest)
        assert planner.ended() == -signal.SIGKILL
        assert len(rig.replans()) == 1, "it is stored before it is acknowledged"
        planner = PlannerProcess(home, *address)
        device.hello()
        rig.alarm(1, rig.first.plan_digest)
        rig.acknowledged(1)
        assert len(rig.replans()) == 1
    planner.stop()


def test_an_alarm_during_a_replan_is_noted_against_it(rig: Rig) -> None:
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    rig.alarm(2, rig.first.plan_digest)
    rig.acknowledged(2)
    (replan,) = rig.replans()
    assert replan["later_alarms"] == 1


def test_what_did_not_gain_is_not_proposed_again_and_the_reason_is_said(rig: Rig) -> None:
    """With nothing queued: a backlog asks for other launch intervals, and no search follows those at once."""
    seen: set[str] = set()
    for number in range(1, 12):
        rig.alarm(number, rig.first.plan_digest, queued=0)
        rig.acknowledged(number)
        if until(lambda: rig.replans()[0]["outcome"] != "pending" or rig.replans()[0]["generation"]):
            newest = rig.replans()[0]
        if newest["outcome"] == "no_gain":
            assert seen and "did not gain here lately" in newest["reason"]
            assert newest["trigger_to_active_ms"] is None
            break
        assert newest["digest"] not in seen
        seen.add(newest["digest"])
        rig.ended(rig.desired(), "no_gain", DeviceState.NO_GAIN, ratio=1.0, low=0.99, high=1.01, pairs=40)
    else:
        pytest.fail("the planner never ran out of plans")


def test_a_device_with_replanning_off_gets_its_alarm_acknowledged_and_no_plan(rig: Rig) -> None:
    ok(rig.home, "device", "replan", rig.device.name, "--off")
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    assert rig.replans() == []


@pytest.mark.promise("desired-changed-twice-while")
def test_a_plan_made_on_the_device_is_adopted_only_while_nothing_newer_is_desired(rig: Rig) -> None:
    ok(
        rig.home,
        *("plan", "create", "--model", "branches", "--executor", "null"),
        *("--scheduler", "greedy", "--name", "local"),
    )
    ok(rig.home, "plan", "push", rig.device.name, "first", "--autonomy", "full")
    rig.first = rig.desired()
    plan = json.loads(ok(rig.home, "plan", "show", "local", "--json"))
    local = control.LocalPlan(
        boot=BOOT,
        epoch=rig.first.epoch,
        generation=rig.first.generation,
        local_counter=1,
        plan_digest=Digest(plan["digest"]),
        plan=msgspec.convert(plan["wire"], bytes),
        artifacts=rig.first.artifacts,
        cause="variance",
    )
    rig.device.send("control", control.TO_PLANNER, local)
    adopted = rig.desired()
    assert (adopted.plan_digest, adopted.generation) == (plan["digest"], rig.first.generation + 1)
    rig.device.send("control", control.TO_PLANNER, local)  # late: the answer is a newer value by now
    rig.device.send("control", control.TO_PLANNER, msgspec.structs.replace(local, local_counter=2))
    rig.alarm(1, rig.first.plan_digest)  # whatever the planner did about those is done when this is
    rig.acknowledged(1)
    history = json.loads(ok(rig.home, "plan", "history", rig.device.name, "--json"))
    assert [entry["decided_by"] for entry in history if entry["decided_by"] == "local"] == ["local"]


def test_a_plan_of_a_device_that_may_not_plan_is_refused_and_the_operator_is_told(rig: Rig) -> None:
    local = control.LocalPlan(
        boot=BOOT,
        epoch=rig.first.epoch,
        generation=rig.first.generation,
        local_counter=1,
        plan_digest=rig.first.plan_digest or Digest(""),
        plan=rig.first.plan,
        artifacts=rig.first.artifacts,
        cause="variance",
    )
    rig.device.send("control", control.TO_PLANNER, local)
    refused = rig.device.expect("control", control.TO_DEVICE, Refused)
    assert refused.code is RefusalCode.NOT_PERMITTED and "may not plan alone" in refused.reason
    said = f"device {rig.device.name}: local_plan_refused: it may not plan alone"
    assert any(one.startswith(said) for one in json.loads(ok(rig.home, "status", "--json"))["notices"])
    assert f"notice: {said}" in ok(rig.home, "status")
    ok(rig.home, "planner", "trust-clock")


def wide_won(rig: Rig) -> control.Desired:
    """A schedule that the stages measured on the device make the better one won a trial there."""
    ok(
        rig.home,
        *("plan", "create", "--model", "branches", "--executor", "null"),
        *("--scheduler", "greedy", "--name", f"wide-{rig.device.name}"),
    )
    ok(rig.home, "plan", "push", rig.device.name, f"wide-{rig.device.name}")
    wide = rig.desired()
    stages = (StageTiming(0, 900.0, 1.0, 9), StageTiming(1, 10.0, 1.0, 9))  # both branches in less than one
    asked = DeviceProfileRequest(device=DeviceId(rig.device.name), plan=f"wide-{rig.device.name}", wait_s=0.0)
    (request,) = ask(rig.home, routes.DEVICE_PROFILE, asked).requests
    wide = rig.desired()
    assert wide.plan_digest is not None
    rig.rows(StageProfileResult(request, wide.plan_digest, 0, rig.device.device_class, stages, 910.0, True))
    rig.ended(wide, "commit", DeviceState.COMMITTED, ratio=1.9, low=1.8, high=2.0, pairs=8)
    return wide


def test_a_proven_plan_is_pushed_at_once_when_it_is_predicted_to_be_the_best(rig: Rig) -> None:
    wide = wide_won(rig)
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    pushed = decode_plan(rig.desired().plan)
    assert pushed.structure == decode_plan(wide.plan).structure
    (replan,) = rig.replans()
    assert replan["how"] == "proven" and replan["predicted"] == pytest.approx(910.0 / 2010.0)


def test_a_load_that_a_plan_won_under_before_is_answered_by_that_plan_without_a_search(rig: Rig) -> None:
    """1. A re-plan's plan wins its trial; 2. the first plan runs again, and the same load comes: the winner,
    at once. 3. Arrivals move to that load while it runs: nothing else is looked for."""
    structure = decode_plan(wide_won(rig).plan).structure
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    rig.ended(rig.desired(), "commit", DeviceState.COMMITTED, ratio=1.3, low=1.2, high=1.4, pairs=9)
    rig.alarm(2, rig.first.plan_digest)
    rig.acknowledged(2)
    pushed = rig.desired()
    assert decode_plan(pushed.plan).structure == structure
    assert rig.replans()[0]["how"] == "regime"
    rig.ended(pushed, "commit", DeviceState.COMMITTED, how="proven")
    rig.alarm(3, pushed.plan_digest, cause="regime")
    rig.acknowledged(3)
    until(lambda: rig.replans()[0]["outcome"] == "no_gain")
    assert rig.replans()[0]["reason"] == KEPT_BY_REGIME


def test_a_load_that_is_back_is_answered_at_once_although_another_plan_is_on_trial(rig: Rig) -> None:
    """1. A plan wins under a load. 2. Under another load the one before is on trial. 3. The first load comes
    back. 4. It is told once more, and the plan for it goes on."""
    won = wide_won(rig)
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    rig.ended(rig.desired(), "commit", DeviceState.COMMITTED, ratio=1.3, low=1.2, high=1.4, pairs=9)
    rig.alarm(2, won.plan_digest, per_s=400.0)
    rig.acknowledged(2)
    tried = rig.desired()
    assert decode_plan(tried.plan).structure == decode_plan(rig.first.plan).structure
    rig.alarm(3, rig.first.plan_digest, cause="regime")
    rig.acknowledged(3)
    pushed = rig.desired()
    assert decode_plan(pushed.plan).structure == decode_plan(won.plan).structure
    assert pushed.generation == tried.generation + 1
    newest, overtaken, _ = rig.replans()
    assert (newest["how"], newest["outcome"]) == ("regime", "pending")
    assert overtaken["reason"] == f"overtaken by generation {pushed.epoch}.{pushed.generation}"
    rig.alarm(4, rig.first.plan_digest, cause="regime")
    rig.acknowledged(4)
    until(lambda: rig.replans()[0]["outcome"] == "no_gain")
    again, pending, *_ = rig.replans()
    assert again["reason"] == "the plan for these arrivals is being tried already"
    assert pending["outcome"] == "pending"


@pytest.mark.parametrize("cause", ["drift", "power_mode"])
def test_an_alarm_that_comes_before_the_report_of_the_trial_that_held_it_is_answered_after_that(
    rig: Rig, cause: str
) -> None:
    """1. A re-plan's plan is on trial, and the device holds an alarm that it tells once. 2. The trial ends.
    The alarm is stored first."""
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    tried = rig.desired()
    rig.reports(tried, DeviceState.TRIAL)
    rig.alarm(2, rig.first.plan_digest, cause=cause)
    rig.acknowledged(2)
    assert [replan["cause"] for replan in rig.replans()] == [cause, "variance"]
    rig.reports(tried, DeviceState.NO_GAIN)
    until(lambda: rig.replans()[0]["outcome"] != "pending" or rig.replans()[0]["generation"] > 0)
    newest, ended = rig.replans()
    assert (ended["outcome"], ended["later_alarms"]) == ("no_gain", 0)
    assert "pushed by others" not in newest["reason"]


def test_an_alarm_leaves_an_operators_trial_alone_and_other_arrivals_are_answered_after_it(rig: Rig) -> None:
    """Queues are told of again; arrivals that moved are told once, and the trial may take minutes."""
    won = wide_won(rig)
    ok(rig.home, "plan", "push", rig.device.name, "first")
    tried = rig.desired()
    rig.reports(tried, DeviceState.TRIAL)
    rig.alarm(1, won.plan_digest, cause="variance")
    rig.acknowledged(1)
    until(lambda: rig.replans()[0]["outcome"] == "no_gain")
    assert rig.replans()[0]["reason"] == "the device tries a plan that was pushed by others"
    rig.alarm(2, won.plan_digest, cause="regime")
    rig.acknowledged(2)
    rig.alarm(3, won.plan_digest, cause="variance")
    rig.acknowledged(3)
    assert (rig.replans()[0]["outcome"], rig.replans()[0]["later_alarms"]) == ("pending", 1)
    rig.reports(tried, DeviceState.NO_GAIN)
    until(lambda: rig.replans()[0]["outcome"] != "pending" or rig.replans()[0]["generation"] > 0)
    assert "pushed by others" not in rig.replans()[0]["reason"]


def test_an_adopted_policy_that_is_asked_alone_answers_at_once(rig: Rig, tmp_path: Path) -> None:
    """1. A policy, trained for another device class, is adopted for the device's.
    2. Asked alone, its plan is pushed: nothing was searched for.
    """
    first = decode_plan(rig.first.plan)
    space = Space.of(first, "twin", samples=2)
    (tmp_path / "policy").write_bytes(encode(MaddpgCheckpoint(space, saying(space, (0.5, 0.5)))))
    ok(rig.home, "policy", "import", str(tmp_path / "policy"), "--device", rig.device.name, "--unchecked")
    asked = ("device", "replan", rig.device.name, "--json", "--proposer")
    assert json.loads(ok(rig.home, *asked, "learned"))["proposer"] == "learned"
    rig.alarm(1, rig.first.plan_digest)
    rig.acknowledged(1)
    pushed = rig.desired()
    explained = json.loads(ok(rig.home, "plan", "explain", rig.device.name, "--json"))
    assert explained["digest"] == pushed.plan_digest and explained["scheduler"] == "maddpg"
    (model,) = decode_plan(pushed.plan).models
    assert model.launch_interval_us > 0 == first.models[0].launch_interval_us
