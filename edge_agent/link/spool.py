"""The telemetry spool: rows on disk until the planner has committed them, in bounded space and time.

Rows lie in segment files, one write per append (no sync: rows survive a killed process; a power cut may cost
the youngest, of which nobody was told). When the spool is full, or all rows of a segment are too old, the
oldest segment goes and its rows are counted as dropped. A segment of which rows were ever sent stays, because
the planner may hold them already; before the first of its rows leaves it is marked by its name and synced, or
a power cut could take rows that the planner has, and they would count as dropped. One batch is out at a time,
always the oldest rows.

The books, at all times and per boot: produced = acknowledged + dropped + spooled. They are kept in `ledger`,
written to a new file and renamed before a dropped segment is removed, and name it, so that a crash between
the two is finished at the next start and counted once. A row that cannot be written (disk full) is dropped,
and so is one that cannot be read again: no error of a file reaches whoever sends or takes rows.

Segment name `BOOT-FIRST.new|sent`: boot and first sequence in hexadecimal. Inside: records of (length,
CRC-32, row); a torn tail was never produced.
"""

import errno
import logging
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct as Layout
from typing import Annotated, Final

from msgspec import Meta, Struct, structs

from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.durable_file import sync_file
from stageloom.shared.errors import DecodeError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.messages.base import BootId, Count
from stageloom.shared.messages.telemetry import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_ROW_BYTES,
    Ledger,
    RowRange,
    TelemetryAck,
    TelemetryBatch,
)

log = logging.getLogger(__name__)

_HEAD: Final = Layout(">II")
_LEDGER: Final = "ledger"
_MAX_RANGES: Final = 60
_MAX_DROPPED: Final = 4096  # ranges per boot in the ledger file
_AGE_PARTS: Final = 16
"""A segment takes rows for so small a part of the greatest age: rows leave at most that much too late."""

_BATCH_ROW_BYTES: Final = MAX_BATCH_BYTES - (16 << 10)  # leaves room for ranges, ledgers and the envelope


def add_range(ranges: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The union of half-open ranges with [first, end), sorted and merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted([*ranges, (first, end)]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


class Account(Struct, array_like=True):
    """One boot, as the ledger file holds it.

    `produced` is the next sequence; `told` is what the planner has committed of these books.
    """

    boot: BootId
    produced: Count = 0
    told: tuple[Count, Count] = (0, 0)
    dropped_ranges: Annotated[list[tuple[Count, Count]], Meta(max_length=_MAX_DROPPED)] = []

    def dropped(self, end: int | None = None) -> int:
        """Dropped rows, or those with a sequence below `end`."""
        stop = self.produced if end is None else end
        return sum(max(min(high, stop) - low, 0) for low, high in self.dropped_ranges)

    def dropped_mask(self) -> int:
        """Dropped rows as a mask over sequences."""
        return sum((1 << high) - (1 << low) for low, high in self.dropped_ranges)

    def drop(self, first: int, end: int) -> None:
        """Count the rows [first, end) as dropped; once, however often it is said."""
        self.dropped_ranges = add_range(self.dropped_ranges, first, end)

    def dropped_until(self, first: int) -> int:
        """The first sequence from `first` on that is not dropped."""
        for low, high in self.dropped_ranges:
            if low <= first < high:
                return high
        return first

    def ledger(self, end: int | None = None) -> Ledger:
        """What to tell the planner once all rows below `end` have left; `end` None: they all have.

        Told like this, produced = stored + dropped holds in the planner's books after every commit, whatever
        is lost here afterwards.
        """
        produced = self.produced if end is None else end
        return Ledger(self.boot, produced, self.dropped(produced))


class _Books(Struct, frozen=True, tag="spool_ledger", tag_field="type"):
    entries: tuple[Account, ...]
    removing: tuple[str, ...]


# Far above what is ever written: books that the next start cannot read are lost.
_BOOKS: Codec[_Books] = Codec(
    _Books, CodecLimits(frame_bytes=64 << 20, body_bytes=64 << 20, array_items=1 << 22)
)


def encode_books(accounts: dict[int, Account], removing: tuple[str, ...]) -> bytes:
    """The ledger file: all accounts, and the segments that are about to be removed."""
    entries = tuple(
        structs.replace(account, dropped_ranges=account.dropped_ranges[-_MAX_DROPPED:])
        for account in accounts.values()
    )
    return _BOOKS.encode(_Books(entries, removing))


def decode_books(frame: bytes) -> tuple[dict[int, Account], tuple[str, ...]]:
    """What `encode_books` wrote.

    Raises:
        DecodeError: damaged.
    """
    books = _BOOKS.decode(frame)
    return {account.boot: account for account in books.entries}, books.removing


@dataclass
class _Segment:
    boot: int
    first: int
    sent: bool = False
    torn: bool = False  # a power cut took rows behind its own, and the ledger does not say so yet
    sizes: list[int] = field(default_factory=list)  # bytes of each row, in order
    size_bytes: int = 0
    acked: int = 0  # rows at the front that are done with
    opened_s: float = 0.0  # on the monotonic clock, which no one sets
    newest_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.boot:016x}-{self.first:016x}.{'sent' if self.sent else 'new'}"

    @property
    def end(self) -> int:
        return self.first + len(self.sizes)

    def add(self, rows: Sequence[bytes]) -> None:
        self.sizes += [len(row) for row in rows]
        self.size_bytes += sum(len(row) + _HEAD.size for row in rows)


@dataclass(frozen=True)
class SpoolCounts:
    """The books over all boots still open; produced = acknowledged + dropped + spooled."""

    produced: int
    acknowledged: int
    dropped: int
    spooled: int
    size_bytes: int


class Spool:
    """One folder, one owner. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        boot: int,
        limit_bytes: int = 16 << 20,
        limit_age_s: float = math.inf,
        clock: Clock | None = None,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """`write` is how bytes reach a file: tests put a full disk there.

        Ages are counted by the monotonic clock, so that a wall clock that is set late (a board without a
        battery) ages nothing; those of what an earlier boot left count from this start.

        Raises:
            OSError: the folder can be neither made nor read.
        """
        self.boot = boot
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._limit_age_s = limit_age_s
        self._clock = clock or SystemClock()
        self._segment_bytes = max(limit_bytes // 16, MAX_ROW_BYTES + _HEAD.size)
        self._write = write
        self._file: int | None = None
        self._unsaved_drops = False
        self._complained = False
        self._closed = (0, 0)  # rows produced and dropped of boots that were closed since the start
        folder.mkdir(parents=True, exist_ok=True)
        self._accounts, self._segments = self._recover()
        self._accounts.setdefault(boot, Account(boot))
        self._finish(())

    def close(self) -> None:
        """Let go of the open file; everything is on disk already."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def counts(self) -> SpoolCounts:
        """Rows produced, acknowledged, dropped and still here: of all boots that were open since the start.

        None of the first three ever falls: who watches them would take that for a restart.
        """
        produced = self._closed[0] + sum(one.produced for one in self._accounts.values())
        dropped = self._closed[1] + sum(one.dropped() for one in self._accounts.values())
        spooled = sum(len(one.sizes) - one.acked for one in self._segments)
        size_bytes = sum(one.size_bytes for one in self._segments)
        return SpoolCounts(produced, produced - dropped - spooled, dropped, spooled, size_bytes)

    def masks(self) -> dict[int, tuple[int, int, int]]:
        """Per boot that is still open, as masks over sequences: rows produced, dropped, spooled."""
        spooled = dict.fromkeys(self._accounts, 0)
        for one in self._segments:
            spooled[one.boot] |= (1 << one.end) - (1 << one.first + one.acked)
        return {
            boot: ((1 << account.produced) - 1, account.dropped_mask(), spooled[boot])
            for boot, account in self._accounts.items()
        }

    # -- rows in --------------------------------------------------------------------------------------------

    def append(self, rows: Sequence[bytes]) -> int:
        """Take rows in, in order; returns how many of them are kept. Never raises for a full disk.

        Raises:
            ValueError: a row is empty or larger than a row may be; none is taken in.
        """
        if any(not 0 < len(row) <= MAX_ROW_BYTES for row in rows):
            raise ValueError(f"a telemetry row has between 1 and {MAX_ROW_BYTES} bytes")
        kept = 0
        for chunk in _chunks(rows, self._segment_bytes):
            if self._store(chunk):
                kept += len(chunk)
            else:
                account = self._accounts[self.boot]
                account.drop(account.produced, account.produced + len(chunk))
                account.produced += len(chunk)
                self._unsaved_drops = True
                self._seal()
        return kept

    def _store(self, rows: Sequence[bytes]) -> bool:
        data = b"".join(_HEAD.pack(len(row), zlib.crc32(row)) + row for row in rows)
        self._drop_old()
        if not self._make_room(len(data)):
            return False
        # A later segment on disk would vouch for the sequences before it: their loss must be on record first.
        if self._unsaved_drops and not self._save():
            return False
        account = self._accounts[self.boot]
        try:
            if self._file is None or self._is_closed(self._segments[-1], len(data)):
                self._open_segment(account.produced)
            assert self._file is not None
            before_bytes = os.fstat(self._file).st_size
            try:
                self._write_all(self._file, data)
                failpoint("agent.spool.append")
            except OSError:
                os.ftruncate(self._file, before_bytes)
                raise
        except OSError as error:
            self._complain("telemetry rows are dropped: %s", error)
            return False
        self._segments[-1].add(rows)
        self._segments[-1].newest_s = self._clock.monotonic_s()
        account.produced += len(rows)
        return True

    def _is_closed(self, segment: _Segment, size_bytes: int) -> bool:
        """Whether so much more belongs into a segment of its own."""
        age_s = self._clock.monotonic_s() - segment.opened_s
        return segment.size_bytes + size_bytes > self._segment_bytes or age_s > self._limit_age_s / _AGE_PARTS

    def _write_all(self, file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._write(file, bytes(view)) :]

    def _open_segment(self, first: int) -> None:
        self._seal()
        segment = _Segment(self.boot, first, opened_s=self._clock.monotonic_s())
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / segment.name, flags, 0o600)
        self._segments.append(segment)

    def _seal(self) -> None:
        was_open = self._file is not None
        self.close()
        if was_open and not self._segments[-1].sizes:
            self._unlink(self._segments.pop())

    def _make_room(self, size_bytes: int) -> bool:
        """Drop oldest unsent segments until `size_bytes` more fit."""
        while sum(one.size_bytes for one in self._segments) + size_bytes > self._limit_bytes:
            open_one = self._segments[-1] if self._file is not None else None
            oldest = next((one for one in self._segments if not one.sent and one is not open_one), None)
            if oldest is None or not self._drop([oldest]):
                return False
        return True

    def _drop_old(self) -> None:
        """Drop segments whose youngest row is too old, other than those of which rows were sent."""
        border_s = self._clock.monotonic_s() - self._limit_age_s
        if not self._segments or self._segments[0].newest_s >= border_s:
            return
        if self._file is not None and self._segments[-1].newest_s < border_s:
            self._seal()
        self._drop([one for one in self._segments if not one.sent and one.newest_s < border_s])

    def _drop(self, segments: Sequence[_Segment]) -> bool:
        """Count segments as dropped, then remove them; False if that cannot be written down."""
        before = {one.boot: list(self._accounts[one.boot].dropped_ranges) for one in segments}
        for one in segments:
            self._accounts[one.boot].drop(one.first + one.acked, one.end)
        if segments and not self._save(removing=tuple(one.name for one in segments)):
            for boot, ranges in before.items():
                self._accounts[boot].dropped_ranges = ranges
            return False
        self._remove(segments)
        return True

    # -- rows out -------------------------------------------------------------------------------------------

    def next_batch(self, correlation: int) -> TelemetryBatch | None:
        """The oldest rows, marked as sent, with the ledgers they balance; None if all is told.

        Called again without an acknowledgement between, it gives the same rows again, and maybe more, less
        those whose file has failed meanwhile. Never raises for a file.
        """
        rows: list[bytes] = []
        ranges: list[RowRange] = []
        room_bytes = _BATCH_ROW_BYTES
        self._finish(())  # what a full disk kept from being tidied up
        self._drop_old()
        for segment in list(self._segments):
            if len(ranges) == _MAX_RANGES:
                break
            if segment.acked == len(segment.sizes):
                continue
            try:
                taken = self._take(segment, MAX_BATCH_ROWS - len(rows), room_bytes)
            except OSError as error:
                if self._lose(segment, error):
                    continue
                break  # the ledger of what comes behind it would vouch for its rows
            if not taken:
                break
            first = segment.first + segment.acked
            ranges.append(RowRange(segment.boot, first, first + len(taken) - 1))
            rows += taken
            room_bytes -= sum(len(row) + 5 for row in taken)
            if ranges[-1].last + 1 < segment.end:
                break  # the planner takes what comes after later rows of the boot for repeats
        ledgers = self._ledgers(ranges)
        if not rows and not ledgers:
            return None
        return TelemetryBatch(
            correlation=correlation, rows=tuple(rows), ranges=tuple(ranges), ledgers=ledgers
        )

    def _take(self, segment: _Segment, most_rows: int, most_bytes: int) -> list[bytes]:
        """Rows of a segment from its first open one on; the segment is sealed and marked before.

        Raises:
            OSError: the file is gone, or cannot be marked or read.
        """
        count, size_bytes = 0, 0
        for size in segment.sizes[segment.acked : segment.acked + most_rows]:
            size_bytes += size + 5
            if size_bytes > most_bytes:
                break
            count += 1
        if not count or segment.torn:
            return []  # one that is torn and `sent` would not be asked for what it lost at the next start
        if segment is self._segments[-1]:
            self._seal()
        path = self._folder / segment.name
        if not segment.sent:
            path = path.rename(path.with_suffix(".sent"))
            segment.sent = True
            self._sync(path)
            failpoint("agent.spool.marked")
        rows = _read_rows(path)[segment.acked : segment.acked + count]
        if not rows:
            raise OSError(errno.EIO, "its rows are cut off or damaged", str(path))
        return rows

    def _lose(self, segment: _Segment, error: OSError) -> bool:
        """Give up the rows of a segment whose file fails; False, and they wait, if that cannot be written."""
        self._complain("telemetry rows are dropped, since their file cannot be used: %s", error)
        dropped = self._drop([segment])
        self._complained = True  # a written ledger ends a trouble, but here one line is enough
        return dropped

    def _sync(self, path: Path) -> None:
        """Rows leave all the same where a disk does not obey: they are worth more than exact books."""
        try:
            sync_file(path)
        except OSError as error:
            self._complain("telemetry that was sent may be forgotten in a power cut: %s", error)

    def _ledgers(self, ranges: Sequence[RowRange]) -> tuple[Ledger, ...]:
        ends = {one.boot: one.last + 1 for one in ranges}
        left = {one.boot for one in self._segments if one.end > ends.get(one.boot, one.first + one.acked)}
        ledgers: list[Ledger] = []
        for boot, account in self._accounts.items():
            if boot in left and boot not in ends:
                continue  # its oldest row is still to come
            ledger = account.ledger(ends[boot] if boot in left else None)
            if (ledger.produced, ledger.dropped) != account.told:
                ledgers.append(ledger)
        return tuple(ledgers[:_MAX_RANGES])

    def acknowledge(self, ack: TelemetryAck) -> None:
        """The planner has committed these rows. Late, repeated or unknown ranges change nothing else."""
        failpoint("agent.spool.ack")
        for ledger in ack.ledgers:
            if ledger.boot in self._accounts:
                account = self._accounts[ledger.boot]
                account.told = max(account.told, (ledger.produced, ledger.dropped))
        self._finish(ack.ranges)

    def reject(self, ranges: Sequence[RowRange]) -> None:
        """The planner will never take these rows: count them as dropped rather than send them for ever."""
        for one in ranges:
            if one.boot in self._accounts:
                self._accounts[one.boot].drop(one.first, one.last + 1)
        self._unsaved_drops = True
        self._finish(ranges)

    def _finish(self, ranges: Sequence[RowRange]) -> None:
        done: list[_Segment] = []
        open_one = self._segments[-1] if self._file is not None else None
        for segment in self._segments:
            for one in ranges:
                if one.boot == segment.boot and one.first <= segment.first + segment.acked <= one.last:
                    segment.acked = min(one.last + 1, segment.end) - segment.first
            if segment is not open_one and segment.acked == len(segment.sizes):
                done.append(segment)
        if done or self._unsaved_drops:
            saved = self._save(removing=tuple(one.name for one in done))
            # With a full disk space must be freed all the same: the last segment of a boot stays and vouches
            # for its sequences until the ledger can, and one that lost rows vouches for their loss.
            lasts = {one.boot: one for one in self._segments}
            self._remove([one for one in done if saved or (one.sent and lasts[one.boot] is not one)])
        self._close_accounts()

    def _close_accounts(self) -> None:
        """Forget boots that are over, sent and balanced."""
        spooled = {one.boot for one in self._segments}
        for boot, account in list(self._accounts.items()):
            told = account.told == (account.produced, account.dropped())
            if boot != self.boot and boot not in spooled and told:
                self._closed = self._closed[0] + account.produced, self._closed[1] + account.dropped()
                del self._accounts[boot]

    def _remove(self, segments: Sequence[_Segment]) -> None:
        for segment in segments:
            self._segments.remove(segment)
            self._unlink(segment)

    def _unlink(self, segment: _Segment) -> None:
        """Its rows are done with: where the file stays behind the next start sends them again, at most."""
        try:
            failpoint("agent.spool.remove")
            (self._folder / segment.name).unlink(missing_ok=True)
        except OSError as error:
            self._complain("a file of telemetry that is done with stays behind: %s", error)

    # -- books ----------------------------------------------------------------------------------------------

    def _save(self, removing: tuple[str, ...] = ()) -> bool:
        path = self._folder / (_LEDGER + ".tmp")
        try:
            file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                self._write_all(file, encode_books(self._accounts, removing))
                os.fsync(file)
            finally:
                os.close(file)
            failpoint("agent.spool.ledger")
            path.rename(self._folder / _LEDGER)
        except OSError as error:
            self._complain("the spool's ledger cannot be written: %s", error)
            return False
        self._unsaved_drops = self._complained = False
        for segment in self._segments:
            segment.torn = False
        return True

    def _complain(self, text: str, error: OSError) -> None:
        """Once per trouble: a full disk must not fill up with lines that say so."""
        if not self._complained:
            log.warning(text, error)
        self._complained = True

    def _recover(self) -> tuple[dict[int, Account], list[_Segment]]:
        accounts, removing = self._read_ledger()
        found: list[_Segment] = []
        now_s = self._clock.monotonic_s()
        for path in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            segment = _parse_name(path.name)
            if segment is not None:
                segment.opened_s = segment.newest_s = now_s
                segment.add(_read_rows(path))
                account = accounts.setdefault(segment.boot, Account(segment.boot))
                account.produced = max(account.produced, segment.end)
                found.append(segment)
        self._count_torn(accounts, found)
        for segment in found:
            gone_until = accounts[segment.boot].dropped_until(segment.first)
            segment.acked = min(gone_until, segment.end) - segment.first
            if segment.name in removing:
                segment.acked = len(segment.sizes)
        # Boots in order of their oldest file, sequences in order within a boot.
        order = {boot: at for at, boot in enumerate(dict.fromkeys(one.boot for one in found))}
        return accounts, sorted(found, key=lambda one: (order[one.boot], one.first))

    def _count_torn(self, accounts: dict[int, Account], found: Sequence[_Segment]) -> None:
        """Rows that the ledger or a later segment vouches for and that a power cut took: they are dropped.

        Nobody was told of them, since no row of a segment that is `new` has left.
        """
        for segment in found:
            if not segment.sent:
                later = [one.first for one in found if one.boot == segment.boot and one.first > segment.first]
                account = accounts[segment.boot]
                end = min(later, default=account.produced)
                if account.dropped_until(segment.end) < end:
                    account.drop(segment.end, end)
                    segment.torn = self._unsaved_drops = True

    def _read_ledger(self) -> tuple[dict[int, Account], tuple[str, ...]]:
        path = self._folder / _LEDGER
        try:
            return decode_books(path.read_bytes())
        except FileNotFoundError:
            return {}, ()
        except (OSError, DecodeError) as error:
            log.warning("the spool's ledger is unreadable and set aside as ledger.bad: %s", error)
            path.replace(self._folder / (_LEDGER + ".bad"))
            return {}, ()


def _chunks(rows: Sequence[bytes], most_bytes: int) -> list[list[bytes]]:
    chunks: list[list[bytes]] = []
    size_bytes = most_bytes
    for row in rows:
        size_bytes += len(row) + _HEAD.size
        if size_bytes > most_bytes or not chunks:
            chunks.append([])
            size_bytes = len(row) + _HEAD.size
        chunks[-1].append(row)
    return chunks


def _parse_name(name: str) -> _Segment | None:
    stem, _, kind = name.partition(".")
    boot, _, first = stem.partition("-")
    if kind not in ("new", "sent") or len(boot) != 16 or len(first) != 16:
        return None
    try:
        return _Segment(int(boot, 16), int(first, 16), kind == "sent")
    except ValueError:
        return None


def _read_rows(path: Path) -> list[bytes]:
    """Rows up to the first record that is cut off or damaged."""
    data = path.read_bytes()
    rows: list[bytes] = []
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        row = data[at + _HEAD.size : at + _HEAD.size + length]
        if not 0 < length <= MAX_ROW_BYTES or len(row) < length or zlib.crc32(row) != checksum:
            break
        rows.append(row)
        at += _HEAD.size + length
    return rows
