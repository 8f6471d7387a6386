"""Tokens, enrolment, revocation, reports, epochs."""

from collections.abc import Iterator

import pytest
from sqlalchemy import event

from stageloom.planner.dispatch.ports import DispatchStore, EnrolAttempt, EnrolRefused, ReportRecord
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import (
    DeviceNumbers,
    add_token,
    device_info,
    device_infos,
    device_numbers,
    enrol_device,
    note_heard,
    quarantine_device,
    revoke_device,
)
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.control import DeviceState, Origin, Report
from tests.store.helpers import NANO, add_model, enrol, key, small_plan, write_of

SECRET = digest_bytes([b"secret"])


def attempt(number: int = 1, device: str = "nano") -> EnrolAttempt:
    return EnrolAttempt(SECRET, key(number), DeviceId(device), "0.1.0", "cpu")


def report(revision: int, state: DeviceState = DeviceState.COMMITTED, generation: int = 1) -> Report:
    return Report(
        revision=revision,
        epoch=1,
        generation=generation,
        state=state,
        origin=Origin.PLANNER,
        reason="because",
    )


@pytest.fixture
def waiting(store: Store) -> Iterator[Store]:
    """A store that has given out one token, for an hour."""
    store.write(add_token, SECRET, None, 3600.0)
    yield store


def refusal(store: Store, tried: EnrolAttempt) -> RefusalCode:
    with pytest.raises(EnrolRefused) as caught:
        store.write(enrol_device, tried)
    return caught.value.code


def test_the_store_is_what_dispatch_asks_for(store: Store) -> None:
    port: DispatchStore = LinkStore(store)
    assert (port.epoch(), list(port.fleet())) == (1, [])


def test_a_token_enrols_one_key_and_repeats_its_answer(waiting: Store) -> None:
    assert waiting.write(enrol_device, attempt()) == NANO
    assert waiting.write(enrol_device, attempt()) == NANO
    assert refusal(waiting, attempt(2, "other")) is RefusalCode.TOKEN_USED
    assert [(m.device, m.public_key, m.revoked) for m in LinkStore(waiting).fleet()] == [
        (NANO, key(1), False)
    ]


def test_an_unknown_secret_is_refused(store: Store) -> None:
    assert refusal(store, attempt()) is RefusalCode.TOKEN_WRONG


def test_a_token_expires_at_its_time_and_not_before(waiting: Store, clock: ManualClock) -> None:
    clock.advance(3599.0)
    waiting.write(enrol_device, attempt())
    other = digest_bytes([b"other"])
    waiting.write(add_token, other, None, 10.0)
    clock.advance(10.0)
    assert refusal(waiting, EnrolAttempt(other, key(2), DeviceId("b"), "", "")) is RefusalCode.TOKEN_EXPIRED


def test_the_tokens_own_name_wins(store: Store) -> None:
    store.write(add_token, SECRET, DeviceId("shop-7"), 3600.0)
    assert store.write(enrol_device, attempt()) == "shop-7"


def test_a_name_in_use_and_a_key_in_use_are_refused(waiting: Store) -> None:
    enrol(waiting, NANO, 5)
    assert refusal(waiting, attempt(6)) is RefusalCode.NAME_TAKEN
    assert refusal(waiting, attempt(5, "another")) is RefusalCode.NAME_TAKEN
    with pytest.raises(InputError, match="enrolled already; choose another name"):
        waiting.write(add_token, digest_bytes([b"x"]), NANO, 1.0)
    assert waiting.write(enrol_device, attempt(7, "free")) == "free"  # a refusal does not use the token up


def test_a_quarantined_device_whose_key_was_taken_away_needs_nobody_any_more(store: Store) -> None:
    """An alert counts these; its remedy is to release or to revoke the device."""
    enrol(store, NANO, 1)
    store.write(quarantine_device, NANO, "a ledger of another device")
    assert store.read(device_numbers).quarantined == 1
    store.write(revoke_device, NANO)
    assert store.read(device_numbers) == DeviceNumbers(enrolled=1, revoked=1, quarantined=0)


def test_a_revoked_device_stays_known_and_its_name_can_join_with_a_new_key(store: Store) -> None:
    enrol(store, NANO, 1)
    store.write(revoke_device, NANO)
    store.write(revoke_device, NANO)
    assert [m.revoked for m in LinkStore(store).fleet()] == [True]
    store.write(add_token, SECRET, NANO, 3600.0)
    assert refusal(store, attempt(1)) is RefusalCode.REVOKED  # whoever has a copy of the old key stays out
    enrol(store, NANO, 2)
    assert [(m.public_key, m.revoked) for m in LinkStore(store).fleet()] == [(key(2), False)]
    with pytest.raises(InputError, match="no device 'ghost'"):
        store.write(revoke_device, DeviceId("ghost"))
    codes = [code for _, _, code, _ in store.read(newest_events)]
    assert codes == ["enrolled", "revoked", "enrolled"]


def test_a_used_token_answers_its_key_no_more_once_that_is_revoked(waiting: Store) -> None:
    """Nor once the name is another key's: it would take the name back from the device that has it now."""
    waiting.write(enrol_device, attempt(1))
    waiting.write(revoke_device, NANO)
    assert refusal(waiting, attempt(1)) is RefusalCode.REVOKED
    enrol(waiting, NANO, 2)
    assert refusal(waiting, attempt(1)) is RefusalCode.REVOKED
    assert [(m.public_key, m.revoked) for m in LinkStore(waiting).fleet()] == [(key(2), False)]


def test_reports_only_move_forward_and_the_history_follows(store: Store, tmp_path: object) -> None:
    enrol(store)
    add_model(store, store.data_dir)
    store.write(add_plan, "first", small_plan(store), "sequential")
    store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    LinkStore(store).record_reports([ReportRecord(NANO, 7, report(3, DeviceState.PROBATION))])
    LinkStore(store).record_reports([ReportRecord(NANO, 7, report(2, DeviceState.RECEIVED))])
    assert store.read(device_info, NANO).report.state is DeviceState.PROBATION
    LinkStore(store).record_reports(
        [ReportRecord(NANO, 8, report(1), agent_version="9.9", device_class="new class")]
    )
    info = store.read(device_info, NANO)
    assert (info.report.state, info.agent_version, info.device_class) == (
        DeviceState.COMMITTED,
        "9.9",
        "new class",
    )
    entry = store.read(generation_history, NANO)[0][0]
    assert (entry.state, entry.reason, entry.decided_by) == ("committed", "because", "operator")
    assert LinkStore(store).fleet()[0].boot == 8


def test_of_reports_in_one_commit_the_newest_stays_and_a_strangers_holds_up_nobody(store: Store) -> None:
    enrol(store)
    other = DeviceId("other")
    enrol(store, other, 2)
    LinkStore(store).record_reports([ReportRecord(other, 4, report(9))])
    LinkStore(store).record_reports(
        [
            ReportRecord(DeviceId("stranger"), 1, report(1)),
            ReportRecord(NANO, 7, report(1, DeviceState.RECEIVED)),
            ReportRecord(NANO, 7, report(3, DeviceState.PROBATION)),
            ReportRecord(NANO, 7, report(2, DeviceState.VERIFIED)),
            ReportRecord(other, 4, report(8, DeviceState.RECEIVED)),
        ]
    )
    first, second = store.read(device_info, NANO).report, store.read(device_info, other).report
    assert (first.revision, first.state) == (3, DeviceState.PROBATION)
    assert (second.revision, second.state) == (9, DeviceState.COMMITTED)
    assert [info.device for info in store.read(device_infos)] == [NANO, other]


def test_a_report_of_a_generation_never_given_out_makes_no_history(store: Store) -> None:
    enrol(store)
    LinkStore(store).record_reports([ReportRecord(NANO, 7, report(1, generation=55))])
    assert store.read(generation_history, NANO) == ([], 0)
    assert store.read(device_info, NANO).report.generation == 55


@pytest.mark.promise("restored-database-starts-new")
def test_a_restored_database_starts_an_epoch_above_what_a_device_reports(store: Store) -> None:
    enrol(store)
    add_model(store, store.data_dir)
    store.write(add_plan, "first", small_plan(store), "sequential")
    store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    desired = LinkStore(store).reissue(NANO, above_epoch=4, above_generation=17)
    assert (desired.epoch, desired.generation, LinkStore(store).epoch()) == (5, 18, 5)
    assert desired.plan_digest == store.read(plan_info, "first").digest
    again = LinkStore(store).reissue(NANO, above_epoch=4, above_generation=17)
    assert (again.epoch, again.generation) == (5, 19)
    assert store.read(generation_history, NANO)[0][0].decided_by == "restored"


def test_telemetry_says_when_a_device_was_heard_of_to_within_ten_seconds(
    store: Store, clock: ManualClock
) -> None:
    """What a planner that is killed leaves: the commits of telemetry, and nothing since."""
    enrol(store)
    LinkStore(store).record_reports([ReportRecord(NANO, 7, report(1))])
    came_us = clock.wall_us()
    clock.advance(9.0)
    LinkStore(store).append_telemetry([write_of(0, 9)])
    assert store.read(device_info, NANO).last_seen_us == came_us
    clock.advance(3600.0)
    LinkStore(store).append_telemetry([write_of(10, 19)])
    assert store.read(device_info, NANO).last_seen_us == clock.wall_us()


def test_devices_that_are_heard_of_are_noted_at_once_and_strangers_left_out(
    store: Store, clock: ManualClock
) -> None:
    enrol(store)
    enrol(store, DeviceId("other"), 2)
    clock.advance(1.0)
    store.write(note_heard, {NANO, DeviceId("stranger")})
    assert [info.last_seen_us for info in store.read(device_infos)] == [clock.wall_us(), 0]
    store.write(note_heard, set())


def test_telemetry_of_many_devices_takes_as_many_statements_as_that_of_one(store: Store) -> None:
    devices = [enrol(store, DeviceId(f"device-{at:02}"), at) for at in range(32)]
    counted: list[int] = []
    for first, some in ((0, devices), (1, devices), (2, devices[:1])):
        writes = [write_of(first, first, device=device) for device in some]
        statements: list[str] = []
        listener = ("before_cursor_execute", lambda *given, into=statements: into.append(given[2]))
        event.listen(store.database.engine, *listener)
        LinkStore(store).append_telemetry(writes)
        event.remove(store.database.engine, *listener)
        counted.append(len(statements))
    assert counted[1] == counted[2]
