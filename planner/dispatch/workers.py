"""Database and disk work off the thread that owns the sockets.

Four threads: telemetry and reports, each committed in groups and neither waiting for the other; the rest of
the store's calls, in order; artifact chunks. Every piece of work ends in exactly one event, whatever fails.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from planner.dispatch import events as ev
from planner.dispatch.complaints import Complaints
from planner.dispatch.ports import DispatchStore
from planner.dispatch.rows import telemetry_write
from shared.failpoint import failpoint

_GROUP = 256  # pieces of work in one transaction
_GATHER_S = (
    0.01  # the first of a group waits this long for others: a commit costs the same for one and for all
)

Write = TypeVar("Write", ev.AppendTelemetry, ev.StoreReport)
Call = ev.Reissue | ev.StoreAlarm | ev.AdoptLocal


class _Groups(Generic[Write]):
    """A thread that hands over what has come meanwhile, a group at a time."""

    def __init__(self, name: str, keep: Callable[[list[Write]], None]) -> None:
        self._keep: Callable[[list[Write]], None] = keep
        # Unbounded here, bounded by the core: `backlog_rows`, one report per device.
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, action: Write) -> None:
        self._queue.put(action)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            group: list[Write] = []
            item = self._queue.get()
            if item is not None:
                time.sleep(_GATHER_S)
            while item is not None:
                group.append(item)
                if len(group) == _GROUP or self._queue.empty():
                    break
                item = self._queue.get()
            stopping = item is None
            if group:
                self._keep(group)


class StoreWorkers:
    """Carries out the core's store actions and posts what came of them."""

    def __init__(
        self, store: DispatchStore, post: Callable[[Sequence[ev.Event]], None], now_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._post = post
        self._complaints = Complaints(now_s)
        self._telemetry = _Groups("dispatch-telemetry", self._keep_telemetry)
        self._reports = _Groups("dispatch-reports", self._keep_reports)
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="dispatch-store")
        self._chunks = ThreadPoolExecutor(1, thread_name_prefix="dispatch-chunks")

    def submit(self, action: ev.AppendTelemetry | ev.StoreReport | Call | ev.ReadChunk) -> None:
        """Take work; never blocks."""
        match action:
            case ev.AppendTelemetry():
                self._telemetry.put(action)
            case ev.StoreReport():
                self._reports.put(action)
            case ev.ReadChunk():
                self._chunks.submit(lambda: self._post([self._read(action)]))
            case ev.Reissue():
                self._calls.submit(lambda: self._post([self._reissue(action)]))
            case ev.StoreAlarm():
                self._calls.submit(lambda: self._post([self._alarm(action)]))
            case ev.AdoptLocal():
                self._calls.submit(lambda: self._post([self._adopt(action)]))

    def close(self) -> None:
        """Finish what was taken and stop."""
        self._telemetry.close()
        self._reports.close()
        self._calls.shutdown()
        self._chunks.shutdown()

    def _keep_reports(self, group: list[ev.StoreReport]) -> None:
        records = [one.record for one in group]

        def keep() -> None:
            self._store.record_reports(records)
            failpoint("planner.report.ack")

        ok = self._try(keep)
        self._post([ev.ReportStored(one.device, one.report.revision, ok) for one in records])

    def _keep_telemetry(self, group: list[ev.AppendTelemetry]) -> None:
        def keep() -> None:
            self._store.append_telemetry([telemetry_write(one.device, one.batch) for one in group])
            failpoint("planner.telemetry.ack")

        ok = self._try(keep)
        self._post([ev.TelemetryCommitted(one.ticket, ok) for one in group])

    def _try(self, do: Callable[[], None]) -> bool:
        try:
            do()
        except Exception as error:
            self._complaints.about("the store failed, and devices will send again", error)
            return False
        return True

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

    def _adopt(self, action: ev.AdoptLocal) -> ev.Event:
        try:
            desired = self._store.adopt_local(action.device, action.plan)
        except Exception as error:
            self._complaints.about(f"a local plan of {action.device} is not adopted", error)
            desired = None
        return ev.LocalSettled(action.device, action.plan, desired)
