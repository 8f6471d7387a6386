"""Quotas of one device: token buckets in closed form, turns between devices, and what the core drops."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from zmq.utils import z85

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import FleetMember, single_rows
from stageloom.planner.dispatch.quotas import DEFAULT_QUOTAS, DeviceQuotas, Quota, Rate, TokenBucket
from stageloom.planner.dispatch.sockets import ZAP_DOMAIN, zap_reply
from stageloom.planner.dispatch.workers import FairQueue
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.control import Alarm, ArtifactNeed, Desired, LocalPlan

GOOD, BAD = DeviceId("good"), DeviceId("bad")
KEYS = {GOOD: "g" * 40, BAD: "b" * 40}
NEED = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)
DESIRED = Desired(epoch=1, generation=1, artifacts=(NEED,))
ALARM = Alarm(
    boot=1, number=1, at_us=5, cause="variance", value=1.0, threshold=0.1, plan=None, loads=(), samples=()
)


def core(**config: Any) -> DispatchCore:
    """Two devices with a session each."""
    members = [FleetMember(name, key, desired=DESIRED) for name, key in KEYS.items()]
    made = DispatchCore(members, epoch=1, config=DispatchConfig(**config))
    for name in KEYS:
        made.handle(said(name, hello()), 0.0)
    return made


def hello(connection: int = 1) -> control.Hello:
    return control.Hello(
        boot=1, connection=connection, agent_version="", device_class="", report=control.Report(generation=1)
    )


def said(name: DeviceId, message: control.ControlToPlanner) -> ev.ControlReceived:
    return ev.ControlReceived(name.encode(), KEYS[name], message)


def batch(name: DeviceId, boot: int, rows: tuple[bytes, ...] = (), first: int = 0) -> ev.TelemetryReceived:
    """A batch of these rows, numbered from `first` on, with a ledger of `boot`."""
    end = first + len(rows)
    ranges = (telemetry.RowRange(boot, first, end - 1),) if rows else ()
    ledgers = (telemetry.Ledger(boot, end, 0),)
    message = telemetry.TelemetryBatch(rows=rows, ranges=ranges, ledgers=ledgers)
    return ev.TelemetryReceived(name.encode(), KEYS[name], message)


def row(data: telemetry.RowData, at_us: int = 1_700_000_000_000_000) -> bytes:
    return telemetry.encode_row(telemetry.Row(at_us, data))


# -- buckets -------------------------------------------------------------------------------------------------


@pytest.mark.promise("device-floods-way-protocol")
@given(
    rate=st.builds(Rate, st.floats(0.01, 1e3), st.floats(1.0, 1e3)),
    steps=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1.0)), max_size=60),
)
def test_a_bucket_passes_at_most_its_burst_and_its_rate_over_any_time(
    rate: Rate, steps: list[tuple[float, float]]
) -> None:
    """Amounts are shares of the burst; every window between two of them is looked at."""
    bucket, now_s = TokenBucket(rate, 0.0), 0.0
    passed: list[tuple[float, float]] = []
    for wait_s, share in steps:
        now_s += wait_s
        if bucket.take(now_s, share * rate.burst):
            passed.append((now_s, share * rate.burst))
    for at, (from_s, _) in enumerate(passed):
        for to, (until_s, _) in enumerate(passed[at:], at + 1):
            amount = sum(one for _, one in passed[at:to])
            assert amount <= (rate.burst + rate.per_s * (until_s - from_s)) * (1 + 1e-9)


@pytest.mark.parametrize("per_s", [0.5, 2.0, 100.0])
def test_a_bucket_that_is_asked_all_the_time_passes_its_burst_and_then_its_rate(per_s: float) -> None:
    bucket, seconds = TokenBucket(Rate(per_s, 10.0), 0.0), 100
    passed = sum(bucket.take(at / 1_000) for at in range(seconds * 1_000))
    assert passed == pytest.approx(10 + per_s * seconds, abs=1)


def test_an_amount_above_the_burst_passes_a_full_bucket_and_is_paid_back() -> None:
    bucket = TokenBucket(Rate(1.0, 10.0), 0.0)
    assert bucket.take(0.0, 25.0)
    assert not bucket.take(24.9, 10.0) and bucket.take(25.0, 10.0)


def test_an_operator_is_told_of_a_device_once_a_minute_with_all_that_was_dropped() -> None:
    quotas = DeviceQuotas({one: Rate(0.001, 1.0) for one in Quota})
    assert [quotas.take(Quota.ALARMS, 0.0) for _ in range(4)] == [True, False, False, False]
    quotas.take(Quota.HELLOS, 0.0)
    quotas.take(Quota.HELLOS, 0.0)
    assert quotas.excess(0.1) == "alarms 3, hellos 1"
    quotas.take(Quota.ALARMS, 0.2)
    assert quotas.excess(59.0) == ""
    assert quotas.excess(60.2) == "alarms 1"
    assert quotas.excess(200.0) == ""


# -- turns ---------------------------------------------------------------------------------------------------

OWNERS = st.sampled_from("abcd")


@given(st.lists(st.one_of(OWNERS, st.none()), max_size=200))
def test_the_fair_queue_gives_every_item_once_in_its_owners_order_and_is_never_idle(
    does: list[str | None],
) -> None:
    """None takes, a name puts; work conserving: it is empty only if all that was put was taken."""
    queue: FairQueue[str, tuple[str, int]] = FairQueue()
    put, taken = Counter[str](), Counter[str]()
    for owner in does:
        assert bool(queue) == (put.total() > taken.total())
        if owner is not None:
            queue.put(owner, (owner, put[owner]))
            put[owner] += 1
        elif queue:
            name, number = queue.take()
            assert number == taken[name]
            taken[name] += 1
        else:
            with pytest.raises(KeyError):
                queue.take()


@pytest.mark.promise("device-floods-way-protocol")
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 30), min_size=1))
def test_an_item_waits_for_one_item_of_each_other_owner_per_item_before_it(waiting: dict[str, int]) -> None:
    """No starvation: the k-th item of an owner (from 0) leaves after at most (k + 1) * owners items."""
    queue: FairQueue[str, tuple[str, int]] = FairQueue()
    for owner, count in waiting.items():
        for number in range(count):
            queue.put(owner, (owner, number))
    for at in range(sum(waiting.values())):
        _, number = queue.take()
        assert at < (number + 1) * len(waiting)
    assert not queue


def test_one_item_of_a_quiet_owner_is_next_but_one_behind_a_thousand_of_another() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for _ in range(1_000):
        queue.put("bad", "bad")
    queue.put("good", "good")
    assert [queue.take(), queue.take()] == ["bad", "good"]


def test_a_newest_item_takes_the_place_and_the_turn_of_its_owners_older_ones() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.put_newest("a", 1)
    queue.put_newest("b", 2)
    queue.put_newest("a", 3)
    assert [queue.take(), queue.take()] == [3, 2] and not queue


# -- the core ------------------------------------------------------------------------------------------------


def test_a_flood_of_alarms_reaches_the_store_up_to_the_quota_and_the_good_devices_alarm_does_too() -> None:
    made = core()
    flood = [made.handle(said(BAD, structs.replace(ALARM, number=number)), 1.0) for number in range(1, 5_001)]
    assert sum(map(len, flood)) == DEFAULT_QUOTAS[Quota.ALARMS].burst
    assert made.handle(said(GOOD, ALARM), 1.0) == [ev.StoreAlarm(GOOD, ALARM)]
    notes = [one for one in made.handle(ev.Tick(), 1.1) if isinstance(one, ev.NoteExcess)]
    assert notes == [ev.NoteExcess(BAD, "alarms 4940")]


def test_a_repeat_of_an_alarm_that_waits_for_its_commit_costs_nothing() -> None:
    made = core()
    made.handle(said(GOOD, ALARM), 1.0)
    for _ in range(1_000):
        assert made.handle(said(GOOD, ALARM), 1.0) == []
    assert made.counts["beyond_quota"] == 0


def test_empty_batches_open_as_many_books_as_the_quota_says_and_no_more() -> None:
    made = core()
    taken = 0
    for boot in range(1, 10_000):
        for action in made.handle(batch(BAD, boot), 1.0):
            assert isinstance(action, ev.AppendTelemetry)
            taken += 1
            made.handle(ev.TelemetryCommitted(action.ticket), 1.0)
    assert taken == DEFAULT_QUOTAS[Quota.LEDGERS].burst
    assert made.handle(batch(GOOD, 1), 1.0), "another device has its own"
    assert made.handle(batch(BAD, 4_096), 1.0), "a boot that it has told of is free"


@pytest.mark.promise("device-floods-way-protocol")
def test_what_waits_for_the_store_is_bounded_in_bytes_for_each_device() -> None:
    made = core(device_queue_bytes=10_000)
    body = row(telemetry.Event("e", "x" * 500))
    waiting = 0
    for boot in range(1, 100):
        waiting += len(made.handle(batch(BAD, boot, (body,) * 4), 1.0))
    assert 0 < waiting * 4 * len(body) <= 10_000
    assert made.handle(batch(GOOD, 1, (body,) * 100), 1.0), "alone a message waits whatever its size"


def test_what_was_answered_waits_no_longer() -> None:
    made = core(device_queue_bytes=1)
    local = LocalPlan(
        boot=1,
        epoch=1,
        generation=1,
        local_counter=1,
        plan_digest=NEED.digest,
        plan=b"p",
        artifacts=(),
        cause="variance",
    )
    assert made.handle(said(BAD, ALARM), 1.0) == [ev.StoreAlarm(BAD, ALARM)]
    assert made.handle(said(BAD, local), 1.0) == []
    made.handle(ev.AlarmStored(BAD, ALARM), 1.0)
    assert made.handle(said(BAD, local), 1.0) == [ev.AdoptLocal(BAD, local)]
    made.handle(ev.LocalSettled(BAD, local), 1.0)
    assert made.handle(said(BAD, ALARM), 1.0) == [ev.StoreAlarm(BAD, ALARM)]


@pytest.mark.promise("device-floods-way-protocol")
def test_a_device_with_a_full_spool_of_a_day_offline_loses_nothing_and_gets_all_of_it_in() -> None:
    """It sends a batch as soon as the one before is acknowledged, and one that is dropped 10 s later."""
    made, now_s, sent = core(), 0.0, 0
    body = row(telemetry.QueueSample("model", 3, 4, 5))
    batches = (64 << 20) // (512 * len(body))
    while sent < batches:
        actions = made.handle(batch(GOOD, 1, (body,) * 512, 512 * sent), now_s)
        if not actions:
            now_s += 10.0
            continue
        (append,) = actions
        assert isinstance(append, ev.AppendTelemetry)
        now_s += 0.05
        made.handle(ev.TelemetryCommitted(append.ticket), now_s)
        sent += 1
    assert now_s <= 1_500.0


@pytest.mark.parametrize(
    ("lane", "quota"),
    [
        (ev.Lane.CONTROL, Quota.CONTROL),
        (ev.Lane.TELEMETRY, Quota.BATCHES),
        (ev.Lane.BULK, Quota.CHUNKS),
    ],
)
def test_messages_of_each_socket_are_counted_before_they_are_decoded(lane: ev.Lane, quota: Quota) -> None:
    made = core()
    assert sum(made.may_read(lane, KEYS[BAD], 1.0) for _ in range(20_000)) == DEFAULT_QUOTAS[quota].burst
    assert made.may_read(lane, KEYS[GOOD], 1.0)


def test_connections_that_stand_although_their_key_is_out_share_one_small_quota() -> None:
    made = core()
    read = sum(made.may_read(ev.Lane.CONTROL, f"{number:040d}", 0.0) for number in range(1_000))
    assert read == 100
    assert made.may_read(ev.Lane.CONTROL, KEYS[GOOD], 0.0)


def test_hellos_reports_and_local_plans_beyond_their_quotas_are_dropped_and_a_heartbeat_is_answered() -> None:
    made = core()
    for connection in range(2, 200):
        made.handle(said(BAD, hello(connection)), 1.0)
    for revision in range(1, 1_000):
        report = control.Report(revision=revision, generation=1)
        made.handle(said(BAD, control.Reported(boot=1, report=report)), 1.0)
    (note,) = (one for one in made.handle(ev.Tick(), 1.1) if isinstance(one, ev.NoteExcess))
    assert note.device == BAD and "reports 799" in note.text and "hellos" in note.text
    beat = control.Heartbeat(boot=1, epoch=1, generation=1, state=None, revision=0)
    assert any(isinstance(one, ev.Send) for one in made.handle(said(BAD, beat), 1.2))


def test_a_device_that_claims_newer_generations_over_and_over_begins_a_bounded_number() -> None:
    made = core()
    begun = 0
    for claimed in range(2, 1_000):
        report = control.Report(revision=claimed, epoch=1, generation=claimed)
        beat = control.Heartbeat(boot=1, epoch=1, generation=claimed, state=None, revision=claimed)
        events: list[ev.Event] = [said(BAD, control.Reported(boot=1, report=report)), said(BAD, beat)]
        while events:
            for action in made.handle(events.pop(0), float(claimed)):
                if isinstance(action, ev.Reissue):
                    begun += 1
                    events.insert(0, ev.ReissueFailed(BAD))
                elif isinstance(action, ev.ReadDesired):
                    events.append(ev.DesiredRead(BAD, None))
    rate = DEFAULT_QUOTAS[Quota.GENERATIONS]
    assert rate.burst <= begun <= rate.burst + rate.per_s * 1_000


def test_a_good_transfer_never_meets_the_quota_of_chunks() -> None:
    """500 MB/s in chunks of 256 KiB, four at a time, for ten seconds."""
    made = core()
    for number in range(20_000):
        now_s = number / 2_000
        assert made.may_read(ev.Lane.BULK, KEYS[GOOD], now_s)
        ask = bulk.ChunkRequest(digest=NEED.digest, offset_bytes=number)
        (read,) = made.handle(ev.BulkReceived(b"r", KEYS[GOOD], ask), now_s)
        assert isinstance(read, ev.ReadChunk)
        made.handle(ev.ChunkRead(read.ticket, 8, b""), now_s)


# -- rows that cost more than others -------------------------------------------------------------------------

STATE = telemetry.StateChange(1, 1, control.DeviceState.COMMITTED, None, control.Origin.PLANNER)
PROFILE = telemetry.ProfileResult(1, NEED.digest, 1, "", (), True)
SAMPLE = telemetry.QueueSample("model", 3, 4, 5)


@pytest.mark.parametrize("at_us", [0, 0x7F, 0x80, 0xFFFF, 1 << 20, 1_700_000_000_000_000])
def test_rows_that_the_store_works_on_one_by_one_are_told_from_their_first_bytes(at_us: int) -> None:
    assert single_rows([row(STATE, at_us), row(SAMPLE, at_us), row(PROFILE, at_us)]) == 2


@pytest.mark.parametrize("time", [b"\xd3" + bytes(7) + b"\x05", b"\xcb" + bytes(8)])
def test_a_row_in_another_encoding_of_the_same_values_counts_as_one_of_them(time: bytes) -> None:
    plain = row(SAMPLE, 5)
    assert plain[:2] == b"\x92\x05"
    assert single_rows([plain[:1] + time + plain[2:]]) == 1


def test_bytes_that_are_no_row_are_kept_as_they_are_and_cost_little() -> None:
    assert single_rows([b"x", b"\x81\x01\x02", b"\xff" * 40]) == 0
    assert single_rows([b"\xdc\x00\x02" + row(STATE, 5)[1:], b"\x93" + row(STATE, 5)[1:] + b"\x00"]) == 2


@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_can_be_looked_at(body: bytes) -> None:
    assert single_rows([body]) in (0, 1)


# -- admission -----------------------------------------------------------------------------------------------


def test_a_key_that_connects_too_often_is_sent_away_for_a_while_and_not_refused() -> None:
    """300 is ZAP's temporary failure: the other end is told nothing and tries again by itself."""
    made, key = core(), KEYS[BAD]
    domain, credentials = ZAP_DOMAIN.encode(), z85.decode(key.encode())
    request = [b"1.0", b"1", domain, b"", b"", b"CURVE", credentials]
    codes = []
    for _ in range(200):
        answer = zap_reply(request, made.may_connect, lambda key: made.may_connect_now(key, 0.0))
        assert answer is not None
        codes.append(answer[2])
    allowed = int(DEFAULT_QUOTAS[Quota.CONNECTIONS].burst)
    assert codes == [b"200"] * allowed + [b"300"] * (200 - allowed)
