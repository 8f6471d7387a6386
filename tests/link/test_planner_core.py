"""The planner's core, event by event."""

from typing import Any

import pytest
from msgspec import structs

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import FleetMember, telemetry_write
from stageloom.planner.dispatch.quotas import TokenBuckets
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import ArtifactNeed, Desired
from stageloom.shared.messages.telemetry import RowKind

A, KEY = DeviceId("a"), "a" * 40
NEED = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)


def core_with(desired: Desired | None = None, **config: Any) -> DispatchCore:
    return DispatchCore([FleetMember(A, KEY, desired=desired)], epoch=1, config=DispatchConfig(**config))


def desired(generation: int, *, epoch: int = 1) -> Desired:
    plan = b"%d" % generation
    return Desired(
        epoch=epoch, generation=generation, plan_digest=digest_bytes([plan]), plan=plan, artifacts=(NEED,)
    )


def hello(route: bytes = b"r", *, boot: int = 1, connection: int = 1, **report: Any) -> ev.ControlReceived:
    message = control.Hello(
        boot=boot, connection=connection, agent_version="", device_class="", report=control.Report(**report)
    )
    return ev.ControlReceived(route, KEY, message)


def beat(generation: int, *, route: bytes = b"r", boot: int = 1) -> ev.ControlReceived:
    message = control.Heartbeat(boot=boot, epoch=1, generation=generation, state=None, revision=0)
    return ev.ControlReceived(route, KEY, message)


def sent(actions: list[ev.Action]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, ev.Send)]


def code(actions: list[ev.Action]) -> RefusalCode:
    (message,) = sent(actions)
    assert isinstance(message, Refused)
    return message.code


def test_a_device_that_is_behind_gets_the_desired_value_until_it_has_it() -> None:
    core = core_with(desired(3))
    assert desired(3) in sent(core.handle(hello(), 0.0))
    assert desired(3) not in sent(core.handle(beat(0), 1.0)), "it may still be on its way"
    assert desired(3) in sent(core.handle(beat(0), 2.5))
    assert desired(3) not in sent(core.handle(beat(3), 9.0))


def test_a_push_reaches_a_connected_device_at_once() -> None:
    core = core_with()
    core.handle(hello(), 0.0)
    assert sent(core.handle(ev.DesiredChanged(A, desired(1)), 0.1)) == [desired(1)]
    assert sent(core.handle(ev.DesiredChanged(A, desired(2)), 0.2)) == [desired(2)]
    assert core.handle(ev.DesiredChanged(A, desired(1)), 0.3) == [], "generations never fall"


def test_a_report_is_acknowledged_only_once_it_is_stored() -> None:
    core = core_with()
    actions = core.handle(hello(revision=4), 0.0)
    assert any(isinstance(action, ev.StoreReport) for action in actions)
    assert not any(isinstance(message, control.ReportedAck) for message in sent(actions))
    assert core.handle(ev.ReportStored(A, 4, ok=False), 0.1) == []
    again = ev.ControlReceived(b"r", KEY, control.Reported(boot=1, report=control.Report(revision=4)))
    assert any(isinstance(action, ev.StoreReport) for action in core.handle(again, 1.0))
    assert sent(core.handle(ev.ReportStored(A, 4), 1.1)) == [control.ReportedAck(revision=4)]
    assert sent(core.handle(again, 2.0)) == [control.ReportedAck(revision=4)], "a repeat costs no write"


def test_a_revision_counted_again_after_a_lost_disk_is_not_acknowledged_by_what_was_stored_before() -> None:
    """The copy before the newest state was used at boot, and the count came to the same number again."""
    core = core_with(desired(3))
    core.handle(hello(revision=4, reason="before"), 0.0)
    core.handle(ev.ReportStored(A, 4), 0.1)
    actions = core.handle(hello(b"s", boot=2, revision=4, reason="after"), 1.0)
    assert any(isinstance(action, ev.StoreReport) for action in actions)
    core.handle(ev.ReportStored(A, 4, ok=False), 1.1)
    (ack, *_) = sent(core.handle(beat(3, route=b"s", boot=2), 1.2))
    assert ack.revision < 4, "so the device reports again"


def test_a_device_ahead_of_the_database_starts_a_reissue_once() -> None:
    core = core_with(desired(3))
    assert ev.Reissue(A, 1, 8) in core.handle(hello(revision=1, epoch=1, generation=8), 0.0)
    assert not any(
        isinstance(action, ev.Reissue)
        for action in core.handle(hello(connection=2, revision=1, epoch=1, generation=8), 0.1)
    )
    assert sent(core.handle(ev.DesiredChanged(A, desired(9, epoch=2)), 0.2)) == [desired(9, epoch=2)]
    assert core.epoch == 2


@pytest.mark.promise("after-restore-generation-given")
def test_a_reissue_that_failed_is_asked_for_with_the_next_heartbeat_though_the_report_is_on_record() -> None:
    core = core_with(desired(3))
    core.handle(hello(revision=4, epoch=1, generation=8), 0.0)
    core.handle(ev.ReissueFailed(A), 0.1)
    core.handle(ev.ReportStored(A, 4), 0.1)
    assert ev.ReadDesired(A) in core.handle(beat(8), 1.0), "it may have taken place"
    assert ev.Reissue(A, 1, 8) in core.handle(ev.DesiredRead(A, desired(3)), 1.1)
    assert ev.Reissue(A, 1, 8) not in core.handle(beat(8), 2.0), "one at a time"
    core.handle(ev.DesiredChanged(A, desired(9, epoch=2)), 2.5)
    assert ev.Reissue(A, 1, 8) not in core.handle(beat(8), 3.0)


def test_a_reissue_that_is_said_to_have_failed_and_did_not_is_not_asked_for_again() -> None:
    core = core_with(desired(3))
    core.handle(hello(revision=4, epoch=1, generation=8), 0.0)
    core.handle(ev.ReissueFailed(A), 0.1)
    core.handle(beat(8), 1.0)
    assert core.handle(ev.DesiredRead(A, desired(9, epoch=2)), 1.1) == [
        ev.Send(ev.Lane.CONTROL, b"r", desired(9, epoch=2))
    ]
    assert core.epoch == 2


@pytest.mark.parametrize("devices", [(A,), ()])
def test_what_a_failed_push_may_have_desired_is_read_until_it_is_known(devices: tuple[DeviceId, ...]) -> None:
    core = core_with(desired(1))
    core.handle(hello(), 0.0)
    core.handle(beat(1), 0.1)
    assert core.handle(ev.DesiredInDoubt(devices), 0.2) == []
    assert ev.ReadDesired(A) in core.handle(beat(1), 1.0)
    assert ev.ReadDesired(A) not in core.handle(beat(1), 2.0), "one at a time"
    assert core.handle(ev.DesiredRead(A, None, ok=False), 2.1) == []
    assert ev.ReadDesired(A) in core.handle(beat(1), 3.0)
    core.handle(ev.DesiredInDoubt(devices), 3.1)
    assert sent(core.handle(ev.DesiredRead(A, desired(2)), 3.2)) == [desired(2)]
    assert ev.ReadDesired(A) in core.handle(beat(2), 4.0), "the second failed after the first was read"
    assert core.handle(ev.DesiredRead(A, desired(2)), 4.1) == []
    assert ev.ReadDesired(A) not in core.handle(beat(2), 5.0)


def test_the_same_generation_with_another_plan_is_a_restored_database_too() -> None:
    core = core_with(desired(3))
    actions = core.handle(hello(epoch=1, generation=3, seen=digest_bytes([b"lost"])), 0.0)
    assert ev.Reissue(A, 1, 3) in actions


@pytest.mark.promise("after-restore-generation-given")
def test_the_same_generation_with_another_activation_or_autonomy_is_a_restored_database_too() -> None:
    others: list[dict[str, Any]] = [
        {"activation": control.Activation.NOW},
        {"autonomy": control.Autonomy.FULL},
    ]
    for other in others:
        core = core_with(desired(3))
        same: dict[str, Any] = {"epoch": 1, "generation": 3, "seen": desired(3).plan_digest}
        assert ev.Reissue(A, 1, 3) not in core.handle(hello(**same), 0.0)
        assert ev.Reissue(A, 1, 3) in core.handle(hello(connection=2, revision=1, **same, **other), 0.1)


def test_a_late_hello_of_the_same_boot_does_not_supersede() -> None:
    core = core_with()
    core.handle(hello(b"new", connection=2), 0.0)
    assert core.handle(hello(b"old", connection=1), 0.1) == []
    assert isinstance(sent(core.handle(beat(0, route=b"new"), 0.2))[0], control.HeartbeatAck)
    assert code(core.handle(beat(0, route=b"old"), 0.3)) is RefusalCode.HELLO_FIRST


def test_a_silent_or_unreachable_device_is_gone_and_says_hello_first() -> None:
    for gone in (ev.Tick(), ev.Unreachable(ev.Lane.CONTROL, b"r")):
        core = core_with()
        core.handle(hello(), 0.0)
        assert core.handle(gone, 4.1) == [ev.PresenceChanged(A, False)]
        assert code(core.handle(beat(0), 5.0)) is RefusalCode.HELLO_FIRST


def test_nothing_is_sent_to_a_revoked_device_but_refusals() -> None:
    core = core_with(desired(1))
    core.handle(hello(revision=4), 0.0)
    batch = telemetry.TelemetryBatch(rows=(b"x",), ranges=(telemetry.RowRange(1, 0, 0),), ledgers=())
    (append,) = core.handle(ev.TelemetryReceived(b"t", KEY, batch), 0.1)
    (read,) = core.handle(
        ev.BulkReceived(b"b", KEY, bulk.ChunkRequest(digest=NEED.digest, offset_bytes=0)), 0.1
    )
    assert isinstance(append, ev.AppendTelemetry) and isinstance(read, ev.ReadChunk)
    assert code(core.handle(ev.Revoked(A), 0.2)) is RefusalCode.REVOKED
    assert core.handle(ev.TelemetryCommitted(append.ticket), 0.3) == []
    assert core.handle(ev.ChunkRead(read.ticket, 8, b"artifact"), 0.3) == []
    assert core.handle(ev.ReportStored(A, 4), 0.3) == []
    assert core.handle(ev.DesiredChanged(A, desired(2)), 0.3) == []
    assert code(core.handle(beat(1), 0.4)) is RefusalCode.REVOKED
    assert not core.may_connect(KEY)


def test_a_batch_whose_ranges_do_not_number_its_rows_is_malformed() -> None:
    core = core_with()
    for ranges in ((), ((1, 0, 1),), ((1, 5, 4), (1, 0, 1)), ((1, 0, 0), (1, 1, 1))):
        batch = telemetry.TelemetryBatch(
            rows=(b"x",), ranges=tuple(telemetry.RowRange(*one) for one in ranges), ledgers=()
        )
        assert code(core.handle(ev.TelemetryReceived(b"t", KEY, batch), 0.0)) is RefusalCode.MALFORMED
    assert core.backlog_rows == 0


def offer(core: DispatchCore, first: int, last: int) -> list[ev.Action]:
    """A batch of the rows of these numbers comes."""
    rows = (b"x",) * (last - first + 1)
    batch = telemetry.TelemetryBatch(rows=rows, ranges=(telemetry.RowRange(1, first, last),), ledgers=())
    return core.handle(ev.TelemetryReceived(b"t", KEY, batch), 0.0)


def test_a_repeated_batch_is_written_once_and_a_backlog_is_bounded() -> None:
    core = core_with(backlog_rows=3)
    (append,) = offer(core, 0, 1)
    assert offer(core, 0, 1) == []
    assert code(offer(core, 2, 3)) is RefusalCode.BUSY
    assert isinstance(append, ev.AppendTelemetry)
    assert isinstance(sent(core.handle(ev.TelemetryCommitted(append.ticket), 0.1))[0], telemetry.TelemetryAck)
    assert isinstance(offer(core, 2, 3)[0], ev.AppendTelemetry)


def test_batches_that_the_store_did_not_take_are_counted_until_it_takes_one_and_in_all() -> None:
    core, told = core_with(), []
    for number, ok in enumerate((False, False, True, False)):
        (append,) = offer(core, number, number)
        assert isinstance(append, ev.AppendTelemetry)
        core.handle(ev.TelemetryCommitted(append.ticket, ok), 0.1)
        told.append(core.telemetry_failures)
    assert told == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_a_batch_larger_than_the_backlog_may_be_is_taken_in_alone() -> None:
    """1. 512 rows are taken in at a limit of 3. 2. Another batch waits. 3. After the commit it comes, too."""
    core = core_with(backlog_rows=3)
    (append,) = offer(core, 0, telemetry.MAX_BATCH_ROWS - 1)
    assert isinstance(append, ev.AppendTelemetry)
    assert code(offer(core, 600, 600)) is RefusalCode.BUSY
    assert isinstance(sent(core.handle(ev.TelemetryCommitted(append.ticket), 0.1))[0], telemetry.TelemetryAck)
    assert isinstance(offer(core, 600, 600)[0], ev.AppendTelemetry)


def test_chunks_are_served_within_credits_and_only_of_what_is_desired() -> None:
    core = core_with(desired(1), bulk_credits=2)
    ask = ev.BulkReceived(b"b", KEY, bulk.ChunkRequest(digest=NEED.digest, offset_bytes=0))
    first, _ = (core.handle(ask, 0.0)[0] for _ in range(2))
    assert code(core.handle(ask, 0.0)) is RefusalCode.BUSY
    assert isinstance(first, ev.ReadChunk)
    assert sent(core.handle(ev.ChunkRead(first.ticket, 8, b"artifact"), 0.1))[0].data == b"artifact"
    assert isinstance(core.handle(ask, 0.2)[0], ev.ReadChunk)
    other = bulk.ChunkRequest(digest=digest_bytes([b"someone else's"]), offset_bytes=0)
    assert code(core.handle(ev.BulkReceived(b"b", KEY, other), 0.3)) is RefusalCode.NOT_FOUND


def test_chunks_of_a_life_before_do_not_lift_the_credits_of_the_next() -> None:
    """1. A chunk is being read. 2. The device is revoked and joins again. 3. The old chunk comes: the new key
    has its credits and not one more."""
    core = core_with(desired(1), bulk_credits=1)
    request = bulk.ChunkRequest(digest=NEED.digest, offset_bytes=0)
    (old,) = core.handle(ev.BulkReceived(b"b", KEY, request), 0.0)
    core.handle(ev.Revoked(A), 0.1)
    assert isinstance(old, ev.ReadChunk)
    assert core.handle(ev.Joined(A, "n" * 40), 0.2) == []
    assert core.handle(ev.ChunkRead(old.ticket, 8, b"artifact"), 0.4) == []
    again = ev.BulkReceived(b"b", "n" * 40, request)
    assert isinstance(core.handle(again, 0.5)[0], ev.ReadChunk)
    assert code(core.handle(again, 0.6)) is RefusalCode.BUSY


def test_a_revoked_device_that_joins_again_is_known_by_its_new_key_and_gets_what_it_was_to_run() -> None:
    core = core_with(desired(3))
    core.handle(ev.Revoked(A), 0.0)
    core.handle(ev.Joined(A, "n" * 40), 0.1)
    assert core.may_connect("n" * 40) and not core.may_connect(KEY)
    again = ev.ControlReceived(b"r", "n" * 40, hello(boot=2).message)
    assert desired(3) in sent(core.handle(again, 0.2))


def test_token_buckets_refill_and_forget_the_quiet() -> None:
    buckets = TokenBuckets(per_s=1.0, burst=2)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0), "another address has its own"
    assert [buckets.take("a", 1.0) for _ in range(2)] == [True, False]
    for at in range(10_000):
        buckets.take(str(at), 2.0)
    assert len(buckets._buckets) <= 4096


def test_a_row_that_cannot_be_read_costs_only_itself() -> None:
    """An agent of a later version sends a kind that this planner does not know."""
    known = telemetry.encode_row(telemetry.Row(5, telemetry.Event("e")))
    unknown = bytes([0x92, 0x05, 0x92, 0x63, 0x01])  # [5, [99, 1]]
    batch = telemetry.TelemetryBatch(
        rows=(unknown, known),
        ranges=(telemetry.RowRange(7, 3, 3), telemetry.RowRange(8, 0, 0)),
        ledgers=(),
    )
    first, second = telemetry_write(A, batch).rows
    assert (first.kind, first.body, first.boot, first.sequence) == (RowKind.UNREADABLE, unknown, 7, 3)
    assert (second.kind, second.at_us, second.boot, second.sequence) == (RowKind.EVENT, 5, 8, 0)


def test_a_hello_of_another_class_is_stored_though_its_report_is_on_record() -> None:
    """1. A report is stored. 2. The same hello again stores nothing. 3. The device's power mode changes."""
    core = core_with()

    def stored(device_class: str) -> list[str]:
        said = hello(revision=1)
        event = ev.ControlReceived(b"r", KEY, structs.replace(said.message, device_class=device_class))
        found = [one.record for one in core.handle(event, 0.0) if isinstance(one, ev.StoreReport)]
        for record in found:
            core.handle(ev.ReportStored(A, record.report.revision, True), 0.0)
        return [record.device_class for record in found]

    assert stored("a card") == ["a card"]
    assert stored("a card") == []
    assert stored("a card, 15 W") == ["a card, 15 W"]
