"""What the planner does beside serving: it thins out old telemetry, ends requests whose answers were lost,
and compiles the twin's kernels once."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Final

from stageloom.planner.api.context import FleetLink, desiring
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.store.profiles import end_unanswered, listed_requests
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.store import Store
from stageloom.planner.store.trusted_time import advance_clock, clock_notice
from stageloom.planner.twin.compiled import compile_ahead
from stageloom.planner.twin.compiled.compile_cache import is_compiled
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 600.0

ANSWERED_S: Final = 3600.0
"""Online for so long since its turn, a request has been answered: a device gives it up after `profile_wall_s`
(600 s). The rest is for artifacts that it has to fetch."""

COMPILE_AFTER_S: Final = 30.0
"""Seconds after the planner's start at which the twin's kernels are compiled."""


class Housekeeper:
    """A thread that tidies up right away and then every `INTERVAL_S`, from `__init__` to `close`."""

    def __init__(self, store: Store, keep: Retention, fleet: FleetLink) -> None:
        self._store = store
        self._keep = keep
        self._unanswered = UnansweredRequests(store, fleet)
        self._checked_s: float | None = None  # when the clock was compared last, monotonic
        self._held = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the step under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._tidy()
            except StageloomError as error:
                logger.warning("housekeeping goes on in %.0f s: %s", INTERVAL_S, error)
            except Exception:
                logger.exception("housekeeping failed and goes on in %.0f s", INTERVAL_S)
            if self._stop.wait(INTERVAL_S):
                return

    def _check_clock(self) -> None:
        """Compare the clock with what is believed of it, and say so when that changes."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._checked_s if self._checked_s is not None else 0.0
        self._checked_s = now_s
        ahead_s = self._store.write(advance_clock, elapsed_s)
        if ahead_s and not self._held:
            logger.warning("%s", clock_notice(ahead_s))
        elif self._held and not ahead_s:
            logger.info("the clock is believed again; old telemetry and events go as before")
        self._held = bool(ahead_s)

    def _tidy(self) -> None:
        self._check_clock()
        rows, began_s = 0, time.monotonic()
        for treated in tidy(self._store, self._keep):
            rows += treated
            # As long a pause as the step took: at most half of the writer's time goes into this; and far less
            # of the interpreter's into looking for what there is to do.
            if self._stop.wait((time.monotonic() - began_s) * (1.0 if treated else 9.0)):
                break
            began_s = time.monotonic()
        if rows:
            logger.info("rolled up or deleted %d rows of telemetry and events", rows)
        self._unanswered.look()


class UnansweredRequests:
    """Ends requests for measurements whose answers were lost: they are not sent again, and others wait."""

    def __init__(self, store: Store, fleet: FleetLink) -> None:
        self._store = store
        self._fleet = fleet
        self._looks: dict[DeviceId, dict[int, int]] = {}  # at each request since its turn, while online

    def look(self) -> None:
        """End those not answered in `ANSWERED_S` online since their turn; once an `INTERVAL_S`.

        Devices measure in the order of numbers: a request has its turn when the one before it was answered.

        Raises:
            StorageError, UnavailableError: the database cannot be read or written.
        """
        online = self._fleet.online()
        listed = self._store.read(listed_requests, online)
        for device in online - listed.keys():
            self._looks.pop(device, None)
        for device, requests in listed.items():
            before = self._looks.get(device, {})
            answered = min(before.keys() - requests, default=max(requests))
            looks = {number: before.get(number, -1) + 1 if number <= answered else 0 for number in requests}
            lost = {number for number, times in looks.items() if times * INTERVAL_S >= ANSWERED_S}
            self._looks[device] = looks
            if not lost:
                continue
            logger.warning("device_id=%s did not answer requests %s: they end", device, sorted(lost))
            with desiring(self._fleet, device):
                desired = self._store.write(end_unanswered, device, lost)
            if desired is not None:
                self._fleet.desired_changed(device, desired)
            for number in lost:
                del looks[number]


class KernelCompiler:
    """Compiles the twin's kernels once, in a process of its own, where that was not done before."""

    def __init__(self, after_s: float = COMPILE_AFTER_S, work: Callable[[], None] = compile_ahead) -> None:
        """Begin `after_s` from now."""
        self._work = work
        self._pool = ProcessPool(1)
        self._timer = threading.Timer(after_s, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Stop; what is compiled by then is kept."""
        self._timer.cancel()
        self._pool.close()

    def _begin(self) -> None:
        if find_spec("numba") is not None and not is_compiled():
            self._pool.submit(self._work).add_done_callback(_compiled)


def _compiled(done: "Future[None]") -> None:
    if done.cancelled():
        return
    if error := done.exception():
        logger.warning("the twin's kernels were not compiled, so tournaments simulate slowly: %s", error)
    else:
        logger.info("the twin's kernels are compiled")
