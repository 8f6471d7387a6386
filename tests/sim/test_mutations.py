"""Every promise that `watch` holds is broken on purpose, in a core, and must be found within a few worlds.

A check that cannot fail proves nothing. Each test names the defect in its title and the promise that notices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.probation import Probation
from stageloom.edge_agent.lifecycle.states import TRANSITIONS, VERDICTS, LinkState, TransitionCause
from stageloom.edge_agent.link.spool import Account, Spool
from stageloom.edge_agent.store import StateFile
from stageloom.planner.dispatch import events as pev
from stageloom.planner.dispatch.core import DispatchCore
from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.shared.durable_file import write_synced
from stageloom.shared.engine.trial import TrialCore
from stageloom.shared.engine.windows import WindowFigures
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import telemetry
from stageloom.shared.messages.control import Desired, DeviceState
from tests.link.memory_store import MemoryStore
from tests.sim import world
from tests.sim.agent import SPOOL_BYTES
from tests.sim.faults import Faults
from tests.sim.library import Nature
from tests.sim.network import DOWN, UP
from tests.sim.test_situations import in_a_trial, offline_for_days
from tests.sim.watch import Broken

pytestmark = pytest.mark.promise("simulated-worlds-find-planted")

WORLDS = 40


def first_broken(faults: Faults | None = None) -> str:
    """The first promise that a world breaks; fails the test if none does."""
    for seed in range(WORLDS):
        broken = outcome(seed, faults)
        if broken:
            return broken
    raise AssertionError(f"the defect went unnoticed in {WORLDS} worlds")


def outcome(seed: int, faults: Faults | None) -> str:
    """What one world breaks; nothing if it holds."""
    try:
        with world.world(seed, faults) as made:
            made.run()
    except Broken as broken:
        return str(broken)
    return ""


def replaced(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


# -- generations never fall ---------------------------------------------------------------------------------


def test_a_device_that_takes_an_older_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle._desired

    def gullible(self: Lifecycle, desired: Desired, now_s: float) -> list[Action]:
        known = self.state.desired
        if known is not None and desired.generation < known.generation:
            self.state = replaced(self.state, desired=replaced(known, epoch=0, generation=0))
        return honest(self, desired, now_s)

    monkeypatch.setattr(Lifecycle, "_desired", gullible)
    assert first_broken(Faults(delay_s=4.0, repeat=0.5)).startswith("generation:")


def test_a_store_that_numbers_a_generation_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: MemoryStore, device: DeviceId, desired: Desired) -> Desired:
        wanted = replaced(desired, epoch=1, generation=1)
        self.members[device] = dataclasses.replace(self.members[device], desired=wanted)
        return wanted  # type: ignore[no-any-return]

    monkeypatch.setattr(MemoryStore, "push", careless)
    assert first_broken().split(":")[0] in ("generation", "convergence", "committed")


def test_a_planner_whose_desired_generation_falls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = MemoryStore.record_reports

    def forgetful(self: MemoryStore, records: Sequence[ReportRecord]) -> None:
        honest(self, records)
        member = self.members[records[0].device]
        if member.desired is not None and member.desired.generation > 1:
            older = replaced(member.desired, generation=1)
            self.members[member.device] = dataclasses.replace(member, desired=older)

    monkeypatch.setattr(MemoryStore, "record_reports", forgetful)
    assert first_broken().startswith("generation: the planner desires")


# -- never two committed plans, never one that was refused --------------------------------------------------


@pytest.mark.more
def test_a_commit_without_a_look_at_the_tasks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probation, "task_ended", lambda self, outcome, reason: None)
    assert first_broken().startswith("committed: agent commits a plan that is")


def test_a_device_that_takes_another_plan_in_the_same_generation_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a database was restored, the planner may give a number out again."""
    honest = Lifecycle._desired

    def gullible(self: Lifecycle, desired: Desired, now_s: float) -> list[Action]:
        known = self.state.desired
        if known is not None and known.plan_digest != desired.plan_digest:
            if (known.epoch, known.generation) == (desired.epoch, desired.generation):
                self.state = replaced(self.state, desired=replaced(known, generation=known.generation - 1))
        return honest(self, desired, now_s)

    monkeypatch.setattr(Lifecycle, "_desired", gullible)
    with world.world(1, Faults()) as made:
        first, second = [plan for plan in made.plans if made.natures[plan.digest].sound][:2]
        made.begin()
        for plan in (first, second):
            made.push(plan)
            made.converge()
        made.network.cut((UP, DOWN), 60.0)
        held = made.agent.core.state.desired
        other = replaced(held, plan_digest=first.digest, plan=first.wire, artifacts=first.needs)
        made.agent.tell(link.Received(other))
        with pytest.raises(Broken, match=r"committed: two plans in \(1, 2\)"):
            made.until(made.now_s + 50.0)


def test_a_commit_that_forgets_last_known_good_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle._become

    def forgetful(self: Lifecycle, new: LinkState) -> list[Action]:
        if new.state is DeviceState.COMMITTED and new.last_good != self.state.last_good:
            new = replaced(new, last_good=self.state.last_good)
        return honest(self, new)

    monkeypatch.setattr(Lifecycle, "_become", forgetful)
    assert first_broken().startswith("committed:")


def test_a_verdict_that_a_restart_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle.boot

    def optimistic(self: Lifecycle, *arguments: Any) -> None:
        if self.state.state in VERDICTS:
            self.state = replaced(self.state, state=DeviceState.RECEIVED)
        honest(self, *arguments)

    monkeypatch.setattr(Lifecycle, "boot", optimistic)
    assert first_broken(Faults(agent_crash=0.02, engine_crash=0.1)).startswith("verdict:")


def test_a_rolled_back_device_that_reports_up_to_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle.report

    def boastful(self: Lifecycle) -> Any:
        report = honest(self)
        rolled_back = report.state is DeviceState.ROLLED_BACK
        return replaced(report, state=DeviceState.COMMITTED, active=report.seen) if rolled_back else report

    monkeypatch.setattr(Lifecycle, "report", boastful)
    monkeypatch.setattr(
        "tests.sim.watch.Watch._check_report", lambda self, agent: self._check_up_to_date(agent.core.report())
    )
    assert first_broken(Faults()).startswith("up-to-date:")


def test_a_report_that_is_not_the_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle.report
    monkeypatch.setattr(Lifecycle, "report", lambda self: replaced(honest(self), generation=0))
    assert first_broken().startswith("report:")


def test_a_plan_that_runs_before_its_record_is_on_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PlanManager.stage

    def eager(self: PlanManager, *arguments: Any) -> list[Action]:
        return honest(self, *arguments) + self.activate(*arguments)

    monkeypatch.setattr(PlanManager, "stage", eager)
    assert first_broken().startswith("record:")


def test_a_trial_that_a_restart_tries_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with world.world(1, Faults()) as made:
        in_a_trial(made)
        monkeypatch.setitem(
            TRANSITIONS, (DeviceState.TRIAL, TransitionCause.BOOT), (DeviceState.RECEIVED, None)
        )
        made.agent.crash()
        with pytest.raises(Broken, match="trial: agent found a trial at its start"):
            made.until(made.now_s + 5.0)


def test_a_trial_that_prefers_the_slower_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrialCore.window_ended

    def upside_down(self: TrialCore, window: int, figures: WindowFigures, now: float) -> Any:
        completed = tuple(max(1, 1000 - count) for count in figures.completed)
        return honest(self, window, dataclasses.replace(figures, completed=completed), now)

    monkeypatch.setattr(TrialCore, "window_ended", upside_down)
    with world.world(1, Faults()) as made:
        _, candidate = in_a_trial(made)
        made.natures[candidate.digest] = Nature(speed=0.7)
        with pytest.raises(Broken, match="prefers"):
            made.converge()


# -- produced = stored + dropped + spooled ------------------------------------------------------------------


def test_an_acknowledgement_before_the_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DispatchCore.handle

    def hasty(self: DispatchCore, event: pev.Event, now_s: float) -> list[pev.Action]:
        actions = honest(self, event, now_s)
        if isinstance(event, pev.TelemetryReceived):
            batch = event.message
            ack = telemetry.TelemetryAck(
                correlation=batch.correlation, ranges=batch.ranges, ledgers=batch.ledgers
            )
            actions.append(pev.Send(pev.Lane.TELEMETRY, event.route, ack))
        return actions

    monkeypatch.setattr(DispatchCore, "handle", hasty)
    assert first_broken(Faults(store=0.3, planner_crash=0.02)).startswith("books:")


def test_a_drop_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "drop", lambda self, first, end: None)
    assert first_broken().startswith("books:")


def test_a_ledger_that_tells_of_rows_still_to_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Account.ledger
    monkeypatch.setattr(Account, "ledger", lambda self, end=None: honest(self))
    assert first_broken(Faults(loss=0.3, cut=0.2)).startswith("books: the planner counts")


def test_a_spool_that_forgets_its_books_at_a_restart_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "_read_ledger", lambda self: ({}, ()))
    assert first_broken(Faults(agent_crash=0.02, disk=0.3)).split(":")[0] in ("books", "convergence")


def test_torn_rows_that_nobody_counts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "_count_torn", lambda self, accounts, found: None)
    assert first_broken(Faults(agent_crash=0.02, torn=1.0, disk=0.3, loss=0.3)).startswith("books:")


def test_a_spool_without_a_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "_make_room", lambda self, size_bytes: True)
    _, largest = offline_for_days(0, 0.2)
    assert largest > SPOOL_BYTES + 4096


# -- the disk -----------------------------------------------------------------------------------------------


def test_a_state_file_written_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a previous copy a cut-off write loses everything."""

    def in_place(self: StateFile, body: bytes) -> None:
        from stageloom.edge_agent.store import _MAGIC, _checksum

        write_synced(self.path, _MAGIC + _checksum(body) + body)

    monkeypatch.setattr(StateFile, "save", in_place)
    assert first_broken(Faults(agent_crash=0.03, torn=1.0)).startswith("disk:")


# -- convergence --------------------------------------------------------------------------------------------


def test_a_desired_value_that_is_sent_once_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DispatchCore.handle
    sent: set[tuple[DispatchCore, int, int]] = set()

    def once(self: DispatchCore, event: pev.Event, now_s: float) -> list[pev.Action]:
        actions = []
        for action in honest(self, event, now_s):
            if isinstance(action, pev.Send) and isinstance(action.message, Desired):
                pair = (self, action.message.epoch, action.message.generation)
                if pair in sent:
                    continue
                sent.add(pair)
            actions.append(action)
        return actions

    monkeypatch.setattr(DispatchCore, "handle", once)
    assert first_broken(Faults(loss=0.4)).startswith("convergence: desired is")


def test_a_report_that_is_sent_once_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Lifecycle._reconcile

    def once(self: Lifecycle, now_s: float) -> list[Action]:
        session = self.session
        session._stored_revision = max(session._stored_revision, session._sent_revision)
        return honest(self, now_s)

    monkeypatch.setattr(Lifecycle, "_reconcile", once)
    assert first_broken(Faults(loss=0.4, store=0.3)).startswith("convergence: the planner has")


def test_a_planner_that_does_not_notice_its_older_database_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DispatchCore.handle

    def blind(self: DispatchCore, event: pev.Event, now_s: float) -> list[pev.Action]:
        return [a for a in honest(self, event, now_s) if not isinstance(a, pev.Reissue)]

    monkeypatch.setattr(DispatchCore, "handle", blind)
    assert first_broken(Faults(planner_crash=0.02, restore=1.0)).startswith("convergence: desired is")


def test_a_planner_that_believes_each_commit_that_is_said_to_have_failed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = DispatchCore.handle

    def certain(self: DispatchCore, event: pev.Event, now_s: float) -> list[pev.Action]:
        return [a for a in honest(self, event, now_s) if not isinstance(a, pev.ReadDesired)]

    monkeypatch.setattr(DispatchCore, "handle", certain)
    assert first_broken(Faults(store=0.5)).startswith("convergence: desired is")


def test_a_plan_that_runs_on_after_it_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanManager, "_target", _adopts_anything(PlanManager._target))
    assert first_broken().startswith("convergence:")


def _adopts_anything(honest: Callable[[PlanManager], Any]) -> Callable[[PlanManager], Any]:
    def target(self: PlanManager) -> Any:
        return self.active or honest(self)

    return target
