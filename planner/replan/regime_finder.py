"""Has plans found ahead for load regimes that recur: one device at a time, while nobody waits for a plan."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Final

from stageloom.planner.api.apart import StoreReaders
from stageloom.planner.replan.ahead import ArrivalHistory, look_ahead
from stageloom.planner.store.expected import keep_expected, replanned_devices
from stageloom.planner.store.store import Store
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId

log = logging.getLogger(__name__)

INTERVAL_S: Final = 600.0
"""Between two looks at all devices, at least."""

SHARE: Final = 0.05
"""Of the time of one core, at most."""

_POLL_S: Final = 0.5


class RegimeFinder:
    """Serves from `start` to `close`."""

    def __init__(self, store: Store, apart: StoreReaders, clock: Clock, idle: Callable[[], bool]) -> None:
        """`apart` is this one's alone. While not `idle` nothing is looked for; what is under way stops."""
        self._store = store
        self._apart = apart
        self._clock = clock
        self._idle = idle
        self._histories: dict[DeviceId, ArrivalHistory] = {}
        self._looked_us = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="regimes-ahead", daemon=True)

    def start(self) -> None:
        """Begin to look, after one interval."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what was being looked for is looked for again by the next planner."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._apart.close()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            heard_since_us, self._looked_us = self._looked_us, self._clock.wall_us()
            self._guarded(partial(self._look_at_all, heard_since_us))

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except StageloomError as error:  # such as a plan that is not known here, or a store that is away
            log.info("no plan is found ahead: %s", error)
        except Exception:
            log.exception("looking ahead failed, and goes on later")

    def _look_at_all(self, heard_since_us: int) -> None:
        """Devices that were heard of since the last time."""
        for device, replan in self._store.read(replanned_devices, heard_since_us):
            began_s = self._clock.monotonic_s()
            if self._idle():
                self._guarded(partial(self.look, device, replan))
            took_s = self._clock.monotonic_s() - began_s
            if self._stopping.wait(took_s * (1.0 / SHARE - 1.0)):
                return

    def look(self, device: DeviceId, replan: int) -> bool:
        """Find a plan for one regime of a device whose newest re-plan is `replan`; whether one was kept.

        Raises:
            StageloomError: as `look_ahead`, or the store is away.
        """
        known = self._histories.get(device, ArrivalHistory())
        future = self._apart.submit(look_ahead, device, replan, known, self._clock.wall_us())
        while not wait_for([future], timeout=_POLL_S).done:
            if self._stopping.is_set() or not self._idle():
                future.cancel()
        try:
            self._histories[device], found = future.result()
        except CancelledError:
            return False
        if found is None:
            return False
        self._store.write(
            keep_expected,
            device,
            found.environment,
            found.rates,
            found.plan,
            found.scheduler,
            found.chance,
        )
        log.info(
            "device_id=%s expects %s where %s arrive",
            device,
            found.plan.digest[:12],
            ", ".join(f"{one.model} {one.arrivals_per_s:.3g}/s" for one in found.rates),
        )
        return True
