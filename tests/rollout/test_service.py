"""A rollout on a store and simulated devices: waves, verdicts, rollback, what may not happen meanwhile."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from stageloom.planner.cluster.interface import SearchFuture
from stageloom.planner.labels import LabelChanges
from stageloom.planner.rollout.service import RolloutService
from stageloom.planner.rollout.version import _as_version
from stageloom.planner.schema.plan import ModelOptions
from stageloom.planner.schema.rollout import AskState, RolloutCreateRequest, RolloutInfo, RolloutState
from stageloom.planner.store import rollout_turns
from stageloom.planner.store.desired import Push, adopt_plan, push
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.store.replan_pushes import push_replan
from stageloom.planner.store.replans import record_alarm
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.rollouts import (
    abort_rollout,
    create_rollout,
    pause_rollout,
    resume_rollout,
    rollout_devices,
    rollout_info,
    rollout_infos,
)
from stageloom.planner.store.trusted_time import advance_clock
from stageloom.shared.clock import ManualClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, PlanError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Alarm, DeviceState, LocalPlan
from stageloom.shared.plan import ExecutorOptions, ModelPlan, Plan, decode_plan
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.arrangements import Arrangement, arranged_plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.planner.processes import until
from tests.rollout.fleet import Fleet, add_version
from tests.store.helpers import chain, enrol, small_plan

pytestmark = pytest.mark.more


class Pool:
    """Runs a search when a test says so."""

    workers, where = 1, "here"

    def __init__(self) -> None:
        self.asked: list[tuple[SearchFuture[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: SearchFuture[Any] = SearchFuture()
        self.asked.append((future, lambda: function(*arguments)))
        return future

    def run(self) -> None:
        """Run what was asked for."""
        for future, work in self.asked:
            future.settle(work())
        self.asked.clear()

    def close(self) -> None:
        pass


class Rig:
    """A fleet with version 2 of its model, and the service."""

    def __init__(self, home: Path, devices: int, *, operators: int = 4) -> None:
        self.fleet = Fleet(home, devices)
        self.store = self.fleet.store
        self.new = add_version(self.store, home, "relu", "two", operators)
        self.pool = Pool()
        self.restart()

    def restart(self) -> None:
        """As if the planner had been killed: all but the store is forgotten."""
        self.service = RolloutService(self.store, self.fleet, self.pool, self.fleet.clock)

    def begin(self, model: str = "relu@2", **fields: Any) -> RolloutInfo:
        """A rollout named `r`."""
        request = RolloutCreateRequest(**{"rollout": "r", "model": model} | fields)
        return self.store.write(create_rollout, request)

    def turns(self, number: int = 3) -> None:
        """Some turns of the service."""
        for _ in range(number):
            self.service.turn()

    @property
    def info(self) -> RolloutInfo:
        """The rollout."""
        return self.store.read(rollout_info, "r")

    def states(self) -> str:
        """Devices' states by their first letters, by name: `d` done, `f` failed, `w` waiting..."""
        devices = self.store.read(rollout_devices, "r", limit=1000)
        return "".join(
            "W" if one.state is AskState.WITHDRAWN else one.state.value[0]
            for one in sorted(devices, key=lambda one: one.device)
        )

    def versions(self) -> str:
        """Which version each device should run."""
        return "".join("2" if self.fleet.artifact(name) == self.new else "1" for name in self.fleet.names)

    def decide(self, *numbers: int, state: DeviceState = DeviceState.COMMITTED) -> None:
        """Devices end what they were asked, and the service turns."""
        self.fleet.report([self.fleet.names[number] for number in numbers], state, "slow")
        self.turns()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, 6)


def test_waves_follow_each_other_once_all_devices_of_one_keep_the_version(rig: Rig) -> None:
    rig.begin(waves="1,50%,100%")
    rig.turns()
    assert (rig.states(), rig.versions()) == ("awwwww", "211111")
    rig.decide(0)
    assert (rig.states(), rig.versions()) == ("daawww", "222111")
    rig.decide(1)
    assert rig.states() == "ddawww"
    rig.decide(2)
    rig.decide(3, 4, 5)
    assert (rig.states(), rig.info.state, rig.info.reason) == ("dddddd", RolloutState.COMPLETED, "6 done")


def test_the_plan_is_kept_but_for_the_version_and_once_for_all_devices(rig: Rig) -> None:
    rig.begin(waves="100%")
    rig.turns()
    before = decode_plan(rig.store.read(plan_info, "first").wire)
    made = {rig.fleet.wanted(name).plan for name in rig.fleet.names}
    (wire,) = made
    plan = decode_plan(wire)
    assert plan.models[0].artifact == rig.new
    assert msgspec.structs.asdict(rig.store.read(rollout_devices, "r")[0])["old_plan"] == "first"
    assert (plan.combined, plan.lanes, plan.executor) == (before.combined, before.lanes, before.executor)


@pytest.mark.promise("rollout-stops-by-itself")
def test_a_bad_version_stops_by_itself_and_the_others_keep_the_old_one(rig: Rig) -> None:
    rig.begin(waves="50%,100%", max_failed=1)
    rig.turns()
    rig.decide(0)
    rig.decide(1, 2, state=DeviceState.ROLLED_BACK)
    assert (rig.info.state, rig.states()) == (RolloutState.STOPPED, "dffwww")
    assert rig.info.reason == "2 devices failed, 1 may: d01, d02"
    assert rig.versions() == "211111"


def test_devices_that_are_undecided_when_it_stops_get_their_old_plan_back(rig: Rig) -> None:
    rig.begin(waves="50%,100%")
    rig.turns()
    rig.decide(1, state=DeviceState.REJECTED)
    assert (rig.states(), rig.versions()) == ("WfWwww", "111111")
    assert rig.store.read(rollout_devices, "r")[1].reason == "rejected: slow"


def test_a_device_whose_key_is_revoked_meanwhile_gets_its_old_plan_back_when_it_joins_again(rig: Rig) -> None:
    device = rig.fleet.names[1]
    rig.begin(waves="50%,100%")
    rig.turns()
    rig.store.write(revoke_device, device)
    rig.decide(0, state=DeviceState.REJECTED)
    assert (rig.states(), rig.versions()) == ("fWWwww", "111111")
    assert (device, rig.fleet.wanted(device).generation) in rig.fleet.told


def test_a_device_that_is_away_is_asked_when_it_comes(rig: Rig) -> None:
    rig.fleet.up.discard(rig.fleet.names[0])
    rig.begin(waves="1,100%", reach_s=60.0)
    rig.turns()
    rig.fleet.clock.advance(59.0)
    rig.turns()
    assert rig.states() == "wwwwww"
    rig.fleet.up.add(rig.fleet.names[0])
    rig.turns()
    assert rig.states() == "awwwww"


def test_devices_of_the_next_wave_that_are_away_are_not_asked_with_the_others(rig: Rig) -> None:
    """Nothing would be left to pause: a device takes what is desired of it as soon as it returns."""
    rig.begin(waves="1,100%")
    rig.turns()
    away = rig.fleet.names[2:4]
    rig.fleet.up -= set(away)
    rig.decide(0)
    assert (rig.states(), rig.versions()) == ("dawwaa", "221122")
    rig.store.write(pause_rollout, "r")
    rig.fleet.up |= set(away)
    rig.turns()
    assert rig.states() == "dawwaa"


def test_devices_not_reached_pause_the_rollout_and_run_the_old_plan_when_they_return(rig: Rig) -> None:
    rig.begin(waves="2,100%", reach_s=60.0)
    rig.turns()
    rig.fleet.up.discard(rig.fleet.names[1])
    rig.decide(0)
    rig.fleet.clock.advance(61.0)
    rig.turns()
    assert (rig.info.state, rig.states(), rig.versions()) == (RolloutState.PAUSED, "duwwww", "211111")
    rig.store.write(resume_rollout, "r")
    rig.turns()
    assert (rig.info.state, rig.states()) == (RolloutState.RUNNING, "duaaaa")


def test_a_leap_of_the_wall_clock_fails_no_wave(rig: Rig) -> None:
    rig.begin(waves="100%", reach_s=60.0)
    rig.fleet.up.clear()
    rig.turns()
    rig.fleet.clock._wall_us += 10**15
    rig.turns()
    assert (rig.info.state, rig.states()) == (RolloutState.RUNNING, "wwwwww")


def test_a_killed_planner_goes_on_where_it_was(rig: Rig) -> None:
    rig.begin(waves="2,100%")
    rig.turns()
    rig.restart()
    rig.turns()
    generations = [rig.fleet.wanted(name).generation for name in rig.fleet.names]
    assert (rig.states(), generations) == ("aawwww", [2, 2, 1, 1, 1, 1])
    rig.decide(0, 1)
    rig.restart()
    rig.turns()
    rig.decide(2, 3, 4, 5)
    assert rig.info.state is RolloutState.COMPLETED


def test_a_paused_rollout_asks_nobody_and_still_hears_verdicts(rig: Rig) -> None:
    rig.begin(waves="1,100%")
    rig.turns()
    rig.store.write(pause_rollout, "r")
    rig.decide(0)
    assert (rig.info.state, rig.states()) == (RolloutState.PAUSED, "dwwwww")
    rig.store.write(resume_rollout, "r")
    rig.turns()
    assert rig.states() == "daaaaa"


@pytest.mark.parametrize(("rollback", "versions"), [(False, "211111"), (True, "111111")])
def test_an_aborted_rollout_leaves_the_undecided_and_returns_the_others_if_asked(
    rig: Rig, rollback: bool, versions: str
) -> None:
    rig.begin(waves="2,100%")
    rig.turns()
    rig.decide(0)
    info, changed = rig.store.write(abort_rollout, "r", rollback=rollback)
    assert (info.state, rig.versions()) == (RolloutState.ABORTED, versions)
    assert len(changed) == versions[:2].count("1")
    rig.turns()
    assert rig.states() == ("rWwwww" if rollback else "dWwwww")
    with pytest.raises(InputError, match="has ended: aborted"):
        rig.store.write(resume_rollout, "r")


def test_a_device_is_in_one_live_rollout_only(rig: Rig) -> None:
    rig.begin(waves="1,100%")
    with pytest.raises(InputError, match="'d00' is in rollout 'r'"):
        rig.begin(rollout="other")


def test_a_rollback_does_not_reach_into_another_rollout(rig: Rig) -> None:
    rig.begin(waves="2,100%")
    rig.turns()
    rig.decide(0)
    rig.decide(1, state=DeviceState.REJECTED)
    add_version(rig.store, rig.store.data_dir, "relu", "three")
    rig.begin("relu@3", rollout="next", waves="1,100%")
    with pytest.raises(InputError, match="'d00' is in rollout 'next'"):
        rig.store.write(abort_rollout, "r", rollback=True)
    assert rig.info.state is RolloutState.STOPPED
    info, _ = rig.store.write(abort_rollout, "r", rollback=False)
    assert info.state is RolloutState.ABORTED


def test_a_rollback_leaves_devices_that_had_the_version_before_and_does_not_count_them(rig: Rig) -> None:
    rig.begin(waves="2,100%")
    rig.turns()
    rig.decide(0)
    rig.decide(1, state=DeviceState.REJECTED)
    rig.begin(rollout="rest", waves="2,100%", max_failed=1)
    rig.turns()
    rig.decide(1)
    _, changed = rig.store.write(abort_rollout, "rest", rollback=True)
    assert [device for device, _ in changed if device == rig.fleet.names[0]] == []
    assert rig.versions()[:2] == "21"
    states = {one.device: one.state for one in rig.store.read(rollout_devices, "rest", limit=1000)}
    assert (states[rig.fleet.names[0]], states[rig.fleet.names[1]]) == (AskState.DONE, AskState.RETURNED)


def test_a_rollback_does_not_take_back_the_version_of_another_model(rig: Rig) -> None:
    """The plan from before has the other model's old version."""
    home = rig.store.data_dir
    for weights in ("one", "two"):
        add_version(rig.store, home, "other", weights)

    def push_both(name: str, *versions: str) -> None:
        models = {one.partition("@")[0]: small_plan(rig.store, one).models[0].artifact for one in versions}
        choices = [
            ModelChoice(name=model, artifact=artifact, graph=rig.store.graph(artifact))
            for model, artifact in models.items()
        ]
        rig.store.write(add_plan, name, compose(choices), "sequential")
        rig.store.write(push, Push(device=rig.fleet.names[0], plan=name, decided_by="operator"))
        rig.fleet.report([rig.fleet.names[0]], DeviceState.COMMITTED)

    push_both("both", "relu@1", "other@1")
    rig.begin(waves="2,100%")
    rig.turns()
    rig.decide(0)
    rig.decide(1, state=DeviceState.REJECTED)
    assert rig.info.state is RolloutState.STOPPED
    push_both("newer", "relu@2", "other@2")
    with pytest.raises(InputError, match="d00 has another version of 'other'"):
        rig.store.write(abort_rollout, "r", rollback=True)
    rig.store.write(abort_rollout, "r", rollback=False)


def test_a_rollback_leaves_devices_that_were_given_another_plan_since_and_does_not_fail_because_of_them(
    rig: Rig,
) -> None:
    """The other plan has another version of a model that the old one has, too: giving that back would undo
    it."""
    home = rig.store.data_dir
    for weights in ("one", "two"):
        add_version(rig.store, home, "other", weights)

    def push_both(name: str, *versions: str) -> None:
        choices = []
        for version in versions:
            artifact = small_plan(rig.store, version).models[0].artifact
            model, graph = version.partition("@")[0], rig.store.graph(artifact)
            choices.append(ModelChoice(name=model, artifact=artifact, graph=graph))
        rig.store.write(add_plan, name, compose(choices), "sequential")
        rig.store.write(push, Push(device=rig.fleet.names[0], plan=name, decided_by="operator"))
        rig.fleet.report([rig.fleet.names[0]], DeviceState.COMMITTED)

    push_both("both", "relu@1", "other@1")
    rig.begin(waves="2,100%")
    rig.turns()
    rig.decide(0, 1)
    push_both("newer", "relu@1", "other@2")
    _, changed = rig.store.write(abort_rollout, "r", rollback=True)
    assert rig.fleet.names[0] not in dict(changed) and rig.fleet.names[1] in dict(changed)
    assert rig.states()[:2] == "sr"
    assert rig.store.read(rollout_devices, "r")[0].reason == "it was given another plan meanwhile"
    assert rig.versions() == "111111"


def test_versions_that_a_rollout_needs_are_not_removed(rig: Rig) -> None:
    rig.begin(waves="100%")
    rig.turns()
    rig.decide(*range(6))
    assert rig.info.state is RolloutState.COMPLETED
    add_version(rig.store, rig.store.data_dir, "relu", "three")
    rig.begin("relu@3", rollout="next", waves="1,100%")
    for version in ("relu@2", "relu@3"):
        with pytest.raises(InputError):
            rig.store.remove_model(version)
    rig.store.write(abort_rollout, "next", rollback=False)
    rig.store.remove_model("relu@3", force=True)


def test_the_old_version_stays_while_a_stopped_rollout_may_go_back_to_it(rig: Rig) -> None:
    rig.begin(waves="5,100%")
    rig.turns()
    rig.decide(0)
    rig.decide(1, state=DeviceState.REJECTED)
    rig.store.write(change_labels, rig.fleet.names[0], LabelChanges({"site": "a"}, ()))
    plan = rig.store.read(rollout_devices, "r")[0].new_plan
    assert plan is not None
    for name in rig.fleet.names[1:]:
        rig.store.write(push, Push(device=name, plan=plan, decided_by="operator"))
    with pytest.raises(InputError, match="rollout 'r' brings model 'relu@1'"):
        rig.store.remove_model("relu@1")
    rig.store.write(abort_rollout, "r", rollback=False)
    rig.store.remove_model("relu@1", force=True)


def test_a_replan_of_the_old_version_does_not_overwrite_what_a_rollout_asked(rig: Rig) -> None:
    device = rig.fleet.names[0]
    rig.begin(waves="1,100%")
    rig.turns()
    alarm = Alarm(
        boot=1, number=1, at_us=1, cause="age", value=1.0, threshold=0.5, plan=None, loads=(), samples=()
    )
    replan = rig.store.write(record_alarm, device, alarm)
    assert replan is not None
    asked = rig.fleet.wanted(device)
    above = (asked.epoch, asked.generation)
    old = decode_plan(rig.store.read(plan_info, "first").wire)
    fields: dict[str, Any] = {"scheduler": "greedy", "how": "search", "predicted": None}
    assert rig.store.write(push_replan, device, replan, old, above=above, **fields) is None
    rig.fleet.report([device], DeviceState.REJECTED)
    assert rig.store.write(push_replan, device, replan, old, above=above, **fields) is not None


@pytest.mark.parametrize("says_what_runs", [False, True])
@pytest.mark.parametrize("state", [DeviceState.NO_GAIN, DeviceState.REJECTED, DeviceState.TRIAL])
def test_a_plan_that_a_re_plan_had_tried_and_its_device_did_not_keep_gets_no_version_and_does_not_return(
    rig: Rig, state: DeviceState, says_what_runs: bool
) -> None:
    """With other weights it would run without a trial."""
    device, first = rig.fleet.names[0], decode_plan(rig.store.read(plan_info, "first").wire)
    own, tried = (replace(first, max_skips=first.max_skips + more) for more in (1, 2))
    rig.store.write(add_plan, "own", own, "sequential")
    alarm = Alarm(
        boot=1, number=1, at_us=1, cause="age", value=1.0, threshold=0.5, plan=None, loads=(), samples=()
    )
    replan, desired = rig.store.write(record_alarm, device, alarm), rig.fleet.wanted(device)
    assert replan is not None
    fields: dict[str, Any] = {"scheduler": "greedy", "how": "search", "predicted": None}
    above = (desired.epoch, desired.generation)
    assert rig.store.write(push_replan, device, replan, tried, above=above, **fields) is not None
    rig.fleet.report([device], state, active=own.digest if says_what_runs else None)
    rig.begin(waves="1,100%")
    rig.turns()
    runs = own if says_what_runs else first
    models = tuple(replace(one, artifact=rig.new) for one in runs.models)
    assert decode_plan(rig.fleet.wanted(device).plan) == replace(runs, models=models)
    rig.store.write(abort_rollout, "r", rollback=False)
    assert decode_plan(rig.fleet.wanted(device).plan) == runs


def test_a_device_that_was_asked_does_not_go_back_by_a_plan_of_its_own(rig: Rig) -> None:
    device = rig.fleet.names[0]
    rig.begin(waves="1,100%")
    rig.turns()
    asked = rig.fleet.wanted(device)
    old = decode_plan(rig.store.read(plan_info, "first").wire)
    local = LocalPlan(
        boot=1,
        epoch=asked.epoch,
        generation=asked.generation,
        local_counter=1,
        plan_digest=old.digest,
        plan=old.wire,
        artifacts=(),
        cause="age",
    )
    assert rig.store.write(adopt_plan, device, local, old) is None
    assert rig.states() == "awwwww"


def test_a_measurement_that_is_asked_meanwhile_changes_nothing(rig: Rig) -> None:
    rig.begin(waves="1,100%")
    rig.turns()
    rig.store.write(request_profile, rig.fleet.names[0], ["relu"])
    rig.turns()
    assert rig.states() == "awwwww"
    rig.decide(0)
    assert rig.states() == "daaaaa"


def test_another_plan_that_an_operator_pushes_takes_the_device_out(rig: Rig) -> None:
    rig.begin(waves="1,100%")
    rig.turns()
    rig.store.write(push, Push(device=rig.fleet.names[0], plan="first", decided_by="operator"))
    rig.turns()
    assert rig.states() == "saaaaa"


def test_a_plan_without_the_model_that_an_operator_pushes_takes_the_device_out(rig: Rig) -> None:
    add_version(rig.store, rig.store.data_dir, "other", "one")
    rig.store.write(add_plan, "another", small_plan(rig.store, "other"), "sequential")
    rig.begin(waves="1,100%")
    rig.turns()
    rig.store.write(push, Push(device=rig.fleet.names[0], plan="another", decided_by="operator"))
    rig.turns()
    assert rig.states() == "saaaaa"


def test_a_device_that_lost_the_model_before_its_wave_is_left_out(rig: Rig) -> None:
    add_version(rig.store, rig.store.data_dir, "other", "one")
    rig.store.write(add_plan, "another", small_plan(rig.store, "other"), "sequential")
    rig.begin(waves="1,100%")
    rig.turns()
    rig.store.write(push, Push(device=rig.fleet.names[3], plan="another", decided_by="operator"))
    rig.decide(0)
    assert rig.states() == "daasaa"
    assert rig.store.read(rollout_devices, "r")[3].reason == "it should not run relu any more"


def own_plans(rig: Rig) -> None:
    """Each device runs a plan of its own."""
    first = decode_plan(rig.store.read(plan_info, "first").wire)
    for number, name in enumerate(rig.fleet.names, 1):
        plan = replace(first, max_skips=first.max_skips + number)
        rig.store.write(add_plan, f"own-{number}", plan, "sequential")
        rig.store.write(push, Push(device=name, plan=f"own-{number}", decided_by="operator"))
    rig.fleet.report(rig.fleet.names, DeviceState.COMMITTED)


def test_devices_with_plans_of_their_own_need_not_wait_for_each_other(rig: Rig) -> None:
    own_plans(rig)
    rig.begin(waves="100%")
    rig.turns(2)
    assert (rig.states(), rig.versions()) == ("aaaaaa", "222222")


class SlowClock(ManualClock):
    """0.15 s pass between two looks at it."""

    def monotonic_s(self) -> float:
        self.advance(0.15)
        return super().monotonic_s()


def test_a_rollout_that_makes_many_plans_leaves_time_for_others(rig: Rig) -> None:
    own_plans(rig)
    rig.service = RolloutService(rig.store, rig.fleet, rig.pool, SlowClock())
    rig.begin(waves="100%")
    rig.turns(1)
    assert rig.states() == "aawwww"


def test_searches_for_many_plans_begin_one_a_turn(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3, operators=7)
    own_plans(rig)
    rig.begin(waves="100%")
    begun = []
    for _ in range(4):
        rig.turns(1)
        begun.append(len(rig.pool.asked))
    assert begun == [1, 2, 3, 3]


def test_a_turn_decodes_no_plan_that_was_looked_at_before(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.begin(waves="1,100%")
    rig.turns()
    decoded: list[bytes] = []

    def decode(wire: bytes) -> Plan:
        decoded.append(wire)
        return decode_plan(wire)

    monkeypatch.setattr(rollout_turns, "decode_plan", decode)
    rig.turns()
    assert decoded == []


def test_a_device_that_has_the_version_is_done_at_once(rig: Rig) -> None:
    rig.begin(waves="1,100%")
    rig.turns()
    rig.decide(0)
    rig.decide(*range(1, 6))
    rig.begin(rollout="again", waves="1,100%")
    rig.turns(6)
    assert {info.rollout: (info.state, info.done) for info in rig.store.read(rollout_infos)} == {
        "r": (RolloutState.COMPLETED, 6),
        "again": (RolloutState.COMPLETED, 6),
    }


def push_canary(rig: Rig, device: DeviceId, state: DeviceState, *, says: bool = False) -> None:
    """An operator pushes a plan with version 2 of which the device says how far it is, and that it runs."""
    first = decode_plan(rig.store.read(plan_info, "first").wire)
    plan = replace(first, models=tuple(replace(one, artifact=rig.new) for one in first.models))
    rig.store.write(add_plan, "canary", plan, "sequential")
    rig.store.write(push, Push(device=device, plan="canary", decided_by="operator"))
    rig.fleet.report([device], state, "slow", active=plan.digest if says else None)


@pytest.mark.parametrize("end", [DeviceState.COMMITTED, DeviceState.ROLLED_BACK])
@pytest.mark.parametrize("state", [DeviceState.RECEIVED, DeviceState.TRIAL, DeviceState.PROBATION])
def test_a_device_that_an_operator_gave_the_version_is_done_once_it_keeps_it_and_else_goes_back(
    rig: Rig, state: DeviceState, end: DeviceState
) -> None:
    device = rig.fleet.names[0]
    push_canary(rig, device, state, says=state is DeviceState.PROBATION)
    pushed = rig.fleet.wanted(device)
    rig.begin(waves="1,100%")
    rig.turns()
    assert (rig.states(), rig.fleet.wanted(device)) == ("awwwww", pushed)
    rig.decide(0, state=end)
    kept = end is DeviceState.COMMITTED
    assert (rig.states(), rig.versions()) == (("daaaaa", "222222") if kept else ("fwwwww", "111111"))


def test_a_device_that_refused_the_version_before_and_runs_nothing_that_is_known_counts_as_failed(
    rig: Rig,
) -> None:
    device = enrol(rig.store, DeviceId("c00"), 99)
    rig.fleet.up.add(device)
    push_canary(rig, device, DeviceState.REJECTED)
    rig.begin(waves="1,100%")
    rig.turns()
    assert (rig.info.state, rig.states(), rig.versions()) == (RolloutState.STOPPED, "fwwwwww", "111111")
    assert rig.store.read(rollout_devices, "r")[0].reason == "rejected: slow"


def test_a_device_that_kept_the_version_and_is_asked_for_a_measurement_is_not_given_it_again(
    rig: Rig,
) -> None:
    device = rig.fleet.names[0]
    push_canary(rig, device, DeviceState.COMMITTED)
    rig.store.write(request_profile, device, ["relu"])
    rig.begin(waves="1,100%")
    rig.turns()
    assert rig.states() == "awwwww"
    _, changed = rig.store.write(abort_rollout, "r", rollback=True)
    assert (changed, rig.versions()) == ((), "211111")


def test_a_version_that_does_not_fit_the_plan_is_searched_and_others_do_not_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2, operators=7)
    rig.begin(waves="1,100%")
    rig.turns()
    assert (rig.states(), len(rig.pool.asked)) == ("ww", 1)
    rig.pool.run()
    rig.turns()
    assert (rig.states(), rig.versions()) == ("aw", "21")
    rig.decide(0)
    assert (rig.states(), rig.pool.asked) == ("da", [])


def runs_on_two_cores(rig: Rig, scheduler: str, schedule: StageSchedule | None = None) -> Plan:
    """A plan of a lane per core, of the model in two blocks, that the only device should run and does."""
    choice = ModelChoice(name="relu", artifact=rig.fleet.old, graph=rig.store.graph(rig.fleet.old))
    plan = arranged_plan([choice], Arrangement(2, 1, (2,), (ExecutorOptions(),)), [0, 1])
    if schedule is not None:
        plan = replace(plan, combined=tuple(replace(one, schedule=schedule) for one in plan.combined))
    (device,) = rig.fleet.names
    rig.store.write(add_plan, "own", plan, scheduler)
    rig.store.write(push, Push(device=device, plan="own", decided_by="operator"))
    rig.fleet.report([device], DeviceState.COMMITTED)
    return plan


@pytest.mark.parametrize(
    ("scheduler", "schedule"),
    [
        ("auto", None),
        ("arranged", None),
        pytest.param("maddpg", StageSchedule((Stage(((0, 1),)),)), id="schedules that no scheduler makes"),
    ],
)
def test_a_version_with_other_operators_is_planned_for_devices_whose_plan_names_no_scheduler(
    tmp_path: Path, scheduler: str, schedule: StageSchedule | None
) -> None:
    rig = Rig(tmp_path, 1, operators=7)
    before = runs_on_two_cores(rig, scheduler, schedule)
    rig.begin(waves="100%")
    rig.turns()
    rig.pool.run()
    rig.turns()
    assert (rig.states(), rig.versions()) == ("a", "2")
    plan = decode_plan(rig.fleet.wanted(rig.fleet.names[0]).plan)
    assert (plan.models[0].num_blocks, plan.models[0].replicas) == (2, 2)
    assert (plan.lanes, plan.resources, plan.step_choice) == (2, before.resources, before.step_choice)


def test_another_model_of_the_plan_keeps_its_version_though_it_has_a_newer_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1, operators=7)
    other = add_version(rig.store, tmp_path, "other", "one")
    choices = [
        ModelChoice(name=name, artifact=artifact, graph=rig.store.graph(artifact))
        for name, artifact in (("relu", rig.fleet.old), ("other", other))
    ]
    rig.store.write(add_plan, "both", compose(choices), "auto")
    rig.store.write(push, Push(device=rig.fleet.names[0], plan="both", decided_by="operator"))
    rig.fleet.report(rig.fleet.names, DeviceState.COMMITTED)
    add_version(rig.store, tmp_path, "other", "two", 9)
    rig.begin(waves="100%")
    rig.turns()
    rig.pool.run()
    rig.turns()
    plan = decode_plan(rig.fleet.wanted(rig.fleet.names[0]).plan)
    assert [one.artifact for one in plan.models] == [rig.new, other]


def test_a_version_in_more_blocks_runs_all_of_them_where_the_first_one_ran() -> None:
    graph = replace(chain("relu", 4), base_cuts=(1, 2), partitions=(("whole", ()), ("base", (1, 2))))
    options = ModelOptions(model="relu", partition="base", executors=(1, 0), resources=((1,), (0,)))
    before = ModelPlan(name="relu", artifact=digest_bytes([b"one"]), cuts=(2,))
    made = _as_version(options, before, "relu@2", graph)
    assert (made.model, made.partition, made.cuts) == ("relu@2", "base", ())
    assert (made.executors, made.resources) == ((1,), ((1,),))


def test_a_plan_that_was_searched_is_kept_as_of_its_scheduler_so_that_the_next_version_can_be_searched_too(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, 1, operators=7)
    rig.begin(waves="100%")
    rig.turns()
    rig.pool.run()
    rig.turns()
    made = rig.store.read(rollout_devices, "r")[0].new_plan
    assert made is not None and rig.store.read(plan_info, made).scheduler == "sequential"


@pytest.mark.parametrize("error", [UnavailableError("a search process ended with code -9"), KeyError("x")])
def test_a_search_that_fails_again_and_again_is_given_up_with_the_reason(
    tmp_path: Path, error: Exception
) -> None:
    rig = Rig(tmp_path, 2, operators=7)
    rig.begin(waves="1,100%")
    for _ in range(3):
        rig.turns()
        ((future, _),) = rig.pool.asked
        future.fail(error)
        rig.pool.asked.clear()
    rig.turns()
    assert rig.pool.asked == [] and rig.info.state is RolloutState.STOPPED
    assert rig.states()[0] == "f"
    assert "3 searches failed" in rig.store.read(rollout_devices, "r")[0].reason


def test_selected_devices_that_should_not_run_the_model_are_left_out(rig: Rig) -> None:
    for name in rig.fleet.names[:2]:
        rig.store.write(change_labels, name, LabelChanges({"site": "a"}, ()))
    add_version(rig.store, rig.store.data_dir, "other", "one")
    assert rig.begin(label=("site=a",)).devices == 2
    with pytest.raises(InputError, match="no device with site=b"):
        rig.begin(label=("site=b",), rollout="none")
    with pytest.raises(InputError, match="should run model 'other'"):
        rig.begin("other", rollout="none")


def test_rollouts_that_ended_long_ago_are_deleted(rig: Rig) -> None:
    rig.begin()
    rig.store.write(abort_rollout, "r", rollback=False)
    rig.begin(rollout="live")
    rig.store.write(advance_clock, 0.0)
    for _ in range(20):
        rig.fleet.clock.advance(3600.0)
        rig.store.write(advance_clock, 3600.0)
    list(tidy(rig.store, Retention(rows_s=60.0, minutes_s=600.0, hours_s=7200.0)))
    assert [info.rollout for info in rig.store.read(rollout_infos)] == ["live"]
    assert small_plan(rig.store).digest


def test_closing_does_not_wait_for_a_search(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2, operators=7)
    rig.begin(waves="100%")
    rig.service.start()
    until(lambda: rig.pool.asked)
    began_s = time.monotonic()
    rig.service.close()
    ((future, _),) = rig.pool.asked
    assert future.cancelled() and time.monotonic() - began_s < 4.0


def test_a_rollout_whose_plan_cannot_be_made_keeps_no_other_from_its_turn(rig: Rig, tmp_path: Path) -> None:
    for at, name in enumerate(rig.fleet.names):
        rig.store.write(change_labels, name, LabelChanges({"site": "ab"[at % 2]}, ()))
    add_version(rig.store, tmp_path, "relu", "three", 7)
    rig.begin("relu@3", label=("site=a",), waves="100%", rollout="broken")
    rig.begin("relu@2", label=("site=b",), waves="100%")

    def broken(function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        raise RuntimeError("no pool")

    rig.pool.submit = broken  # type: ignore[method-assign]
    rig.turns()
    assert rig.states() == "aaa"
    assert rig.store.read(rollout_info, "broken").waiting == 3


def test_a_version_for_which_nothing_can_be_planned_counts_as_failed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3, operators=7)
    rig.begin(waves="2,100%", max_failed=1)
    rig.turns()
    ((future, _),) = rig.pool.asked
    future.fail(PlanError("no schedule is legal"))
    rig.turns()
    assert (rig.info.state, rig.states(), rig.versions()) == (RolloutState.STOPPED, "ffw", "111")
    assert "no plan with the version in place of first: no schedule is legal" in (
        rig.store.read(rollout_devices, "r")[0].reason
    )


def test_rollouts_and_their_devices_are_told_in_pages(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.begin(rollout=name)
        rig.store.write(abort_rollout, name, rollback=False)
    first = rig.store.read(rollout_infos, limit=2)
    second = rig.store.read(rollout_infos, after=first[-1].rollout)
    assert [info.rollout for info in (*first, *second)] == ["c", "b", "a"]
    devices = rig.store.read(rollout_devices, "a", limit=4)
    more = rig.store.read(rollout_devices, "a", after=devices[-1].device)
    assert [one.device for one in (*devices, *more)] == rig.fleet.names


@pytest.mark.promise("rollout-stops-by-itself")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_whatever_happens_a_device_should_run_the_version_that_its_state_says(rig: Rig, seed: int) -> None:
    """Verdicts, absences, pauses, aborts and restarts in any order, one rollout after another."""
    rng = Random(seed)
    fleet = rig.fleet
    for number in range(4):
        version, before = (2, "1") if rig.versions() == "111111" else (1, "2")
        rig.begin(
            f"relu@{version}",
            rollout=f"r{number}",
            waves=rng.choice(["1,50%,100%", "2,100%", "100%"]),
            max_failed=rng.randrange(3),
            reach_s=60.0,
        )
        for _ in range(25):
            _happen(rig, f"r{number}", rng)
            rig.service.turn()
            rig.service.turn()
            info = rig.store.read(rollout_info, f"r{number}")
            for one in rig.store.read(rollout_devices, f"r{number}"):
                new = one.state in (AskState.ASKED, AskState.DONE)
                expected = str(version) if new else before
                assert rig.versions()[fleet.names.index(one.device)] == expected, (one, info)
            assert info.asked == 0 or info.state in (RolloutState.RUNNING, RolloutState.PAUSED)
            if info.failed > info.max_failed:
                assert info.state in (RolloutState.STOPPED, RolloutState.ABORTED)
        if info.state is not RolloutState.COMPLETED or info.done < len(fleet.names):
            if info.state in (RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.STOPPED):
                rig.store.write(abort_rollout, f"r{number}", rollback=True)
            _even_out(rig)


_EVENTS = ("good", "bad", "leave", "return", "late", "pause", "resume", "restart", "abort")


def _happen(rig: Rig, name: str, rng: Random) -> None:
    info = rig.store.read(rollout_info, name)
    live = info.state in (RolloutState.RUNNING, RolloutState.PAUSED)
    asked = [one.device for one in rig.store.read(rollout_devices, name) if one.state is AskState.ASKED]
    event = rng.choice([*_EVENTS, "good", "good", "good"])
    if event in ("good", "bad") and asked:
        state = DeviceState.COMMITTED if event == "good" else DeviceState.ROLLED_BACK
        rig.fleet.report([rng.choice(asked)], state)
    elif event == "leave":
        rig.fleet.up.discard(rng.choice(rig.fleet.names))
    elif event == "return":
        rig.fleet.up.update(rig.fleet.names)
    elif event == "late":
        rig.fleet.clock.advance(61.0)
    elif event == "pause" and live:
        rig.store.write(pause_rollout, name)
    elif event == "resume" and live:
        rig.store.write(resume_rollout, name)
    elif event == "restart":
        rig.restart()
    elif event == "abort" and rng.random() < 0.2 and live:
        rig.store.write(abort_rollout, name, rollback=rng.random() < 0.5)


def _even_out(rig: Rig) -> None:
    """All devices should run version 1 again."""
    rig.fleet.up.update(rig.fleet.names)
    for name in rig.fleet.names:
        rig.store.write(push, Push(device=name, plan="first", decided_by="operator"))
