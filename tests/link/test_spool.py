"""The telemetry spool on its own: books that balance, a bound that holds, crashes and full disks."""

import errno
import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.edge_agent.link.spool import Account, Spool, add_range, decode_books, encode_books
from stageloom.planner.telemetry import TelemetryAccount
from stageloom.shared.clock import ManualClock
from stageloom.shared.messages.telemetry import MAX_BATCH_BYTES, MAX_ROW_BYTES, TelemetryAck, TelemetryBatch
from tests.sim.world import scratch


def _ack(batch: TelemetryBatch) -> TelemetryAck:
    return TelemetryAck(ranges=batch.ranges, ledgers=batch.ledgers)


def _balanced(spool: Spool) -> None:
    counts = spool.counts()
    assert counts.produced == counts.acknowledged + counts.dropped + counts.spooled
    assert counts.acknowledged >= 0


def _drain(spool: Spool) -> list[bytes]:
    rows: list[bytes] = []
    while (batch := spool.next_batch(1)) is not None:
        rows += batch.rows
        spool.acknowledge(_ack(batch))
        _balanced(spool)
    return rows


def test_rows_come_out_in_order_and_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    rows = [b"%d" % at for at in range(2000)]
    assert spool.append(rows[:1500]) == 1500 and spool.append(rows[1500:]) == 500
    assert _drain(spool) == rows
    assert spool.counts().acknowledged == 2000 and spool.next_batch(1) is None
    spool.close()


def test_a_batch_that_its_bytes_end_inside_a_file_takes_nothing_of_the_next_one(tmp_path: Path) -> None:
    """The planner takes a row that comes after later ones of its boot for a repeat."""
    spool = Spool(tmp_path, boot=7)
    large = [b"%04d" % at + bytes(MAX_ROW_BYTES - 4) for at in range(MAX_BATCH_BYTES // MAX_ROW_BYTES + 8)]
    rows = [*large, b"small" * 2]
    for file in (large, [rows[-1]]):
        spool.append(file)
        spool._seal()
    assert len(list(tmp_path.glob("*.new"))) == 2
    account, stored = TelemetryAccount(), list[bytes]()
    while (batch := spool.next_batch(1)) is not None:
        came = [at for one in batch.ranges for at in range(one.first, one.last + 1)]
        account, new = account.take(came, batch.ledgers)
        stored += [row for at, row in zip(came, batch.rows, strict=True) if at in new]
        spool.acknowledge(_ack(batch))
    assert stored == rows and account.lost == 0
    spool.close()


def test_an_unanswered_batch_is_sent_again_with_the_same_numbers(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"a", b"b"])
    first = spool.next_batch(1)
    spool.append([b"c"])
    again = spool.next_batch(2)
    assert first is not None and again is not None
    assert first.rows == (b"a", b"b") and again.rows == (b"a", b"b", b"c")
    spool.acknowledge(_ack(first))
    spool.acknowledge(_ack(first))  # late and repeated
    assert _drain(spool) == [b"c"]
    spool.close()


@pytest.mark.promise("spool-bounded-drops-oldest")
def test_a_killed_agent_loses_no_row_and_sends_what_was_not_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"a", b"b"])
    assert spool.next_batch(1) is not None  # sent, the answer never came; kill -9 here
    revived = Spool(tmp_path, boot=8)
    revived.append([b"c"])
    batch = revived.next_batch(1)
    assert batch is not None and batch.rows == (b"a", b"b", b"c")
    assert [(one.boot, one.first, one.last) for one in batch.ranges] == [(7, 0, 1), (8, 0, 0)]
    revived.close()
    spool.close()


@pytest.mark.promise("spool-bounded-drops-oldest")
def test_a_torn_tail_was_never_produced(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"whole", b"torn"])
    spool.close()
    (segment,) = tmp_path.glob("*.new")
    segment.write_bytes(segment.read_bytes()[:-1])
    revived = Spool(tmp_path, boot=8)
    assert _drain(revived) == [b"whole"]
    assert revived.counts().dropped == 0


@pytest.mark.promise("spool-bounded-drops-oldest")
def test_the_bound_holds_and_the_oldest_rows_go_first(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7, limit_bytes=100_000)
    rows = [b"%06d" % at + bytes(94) for at in range(5000)]
    for at in range(0, 5000, 10):
        spool.append(rows[at : at + 10])
        _balanced(spool)
        assert sum(path.stat().st_size for path in tmp_path.glob("*-*")) <= 100_000
    kept = _drain(spool)
    assert kept == rows[-len(kept) :] and len(kept) > 700
    assert spool.counts().dropped == 5000 - len(kept)
    spool.close()


def test_rows_that_were_sent_are_never_dropped(tmp_path: Path) -> None:
    """1. A batch leaves. 2. The spool overflows. 3. The planner had committed the batch all along:
    had its rows been dropped meanwhile, they would be counted twice."""
    spool = Spool(tmp_path, boot=7, limit_bytes=20_000)
    spool.append([b"first"])
    batch = spool.next_batch(1)
    assert batch is not None
    for _ in range(300):
        spool.append([bytes(200)])
    assert spool.counts().dropped > 0
    spool.acknowledge(_ack(batch))
    assert spool.counts().acknowledged == 1
    _balanced(spool)
    spool.close()


@pytest.mark.promise("spool-bounded-drops-oldest")
def test_a_full_disk_drops_and_counts_and_recovers(tmp_path: Path) -> None:
    full = False

    def write(file: int, data: bytes) -> int:
        if full:
            os.write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return os.write(file, data)

    spool = Spool(tmp_path, boot=7, write=write)
    spool.append([b"before"])
    full = True
    assert spool.append([b"lost", b"lost"]) == 0
    full = False
    spool.append([b"after"])
    batch = spool.next_batch(1)
    assert batch is not None and batch.rows == (b"before", b"after")
    assert [(one.first, one.last) for one in batch.ranges] == [(0, 0), (3, 3)]
    assert [(one.produced, one.dropped) for one in batch.ledgers] == [(4, 2)]
    spool.close()


def test_rejected_rows_are_dropped_once_even_over_a_crash(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"poison", b"poison"])
    batch = spool.next_batch(1)
    assert batch is not None
    spool.reject(batch.ranges)
    spool.close()
    revived = Spool(tmp_path, boot=8)
    assert revived.counts().dropped == 2 and revived.counts().spooled == 0
    last = revived.next_batch(1)
    assert last is not None and last.rows == () and last.ledgers[0].dropped == 2
    revived.close()


def test_counts_never_fall_while_boots_before_are_closed(tmp_path: Path) -> None:
    """What watches them would take a fall for a restart, and count all of them again."""
    for boot in (7, 8):
        spool = Spool(tmp_path, boot=boot)
        spool.append([b"row"] * 10)
        spool.close()
    spool = Spool(tmp_path, boot=9)
    spool.append([b"row"] * 5)
    before = spool.counts()
    assert (before.produced, before.acknowledged) == (25, 0)
    _drain(spool)
    after = spool.counts()
    assert (after.produced, after.acknowledged, after.dropped, after.spooled) == (25, 25, 0, 0)
    assert len(spool.masks()) == 1, "the boots before are balanced and forgotten"
    spool.close()


def test_a_damaged_ledger_is_set_aside_and_the_rows_survive(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"a"])
    spool.close()
    (tmp_path / "ledger").write_bytes(b"garbage")
    revived = Spool(tmp_path, boot=8)
    assert (tmp_path / "ledger.bad").exists() and _drain(revived) == [b"a"]


def test_books_of_however_many_boots_are_read_again() -> None:
    """An agent that is started again and again without a planner has those of each start."""
    accounts = {boot: Account(boot, 9, dropped_ranges=[(0, 9)]) for boot in range(1, 10_000)}
    names = tuple(f"{boot:016x}-{0:016x}.new" for boot in accounts)
    assert decode_books(encode_books(accounts, names)) == (accounts, names)


def test_a_row_too_large_is_refused_with_all_that_came_with_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    for bad in (b"", bytes(MAX_ROW_BYTES + 1)):
        with pytest.raises(ValueError, match="a telemetry row has"):
            spool.append([b"good", bad])
    assert spool.counts().produced == 0


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_planners_books_balance_after_every_commit(seed: int) -> None:
    """Appends, overflows, lost and repeated acknowledgements, full disks and crashes in any order."""
    rng = Random(seed)
    with scratch() as folder:
        faulty = rng.random() < 0.5

        def write(file: int, data: bytes) -> int:
            if faulty and rng.random() < 0.3:
                raise OSError(28, "No space left on device")
            return os.write(file, data)

        boot, stored, told = 1, set[tuple[int, int]](), dict[int, tuple[int, int]]()
        spool = Spool(Path(folder), boot=boot, limit_bytes=16 << 10, write=write)
        for _ in range(120):
            what = rng.randrange(4)
            if what == 0:
                spool.append([bytes(rng.randint(1, 300)) for _ in range(rng.randint(1, 30))])
            elif what == 1 and (batch := spool.next_batch(1)) is not None:
                stored |= {(one.boot, at) for one in batch.ranges for at in range(one.first, one.last + 1)}
                for one in batch.ledgers:
                    told[one.boot] = max(told.get(one.boot, (0, 0)), (one.produced, one.dropped))
                if rng.random() < 0.6:
                    spool.acknowledge(_ack(batch))
                for at_boot, (produced, dropped) in told.items():
                    assert produced == dropped + sum(1 for b, at in stored if b == at_boot and at < produced)
            elif what == 2 and rng.random() < 0.2:
                spool.close()
                boot += 1
                spool = Spool(Path(folder), boot=boot, limit_bytes=16 << 10, write=write)
            _balanced(spool)
        spool.close()


@given(ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_dropped_ranges_are_a_set(ranges: list[tuple[int, int]]) -> None:
    account, plain = Account(1, produced=60), set[int]()
    for first, length in ranges:
        account.drop(first, first + length + 1)
        plain |= set(range(first, first + length + 1))
    assert account.dropped() == len(plain)
    assert account.dropped(20) == len([at for at in plain if at < 20])
    assert all(
        account.dropped_until(at) == next(n for n in range(at, 99) if n not in plain) for at in range(50)
    )
    assert add_range([], 3, 5) == [(3, 5)]


def test_rows_that_a_power_cut_took_are_dropped_where_the_ledger_vouches_for_them(tmp_path: Path) -> None:
    """They were never told to anybody.

    1. Rows lie in the spool, and the ledger has counted them.
    2. A power cut takes the last two.
    3. At the next start they count as dropped. The disk is full, so the ledger cannot say so, and nothing of
       the segment leaves.
    4. So they do at the starts after that, and what is left leaves.
    """
    spool = Spool(tmp_path, boot=1)
    spool.append([b"row"] * 4)
    spool._save()
    spool.close()
    (segment,) = tmp_path.glob("*.new")
    os.truncate(segment, segment.stat().st_size - 20)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for boot, write in ((2, full), (3, os.write), (4, os.write)):
        found = Spool(tmp_path, boot=boot, write=write)
        assert found.masks()[1] == (0b1111, 0b1100, 0b0011)
        batch = found.next_batch(1)
        assert (batch.rows if batch is not None else ()) == (() if write is full else (b"row",) * 2)
        found.close()


class Days(ManualClock):
    """A clock that a test winds on; the wall clock of a board without a battery starts in 1970."""

    def wind(self, seconds: float) -> None:
        self._monotonic_s += seconds
        self._wall_us += round(seconds * 1e6)

    def set_wall(self, wall_us: int) -> None:
        self._wall_us = wall_us


@pytest.mark.promise("telemetry-bounded-over-simulated")
def test_thirty_days_offline_keep_disk_and_age_bounded_and_the_books_balanced(tmp_path: Path) -> None:
    """1. No planner answers for thirty days; rows come every half hour; now and then the agent is killed.
    2. At every step produced = acknowledged + dropped + spooled, the disk is bounded, nothing is too old.
    3. The planner is back: it gets what is left, and the books are still balanced.
    """
    clock, rng, limit_bytes, limit_age_s = Days(), Random(3), 64 << 10, 4 * 86_400.0
    boot, days, per_day = 1, 30, 48
    born_s: dict[bytes, float] = {}

    def opened() -> Spool:
        return Spool(tmp_path, boot=boot, limit_bytes=limit_bytes, limit_age_s=limit_age_s, clock=clock)

    spool = opened()
    dropped_before = 0
    for step in range(days * per_day):
        clock.wind(86_400.0 / per_day)
        size = 1200 if 500 < step < 700 else 40  # a busy stretch in which bytes bind, else age does
        row = b"%08d" % step + rng.randbytes(size - 8)
        born_s[row] = clock.monotonic_s()
        assert spool.append([row]) == 1
        counts = spool.counts()
        _balanced(spool)
        assert counts.size_bytes <= limit_bytes and counts.dropped >= dropped_before
        dropped_before = counts.dropped
        if step % 300 == 299:
            spool.close()
            boot += 1
            spool = opened()
            _balanced(spool)
    assert spool.counts().produced == days * per_day
    left = _drain(spool)
    oldest_s = clock.monotonic_s() - min(born_s[row] for row in left)
    assert limit_age_s - 3600.0 <= oldest_s <= limit_age_s * (1 + 1 / 16) + 3600.0
    assert left == list(born_s)[-len(left) :], "none of the younger ones was lost"
    assert spool.counts().spooled == 0
    spool.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_wall_clock_that_is_set_years_ahead_drops_nothing(tmp_path: Path, restarts: bool) -> None:
    clock = Days(wall_us=0)
    spool = Spool(tmp_path, boot=1, limit_age_s=86_400.0, clock=clock)
    spool.append([b"before"])
    clock.set_wall(1_800_000_000_000_000)
    clock.wind(60.0)
    if restarts:
        (file,) = tmp_path.glob("*.new")
        os.utime(file, (0, 0))
        spool.close()
        spool = Spool(tmp_path, boot=2, limit_age_s=86_400.0, clock=clock)
    spool.append([b"after"])
    assert spool.counts().dropped == 0 and _drain(spool) == [b"before", b"after"]
    spool.close()


def test_rows_that_were_sent_are_not_dropped_for_their_age(tmp_path: Path) -> None:
    """The planner may hold them already: dropped here and stored there they would count twice."""
    clock = Days()
    spool = Spool(tmp_path, boot=1, limit_age_s=3600.0, clock=clock)
    spool.append([b"sent"])
    batch = spool.next_batch(1)
    assert batch is not None
    clock.wind(7200.0)
    spool.append([b"young"])
    assert spool.counts().dropped == 0
    spool.acknowledge(_ack(batch))
    assert _drain(spool) == [b"young"]
    assert spool.counts().acknowledged == 2
    spool.close()


def test_rows_whose_file_is_gone_are_dropped_and_the_later_ones_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Two lives leave a file each. 2. Both are removed under the agent, and the one that is open."""
    for boot in (1, 2):
        before = Spool(tmp_path, boot=boot)
        before.append([b"gone", b"gone too"])
        before.close()
    spool = Spool(tmp_path, boot=3)
    spool.append([b"open"])
    for path in tmp_path.glob("*.new"):
        path.unlink()
    batch = spool.next_batch(1)
    assert batch is not None and batch.rows == ()
    assert [(one.boot, one.produced, one.dropped) for one in batch.ledgers] == [
        (1, 2, 2),
        (2, 2, 2),
        (3, 1, 1),
    ]
    assert spool.counts().dropped == 5 and spool.counts().spooled == 0
    _balanced(spool)
    assert caplog.text.count("their file cannot be used") == 1
    spool.append([b"after"])
    assert _drain(spool) == [b"after"]
    spool.close()


def test_a_file_that_was_emptied_under_the_agent_holds_nothing_up(tmp_path: Path) -> None:
    spool = Spool(tmp_path, boot=7)
    spool.append([b"lost"])
    assert spool.next_batch(1) is not None
    (sent,) = tmp_path.glob("*.sent")
    sent.write_bytes(b"")
    spool.append([b"after"])
    assert _drain(spool) == [b"after"]
    assert spool.counts().dropped == 1
    spool.close()


def test_rows_wait_while_the_disk_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the mark nor the loss can be written: nothing leaves that might be counted twice."""

    def rename(path: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    spool = Spool(tmp_path, boot=7)
    spool.append([b"a", b"b"])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        batch = spool.next_batch(1)
        assert batch is None or batch.rows == ()
        assert spool.counts().spooled == 2
    assert _drain(spool) == [b"a", b"b"]
    spool.close()


def test_a_file_that_cannot_be_removed_costs_no_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    spool = Spool(tmp_path, boot=7)
    spool.append([b"a"])
    batch = spool.next_batch(1)
    assert batch is not None
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        spool.acknowledge(_ack(batch))
    assert spool.counts().acknowledged == 1
    _balanced(spool)
    spool.close()
