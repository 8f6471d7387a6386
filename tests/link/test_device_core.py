"""The device's core, event by event, without sockets, clocks or files."""

from typing import Any

import msgspec
import pytest

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.statefile import decode_state, encode_state, load_state, save_state
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.link import fetch as fetching
from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.trial import TrialRecord, TrialResult, Verdict
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import Digest
from stageloom.shared.messages import bulk, control
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import ArtifactNeed, Desired, DeviceState, Origin
from tests.link import orders

NEED = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)
GOOD = RunnablePlan(PlanRef(digest_bytes([b"good"]), Origin.PLANNER), b"good", ())


def desired(generation: int, plan: bytes = b"plan", *, epoch: int = 1, **fields: Any) -> Desired:
    return Desired(epoch=epoch, generation=generation, plan_digest=digest_bytes([plan]), plan=plan, **fields)


class Driver:
    """A core whose writes reach the disk unless `full`."""

    def __init__(self, state: LinkState | None = None, *, boot: bool = True) -> None:
        plans: Any = orders.RecordingPlans()
        self.core = Lifecycle(state or LinkState(), config=LinkConfig(boot=11), plans=plans)
        self.now_s = 0.0
        self.full = False
        self.disk = state or LinkState()
        if boot:
            self.booted = self.boot()

    def boot(self, present: frozenset[Digest] = frozenset()) -> list[Any]:
        self.core.boot("env", present, 0.0)
        return self.run()

    def run(self) -> list[Any]:
        actions: list[Any] = []
        while (action := self.core.next(self.now_s)) is not None:
            if isinstance(action, ev.Persist):
                if self.full:
                    self.core.persist_failed("disk full", self.now_s)
                    continue
                self.disk = action.state
                self.core.persisted(action.state)
            elif isinstance(action, ev.Hold):
                self.core.held(action.state)
            if not isinstance(action, ev.CollectArtifacts):
                actions.append(action)
        return actions

    def do(self, event: Any, *, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        orders.happen(self.core, event, self.now_s)
        return self.run()

    def online(self) -> "Driver":
        self.do(ev.Connected())
        welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
        self.do(ev.Received(welcome))
        return self

    def stored(self) -> DeviceState | None:
        """The state on disk."""
        return self.disk.state

    @property
    def state(self) -> DeviceState | None:
        return self.core.state.state

    def to_probation(self, generation: int = 1, plan: bytes = b"plan") -> list[ev.Action]:
        self.do(ev.Received(desired(generation, plan)))
        self.do(orders.PlanVerified((1, generation)))
        return self.do(ev.PlanStaged((1, generation)))


def kinds(actions: list[ev.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_plan_goes_from_received_to_committed() -> None:
    driver = Driver().online()
    assert "VerifyPlan" in kinds(driver.do(ev.Received(desired(1))))
    assert "StagePlan" in kinds(driver.do(orders.PlanVerified((1, 1))))
    actions = kinds(driver.do(ev.PlanStaged((1, 1))))
    assert actions.index("Persist") < actions.index("ActivatePlan"), "the record comes first"
    assert driver.state is DeviceState.PROBATION
    driver.do(orders.ProbationPassed((1, 1)))
    report = driver.core.report()
    assert (report.state, report.active, report.origin) == (
        DeviceState.COMMITTED,
        digest_bytes([b"plan"]),
        Origin.PLANNER,
    )


def test_a_missing_artifact_is_fetched_and_waited_for() -> None:
    driver = Driver().online()
    actions = driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    assert ev.FetchArtifact(NEED) in actions and driver.state is DeviceState.WAITING
    driver.do(ev.FetchFailed(NEED.digest, "no such artifact"))
    assert "no such artifact" in driver.core.report().reason
    assert ev.FetchArtifact(NEED) in driver.do(ev.TimePassed(), after_s=2.0), "asked for again"
    assert "VerifyPlan" in kinds(driver.do(ev.ArtifactPresent(NEED.digest)))


def test_an_artifact_that_is_damaged_after_the_check_is_fetched_again_before_the_plan_is_staged() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.ArtifactGone(NEED.digest))
    assert driver.state is DeviceState.WAITING
    assert "StagePlan" not in kinds(driver.do(orders.ManagerRestarted()))
    assert ev.FetchArtifact(NEED) in driver.do(ev.TimePassed(), after_s=2.0)
    assert "VerifyPlan" in kinds(driver.do(ev.ArtifactPresent(NEED.digest)))


@pytest.mark.promise("last-known-good-whose")
def test_last_known_good_whose_artifact_is_damaged_waits_for_it_and_is_committed_again() -> None:
    """1. A committed plan's artifact is found damaged at a start. 2. It is fetched. 3. The plan runs."""
    driver = Driver().online()
    driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.PlanStaged((1, 1)))
    driver.do(orders.ProbationPassed((1, 1)))
    again = Driver(driver.disk).online()
    again.do(ev.ArtifactGone(NEED.digest))
    actions = again.do(orders.RestoreFailed("missing or damaged artifacts"))
    assert again.state is DeviceState.WAITING and ev.FetchArtifact(NEED) in actions
    again.do(orders.ActiveChanged(None))
    assert "VerifyPlan" in kinds(again.do(ev.ArtifactPresent(NEED.digest)))
    again.do(orders.PlanVerified((1, 1)))
    assert "ActivatePlan" in kinds(again.do(ev.PlanStaged((1, 1))))
    again.do(orders.ProbationPassed((1, 1)))
    assert again.core.report().state is DeviceState.COMMITTED and again.core.report().active == digest_bytes(
        [b"plan"]
    )


@pytest.mark.promise("late-answer-revive-superseded")
def test_late_answers_do_not_revive_a_superseded_plan() -> None:
    driver = Driver().online()
    driver.to_probation(1)
    assert orders.AbandonPlan((1, 1)) in driver.do(ev.Received(desired(2, b"newer")))
    for late in (
        orders.ProbationPassed((1, 1)),
        orders.PlanVerified((1, 1)),
        orders.PlanFailed((1, 1), "slow"),
    ):
        driver.do(late)
        assert driver.state is DeviceState.RECEIVED and driver.core.state.last_good is None


@pytest.mark.parametrize(("epoch", "generation"), [(1, 4), (1, 5), (0, 9)])
def test_an_older_or_equal_generation_is_ignored_and_answered_with_a_report(
    epoch: int, generation: int
) -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(5)))
    before = driver.core.state
    actions = driver.do(ev.Received(desired(generation, b"other", epoch=epoch)))
    assert driver.core.state == before
    assert any(
        isinstance(one, ev.SendMessage) and isinstance(one.message, control.Reported) for one in actions
    )


def test_a_higher_epoch_supersedes_a_higher_generation() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(50)))
    driver.do(ev.Received(desired(1, b"restored", epoch=2)))
    assert (driver.core.report().epoch, driver.core.report().generation) == (2, 1)


@pytest.mark.promise("late-answer-revive-superseded")
def test_a_rolled_back_device_never_reports_up_to_date() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.to_probation()
    actions = driver.do(orders.PlanFailed((1, 1), "p99 is 30 % worse"))
    assert orders.RestorePlan(GOOD) in actions
    report = driver.core.report()
    assert report.state is DeviceState.ROLLED_BACK and report.active == GOOD.ref.digest != report.seen
    assert driver.do(ev.Received(desired(1))) == [], "the verdict is final for its generation"


def test_a_verdict_falls_with_the_environment_it_was_found_in() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanFailed((1, 1), "illegal"))
    assert driver.do(ev.EnvironmentChanged("env")) == [] and driver.state is DeviceState.REJECTED
    assert "VerifyPlan" in kinds(driver.do(ev.EnvironmentChanged("other power mode")))


AFTER_A_KILL = [
    (DeviceState.RECEIVED, 0, DeviceState.RECEIVED),
    (DeviceState.WAITING, 0, DeviceState.RECEIVED),
    (DeviceState.VERIFIED, 0, DeviceState.RECEIVED),
    (DeviceState.STAGED, 0, DeviceState.RECEIVED),
    (DeviceState.TRIAL, 0, DeviceState.REJECTED),
    (DeviceState.PROBATION, 0, DeviceState.RECEIVED),
    (DeviceState.PROBATION, 1, DeviceState.ROLLED_BACK),
    (DeviceState.COMMITTED, 0, DeviceState.COMMITTED),
    (DeviceState.REJECTED, 0, DeviceState.REJECTED),
    (DeviceState.NO_GAIN, 0, DeviceState.NO_GAIN),
    (DeviceState.ROLLED_BACK, 0, DeviceState.ROLLED_BACK),
]
"""Per state found at boot, with the boots under probation so far: the state that it becomes."""


@pytest.mark.promise("late-answer-revive-superseded")
@pytest.mark.parametrize(("found", "boots", "then"), AFTER_A_KILL)
def test_every_state_survives_a_kill(found: DeviceState, boots: int, then: DeviceState) -> None:
    state = LinkState(
        desired=desired(3), state=found, last_good=GOOD, probation_boots=boots, environment="env"
    )
    driver = Driver(decode_state(encode_state(state)))
    assert driver.booted[0] == orders.RestorePlan(GOOD), "it serves before anything else"
    assert driver.state is then
    assert driver.core.report().active == GOOD.ref.digest


@pytest.mark.promise("full-disk-boot-postpones")
@pytest.mark.parametrize(("found", "boots", "then"), AFTER_A_KILL)
def test_a_full_disk_at_boot_only_postpones_what_the_state_means(
    found: DeviceState, boots: int, then: DeviceState
) -> None:
    state = LinkState(
        desired=desired(3), state=found, last_good=GOOD, probation_boots=boots, environment="env"
    )
    driver = Driver(state, boot=False)
    driver.full = True
    booted = driver.boot()
    assert booted == [orders.RestorePlan(GOOD)], "it serves, and decides nothing that it cannot write down"
    assert driver.state is found
    assert driver.do(ev.TimePassed(), after_s=1.0) == [], "not again at once"
    driver.full = False
    driver.do(ev.TimePassed(), after_s=6.0)
    assert driver.state is then
    once = found is DeviceState.PROBATION and not boots
    assert driver.disk.probation_boots == (1 if once else boots), "a second stop would be the last"


def test_a_plan_that_is_committed_and_runs_is_not_swapped_for_itself() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    actions = driver.do(ev.Received(desired(7, b"good")))
    assert driver.state is DeviceState.COMMITTED and "VerifyPlan" not in kinds(actions)


def test_a_full_disk_changes_nothing_and_the_next_offer_is_taken() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    before = driver.core.state
    driver.full = True
    assert "VerifyPlan" not in kinds(driver.do(ev.Received(desired(1))))
    assert driver.core.state == before and driver.core.disk.error == "disk full"
    driver.full = False
    driver.do(ev.Received(desired(1)))
    assert driver.core.state == before, "not again at once"
    driver.now_s += 6
    assert "VerifyPlan" in kinds(driver.do(ev.Received(desired(1))))
    assert driver.core.disk.error is None


@pytest.mark.promise("late-answer-revive-superseded")
def test_a_plan_is_never_activated_if_its_record_cannot_be_written() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.full = True
    assert "ActivatePlan" not in kinds(driver.do(ev.PlanStaged((1, 1))))
    assert driver.stored() is DeviceState.RECEIVED and driver.state is DeviceState.STAGED
    driver.full = False
    actions = kinds(driver.do(ev.TimePassed(), after_s=6.0))
    assert actions.index("Persist") < actions.index("ActivatePlan"), "tried again"


@pytest.mark.promise("steps-start-would-undo")
def test_steps_that_a_start_would_undo_are_believed_and_reported_but_not_written() -> None:
    driver = Driver().online()
    assert kinds(driver.do(ev.Received(desired(1)))).count("Persist") == 1
    assert "Persist" not in kinds(driver.do(orders.PlanVerified((1, 1))))
    assert driver.core.report().state is DeviceState.VERIFIED
    assert driver.stored() is DeviceState.RECEIVED
    actions = driver.do(ev.PlanStaged((1, 1)))
    assert kinds(actions).count("Persist") == 1 and driver.stored() is DeviceState.PROBATION


@pytest.mark.promise("steps-start-would-undo")
def test_what_is_reported_counts_on_over_a_start_that_undoes_steps() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1, artifacts=(NEED,))))
    reported = 0
    for number in range(200):
        driver.do(ev.FetchFailed(NEED.digest, f"reason {number}"))
        reported = driver.core.report().revision
        again = Driver(driver.disk)
        assert again.core.report().revision > reported
        third = Driver(again.disk)
        assert third.core.report().revision > again.core.report().revision
    assert reported >= 200


def test_a_write_that_fails_after_a_step_that_is_not_written_leaves_what_was_reported() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    revision = driver.core.report().revision
    driver.full = True
    driver.do(orders.ActiveChanged(GOOD.ref))
    assert driver.core.report().revision == revision and driver.state is DeviceState.VERIFIED


def test_an_abandoned_trial_is_written_although_its_plan_is_only_verified_then() -> None:
    """On disk stands that a trial runs: a start would reject the plan for it."""
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.do(ev.Received(desired(1)))
    driver.do(orders.PlanVerified((1, 1)))
    driver.do(ev.PlanStaged((1, 1), control=GOOD.ref.digest))
    record = TrialRecord(
        candidate=digest_bytes([b"plan"]), control=GOOD.ref.digest, environment="env", began_us=1
    )
    driver.do(orders.TrialBegins((1, 1), record))
    assert driver.stored() is DeviceState.TRIAL
    ended = TrialResult(verdict=Verdict.ABANDONED, reason="the engine crashed")
    driver.do(orders.TrialDecided((1, 1), GOOD.ref.digest, ended))
    assert driver.stored() is DeviceState.VERIFIED


def test_a_fallback_during_a_full_disk_is_reported_once_the_disk_is_back() -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    driver.full = True
    driver.do(orders.ActiveChanged(None))
    driver.full = False
    driver.do(ev.TimePassed(), after_s=6.0)
    assert driver.core.report().active is None


def test_a_restarted_manager_is_asked_again() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    assert "VerifyPlan" not in kinds(driver.do(ev.TimePassed()))
    assert "VerifyPlan" in kinds(driver.do(orders.ManagerRestarted()))


def test_a_report_is_repeated_until_the_planner_has_it() -> None:
    driver = Driver().online()
    driver.do(ev.Received(desired(1)))
    revision = driver.core.report().revision

    def reports(actions: list[ev.Action]) -> int:
        return sum(
            isinstance(one, ev.SendMessage) and isinstance(one.message, control.Reported) for one in actions
        )

    assert sum(reports(driver.do(ev.TimePassed(), after_s=0.5)) for _ in range(8)) == 4
    driver.do(ev.Received(control.ReportedAck(revision=revision)))
    assert sum(reports(driver.do(ev.TimePassed(), after_s=0.5)) for _ in range(4)) == 0


def test_a_silent_planner_is_left() -> None:
    driver = Driver().online()
    assert "Reconnect" not in kinds(driver.do(ev.TimePassed(), after_s=3.9))
    assert "Reconnect" in kinds(driver.do(ev.TimePassed(), after_s=0.2))


@pytest.mark.parametrize("code", [RefusalCode.REVOKED, RefusalCode.QUARANTINED])
def test_a_refused_device_serves_on_and_asks_seldom(code: RefusalCode) -> None:
    driver = Driver(LinkState(last_good=GOOD)).online()
    (action,) = driver.do(ev.Received(Refused(code=code, reason="no")))
    assert isinstance(action, ev.Reconnect) and action.delay_s == 60.0
    assert driver.core.session.denied is not None and driver.core.report().active == GOOD.ref.digest


def test_a_profile_is_run_once_its_artifact_is_there_and_not_again_when_answered() -> None:
    request = control.ProfileRequest(3, NEED)
    driver = Driver().online()
    wanted = desired(1, profiles=(request,))
    assert ev.FetchArtifact(NEED) in driver.do(ev.Received(wanted))
    assert ev.RunProfile(request) in driver.do(ev.ArtifactPresent(NEED.digest))
    driver.do(ev.ProfileAnswered(3))
    again = Driver(driver.disk)
    again.core.handle(ev.ArtifactPresent(NEED.digest), 0.0)
    assert not any(isinstance(one, ev.RunProfile) for one in again.do(ev.TimePassed()))
    driver.do(ev.Received(desired(2)))
    assert driver.core.state.answered == (), "forgotten with the request"


# -- the state file -----------------------------------------------------------------------------------------


def test_the_state_file_round_trips_and_a_damaged_one_is_set_aside(tmp_path: Any) -> None:
    path = tmp_path / "link.state"
    assert load_state(path) == (LinkState(), None)
    state = LinkState(desired=desired(3, artifacts=(NEED,)), state=DeviceState.WAITING, last_good=GOOD)
    save_state(path, state)
    assert load_state(path) == (state, None)
    path.write_bytes(path.read_bytes()[:-7])
    loaded, problem = load_state(path)
    assert loaded == LinkState() and problem is not None and "set aside" in problem
    assert load_state(path) == (LinkState(), None), "no boot loop"


def test_the_largest_state_fits_its_file() -> None:
    blob = bytes(at * 7919 % 251 for at in range(96 << 10))
    needs = tuple(ArtifactNeed(f"m{at:063d}", digest_bytes([b"%d" % at]), 2**44) for at in range(64))
    wanted = desired(
        1, blob, artifacts=needs, profiles=tuple(control.ProfileRequest(at, needs[at]) for at in range(64))
    )
    plan = RunnablePlan(PlanRef(digest_bytes([b"x"]), Origin.LOCAL), blob, needs)
    state = LinkState(desired=wanted, last_good=plan, reason="r" * 512)
    assert decode_state(encode_state(state)) == state
    with pytest.raises(DecodeError):
        decode_state(b"\x00" + msgspec.msgpack.encode({"revision": -1}))


# -- fetching -----------------------------------------------------------------------------------------------


def _blob_need(size: int) -> tuple[bytes, ArtifactNeed]:
    blob = bytes(at % 251 for at in range(size))
    return blob, ArtifactNeed("m", digest_bytes([blob]), size)


def _answer(blob: bytes, ask: bulk.ChunkRequest) -> bulk.Chunk:
    data = blob[ask.offset_bytes : ask.offset_bytes + ask.length_bytes]
    return bulk.Chunk(
        correlation=ask.correlation,
        digest=ask.digest,
        offset_bytes=ask.offset_bytes,
        size_bytes=len(blob),
        data=data,
    )


@pytest.mark.parametrize("have", [0, 1, 10, 25, 99])
def test_a_fetch_resumes_where_the_partial_file_ends(have: int) -> None:
    blob, need = _blob_need(100)
    core = fetching.FetchCore(chunk_bytes=10)
    core.credits = 3
    part, asked, open_asks = blob[:have], 0, list(core.want(need, have, 0.0))
    while open_asks:
        ask = open_asks.pop()  # answered in reverse: chunks arrive out of order
        if isinstance(ask, fetching.Finish):
            continue
        assert isinstance(ask, bulk.ChunkRequest)
        asked += 1
        for action in core.received(_answer(blob, ask), 0.0):
            if isinstance(action, fetching.Write):
                assert action.offset_bytes == len(part)
                part += action.data
            else:
                open_asks.append(action)
    assert part == blob and asked == -(-(100 - have) // 10)


def test_no_more_requests_are_open_than_there_are_credits() -> None:
    core = fetching.FetchCore(chunk_bytes=10)
    core.credits = 3
    (_, first), (_, second) = _blob_need(100), _blob_need(90)
    assert len(core.want(first, 0, 0.0)) == 3
    assert core.want(second, 0, 0.0) == []


def test_a_lost_chunk_is_asked_for_again_and_a_late_one_does_no_harm() -> None:
    blob, need = _blob_need(20)
    core = fetching.FetchCore(chunk_bytes=20, again_after_s=5.0)
    (ask,) = core.want(need, 0, 0.0)
    assert core.tick(4.9) == []
    (again,) = core.tick(5.0)
    assert isinstance(ask, bulk.ChunkRequest) and isinstance(again, bulk.ChunkRequest)
    assert core.received(_answer(blob, ask), 5.1) == [], "its number is not open any more"
    assert [type(one) for one in core.received(_answer(blob, again), 5.2)] == [
        fetching.Write,
        fetching.Finish,
    ]


def test_an_artifact_of_another_size_is_given_up() -> None:
    blob, need = _blob_need(20)
    core = fetching.FetchCore()
    (ask,) = core.want(need, 0, 0.0)
    assert isinstance(ask, bulk.ChunkRequest)
    (action,) = core.received(msgspec.structs.replace(_answer(blob, ask), size_bytes=21), 0.0)
    assert isinstance(action, ev.FetchFailed)


def test_a_busy_planner_is_asked_again_and_a_missing_artifact_is_given_up() -> None:
    _, need = _blob_need(20)
    core = fetching.FetchCore(again_after_s=5.0)
    (ask,) = core.want(need, 0, 0.0)
    assert isinstance(ask, bulk.ChunkRequest)
    assert core.received(Refused(correlation=ask.correlation, code=RefusalCode.BUSY), 1.0) == []
    (again,) = core.tick(6.0)
    assert isinstance(again, bulk.ChunkRequest) and again.offset_bytes == 0
    gone = Refused(correlation=again.correlation, code=RefusalCode.NOT_FOUND, reason="no such artifact")
    assert core.received(gone, 7.0) == [ev.FetchFailed(need.digest, "no such artifact")]
