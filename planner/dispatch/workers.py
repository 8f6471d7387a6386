"""Database and disk work off the thread that owns the sockets.

Four threads: telemetry and reports, each committed in groups and neither waiting for the other; the rest of
the store's calls, one after another; artifact chunks. At each thread devices take turns, so that one with
much waiting holds up nobody. Every piece of work ends in exactly one event, whatever fails, except a report
that a newer one of its device overtook; telemetry also tells of what is desired anew because of it.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from itertools import starmap
from typing import Final, Generic, TypeVar

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.ports import DispatchStore, LocalPlanRefused, single_rows, telemetry_write
from stageloom.shared.errors import StageloomError, StorageError, UnavailableError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId

log = logging.getLogger(__name__)


_GROUP: Final = 256  # pieces of work in one transaction

_GROUP_ROWS: Final = 2_048  # telemetry rows, about: what waits for the transaction waits no longer for them

_SINGLE_ROW: Final = 16  # one that the store works on by itself takes as long as so many

_GATHER_S: Final = (
    0.01  # the first of a group waits this long for others: a commit costs the same for one and for all
)


Work = TypeVar("Work")

Call = ev.Reissue | ev.ReadDesired | ev.StoreAlarm | ev.AdoptLocal | ev.NoteExcess

Action = ev.AppendTelemetry | ev.StoreReport | Call | ev.ReadChunk | ev.Quarantine


AGAIN_S: Final = 60.0
"""Devices send again within a second or two; that a database is still away need not be said as often."""


class Complaints:
    """What may last is told once per cause, and again after `AGAIN_S`. Any thread may complain."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._told_s: dict[str, float] = {}  # by cause, those of the last AGAIN_S
        self._lock = threading.Lock()

    def about(self, what: str, error: Exception) -> None:
        """Log that `what` failed. An error that nobody raised on purpose is a defect: with its traceback."""
        if not isinstance(error, StageloomError):
            log.error("%s", what, exc_info=error)
        elif not isinstance(error, StorageError | UnavailableError) or self._due(str(error)):
            log.warning("%s: %s", what, error)

    def _due(self, cause: str) -> bool:
        now_s = self._now_s()
        with self._lock:
            self._told_s = {one: at_s for one, at_s in self._told_s.items() if now_s - at_s < AGAIN_S}
            if cause in self._told_s:
                return False
            self._told_s[cause] = now_s
            return True


Owner = TypeVar("Owner", bound=Hashable)

Item = TypeVar("Item")


class FairQueue(Generic[Owner, Item]):
    """Items by owner. It bounds nothing: whoever puts items in does."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()  # first: whose turn it is

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, owner: Owner, item: Item) -> None:
        """Add an item behind its owner's others; an owner that had none takes its turn after all who have."""
        waiting = self._waiting.get(owner)
        if waiting is None:
            self._waiting[owner] = deque((item,))
        else:
            waiting.append(item)

    def put_newest(self, owner: Owner, item: Item) -> None:
        """Add an item that takes the place of whatever its owner has waiting; the owner keeps its turn."""
        waiting = self._waiting.get(owner)
        if waiting is not None:
            waiting.clear()
        self.put(owner, item)

    def take(self) -> Item:
        """The next item.

        Raises:
            KeyError: nothing waits.
        """
        owner = next(iter(self._waiting), None)
        if owner is None:
            raise KeyError("nothing waits")
        waiting = self._waiting[owner]
        item = waiting.popleft()
        if waiting:
            self._waiting.move_to_end(owner)
        else:
            del self._waiting[owner]
        return item


class _Turns(Generic[Work]):
    """A thread that is handed what waits, by turns of the devices; bounded by the core, device by device."""

    def __init__(
        self,
        name: str,
        do: Callable[[list[Work]], None],
        *,
        gather_s: float = 0.0,
        most: int = 1,
        rows: Callable[[Work], int] = lambda work: 0,
    ) -> None:
        """`do` gets up to `most` pieces of work with about `_GROUP_ROWS` rows at most; the first of them
        waits `gather_s` for others."""
        self._do = do
        self._gather_s = gather_s
        self._most = most
        self._rows = rows
        self._queue: FairQueue[str, Work] = FairQueue()
        self._changed = threading.Condition()  # guards what is above and below
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, owner: str, work: Work, *, newest: bool = False) -> None:
        """Take work; with `newest` it takes the place of what the owner has waiting."""
        with self._changed:
            if newest:
                self._queue.put_newest(owner, work)
            else:
                self._queue.put(owner, work)
            self._changed.notify()

    def close(self) -> None:
        """Finish what was taken and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next():
            self._do(group)

    def _next(self) -> list[Work]:
        """What to do now; empty when all is done and it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
        if self._gather_s and not self._closed:
            time.sleep(self._gather_s)
        group: list[Work] = []
        rows = 0
        with self._changed:
            while self._queue and len(group) < self._most and rows < _GROUP_ROWS:
                group.append(self._queue.take())
                rows += self._rows(group[-1])
        return group


def _weight(action: ev.AppendTelemetry) -> int:
    """The rows of a batch, in rows of the usual kind."""
    rows = action.batch.rows
    return len(rows) + (_SINGLE_ROW - 1) * single_rows(rows)


class StoreWorkers:
    """Carries out the core's store actions and posts what came of them."""

    def __init__(
        self, store: DispatchStore, post: Callable[[Sequence[ev.Event]], None], now_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._post = post
        self._complaints = Complaints(now_s)
        self._telemetry: _Turns[ev.AppendTelemetry] = _Turns(
            "dispatch-telemetry",
            self._keep_telemetry,
            gather_s=_GATHER_S,
            most=_GROUP,
            rows=_weight,
        )
        self._reports: _Turns[ev.StoreReport] = _Turns(
            "dispatch-reports", self._keep_reports, gather_s=_GATHER_S, most=_GROUP
        )
        self._calls: _Turns[Call] = _Turns("dispatch-store", self._call)
        self._chunks: _Turns[ev.ReadChunk] = _Turns("dispatch-chunks", self._read_all)

    def submit(self, action: Action) -> None:
        """Take work; never blocks."""
        match action:
            case ev.AppendTelemetry():
                self._telemetry.put(action.device, action)
            case ev.StoreReport():
                self._reports.put(action.record.device, action, newest=True)
            case ev.ReadChunk():
                self._chunks.put(action.device, action)
            case ev.Reissue() | ev.ReadDesired() | ev.StoreAlarm() | ev.AdoptLocal() | ev.NoteExcess():
                self._calls.put(action.device, action)
            case ev.Quarantine():
                self._quarantine(action)

    def close(self) -> None:
        """Finish what was taken and stop."""
        self._telemetry.close()
        self._reports.close()
        self._calls.close()
        self._chunks.close()

    def _call(self, group: list[Call]) -> None:
        (action,) = group
        match action:
            case ev.Reissue():
                self._post([self._reissue(action)])
            case ev.ReadDesired():
                self._post([self._desired(action.device)])
            case ev.StoreAlarm():
                self._post([self._alarm(action)])
            case ev.AdoptLocal():
                self._post([self._adopt(action)])
            case ev.NoteExcess():
                self._note(action)

    def _note(self, action: ev.NoteExcess) -> None:
        log.warning("device_id=%s is beyond its quotas, dropped: %s", action.device, action.text)
        self._try(lambda: self._store.note_excess(action.device, action.text))

    def _keep_reports(self, group: list[ev.StoreReport]) -> None:
        records = [one.record for one in group]

        def keep() -> None:
            self._store.record_reports(records)
            failpoint("planner.report.ack")

        ok = self._try(keep)
        self._post([ev.ReportStored(one.device, one.report.revision, ok) for one in records])

    def _keep_telemetry(self, group: list[ev.AppendTelemetry]) -> None:
        told: list[ev.Event] = []

        def keep() -> None:
            writes = [telemetry_write(one.device, one.batch) for one in group]
            told.extend(starmap(ev.DesiredChanged, self._store.append_telemetry(writes)))
            failpoint("planner.telemetry.ack")

        ok = self._try(keep)
        if not ok and (doubted := {one.device for one in group if single_rows(one.batch.rows)}):
            told.append(ev.DesiredInDoubt(tuple(sorted(doubted))))  # of which an answer may be in the store
        self._post([*(ev.TelemetryCommitted(one.ticket, ok) for one in group), *told])

    def _try(self, do: Callable[[], None]) -> bool:
        try:
            do()
        except Exception as error:
            self._complaints.about("the store failed, and devices will send again", error)
            return False
        return True

    def _read_all(self, group: list[ev.ReadChunk]) -> None:
        self._post([self._read(action) for action in group])

    def _read(self, action: ev.ReadChunk) -> ev.Event:
        try:
            artifact = self._store.artifact(action.digest)
            if artifact is None:
                return ev.ChunkRead(action.ticket, 0, None, "no such artifact")
            with artifact.path.open("rb") as file:
                file.seek(action.offset_bytes)
                data = file.read(action.length_bytes)
        except Exception as error:
            self._complaints.about(f"artifact {action.digest[:12]} cannot be read", error)
            return ev.ChunkRead(action.ticket, 0, None, f"cannot be read: {type(error).__name__}")
        return ev.ChunkRead(action.ticket, artifact.size_bytes, data)

    def _reissue(self, action: ev.Reissue) -> ev.Event:
        try:
            desired = self._store.reissue(
                action.device, above_epoch=action.above_epoch, above_generation=action.above_generation
            )
        except Exception as error:
            self._complaints.about(f"a new generation for {action.device} failed", error)
            return ev.ReissueFailed(action.device)
        return ev.DesiredChanged(action.device, desired)

    def _desired(self, device: DeviceId) -> ev.Event:
        try:
            return ev.DesiredRead(device, self._store.desired(device))
        except Exception as error:
            self._complaints.about(f"what {device} should do cannot be read", error)
            return ev.DesiredRead(device, None, ok=False)

    def _alarm(self, action: ev.StoreAlarm) -> ev.Event:
        try:
            replan = self._store.record_alarm(action.device, action.alarm)
        except Exception as error:
            self._complaints.about(
                f"an alarm of {action.device} is not stored, and will be sent again", error
            )
            return ev.AlarmStored(action.device, action.alarm, ok=False)
        failpoint("planner.alarm.ack")
        return ev.AlarmStored(action.device, action.alarm, replan)

    def _quarantine(self, action: ev.Quarantine) -> None:
        def done(stored: "Future[None]") -> None:
            error = stored.exception()
            if isinstance(error, Exception):
                self._complaints.about(f"the quarantine of {action.device} is not stored", error)
            self._post([ev.QuarantineStored(action.device, ok=error is None)])

        self._store.quarantine(action.device, action.reason).add_done_callback(done)

    def _adopt(self, action: ev.AdoptLocal) -> ev.Event:
        try:
            desired = self._store.adopt_local(action.device, action.plan)
        except LocalPlanRefused as error:
            return ev.LocalSettled(action.device, action.plan, refused=str(error))
        except Exception as error:
            self._complaints.about(f"a local plan of {action.device} is not adopted", error)
            return ev.LocalSettled(action.device, action.plan, failed=True)
        return ev.LocalSettled(action.device, action.plan, desired)
