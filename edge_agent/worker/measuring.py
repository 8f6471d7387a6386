"""When the window of a `OpenWindow` begins and ends; the engine process's main thread drives it."""

import math
from collections.abc import Callable, Sequence

from stageloom.edge_agent.worker.driver import EngineDriver
from stageloom.edge_agent.worker.messages import OpenWindow, WindowMeasured

_LOOK_S = 0.01
"""How often the queues' ages are looked at: differences below this are equal to every user."""


class Measuring:
    """At most one window at a time; a newer order takes an older one's place, which is never answered."""

    def __init__(
        self, driver: Callable[[], EngineDriver | None], report: Callable[[WindowMeasured], None]
    ) -> None:
        self._driver = driver
        self._report = report
        self._order: OpenWindow | None = None
        self._began = False
        self.due_s = math.inf  # when `advance` has something to do

    @property
    def busy(self) -> bool:
        """A window is ordered or open."""
        return self._order is not None

    def order(self, window: OpenWindow, fds: Sequence[int] = ()) -> None:
        """Measure this one."""
        self._order, self._began, self.due_s = window, False, window.from_s

    def advance(self, now: float) -> None:
        """Begin, look or end, if it is time."""
        order, driver = self._order, self._driver()
        if order is None or now < self.due_s:
            return
        if driver is None:  # nothing runs, so there is nothing to report
            self._order, self.due_s = None, math.inf
            return
        if not self._began:
            driver.begin_window()
            self._began = True
        oldest_age_s = driver.look()
        if now < order.to_s and oldest_age_s <= order.brake_age_s:
            self.due_s = min(now + _LOOK_S, order.to_s)
            return
        self._order, self.due_s = None, math.inf
        measured = driver.end_window(order.number)
        if measured is not None:
            self._report(measured)
