"""Whether the running plan's steps take as long as profiled here, else as long as when it was new. Pure.

The planner's predictions are not in a plan, so a device learns what to expect of one from a stage profile of
it, or, for want of one, from the plan's own first windows. Compared are steps with all members active, as
profiled, and only where no other step runs beside them (one lane): what lanes cost each other is load, not
drift. What counts is the median of the newest windows: a disturbance of some seconds is no drift.

Once the planner was told (`answered`), it is learned anew what to expect: a change is told once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, TypeAlias

from stageloom.edge_agent.worker.messages import Stats
from stageloom.shared.ids import Digest

_STEPS: Final = 50
"""Fewer say more about a moment than about the device."""

_BLOCK_STEPS: Final = 10
"""In every window, for a block to be expected to go on like that."""

_WINDOW_S: Final = 5.0
_WINDOWS: Final = 5
"""A disturbance that is shorter than a window lies in two of them at most, which is no majority."""

_PLANS: Final = 8

_Window: TypeAlias = dict[int, tuple[int, float]]
"""Per combined block its steps and their microseconds, all together."""


class DriftWatch:
    """Measured over expected step time of the running plan; 1 until there is something to compare."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._expected_us: dict[Digest, dict[int, float]] = {}
        self._running: Digest | None = None
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._window: _Window = {}
        self._began_s: float | None = None
        self._settled = False

    def profiled(self, plan: Digest, lanes: int, step_us: Mapping[int, float]) -> None:
        """Blocks of a plan were profiled: per combined block the time of a step with all members active."""
        known = self._expected_us.pop(plan, {})
        new = {block: us for block, us in step_us.items() if us > 0} if lanes == 1 else {}
        self._expected_us[plan] = {**known, **new}
        while len(self._expected_us) > _PLANS:
            del self._expected_us[next(iter(self._expected_us))]

    def add(
        self, stats: Stats, plan: Digest | None, members: Sequence[Sequence[str]], *, lanes: int = 1
    ) -> None:
        """One report of the engine; `members` are the running plan's, per combined block."""
        if plan != self._running:
            self._running, self.ratio, self._settled = plan, 1.0, False
            self._restart()
        if plan is None or lanes != 1:
            return
        if self._began_s is None:
            self._began_s = stats.at_s
        for one in stats.combined:
            full = one.combined < len(members) and one.mask + 1 == 1 << len(members[one.combined])
            if full and one.key == stats.key:
                steps, us = self._window.get(one.combined, (0, 0.0))
                self._window[one.combined] = steps + one.steps, us + one.busy_s * 1e6
        enough = sum(steps for steps, _ in self._window.values()) >= _STEPS
        if enough and stats.at_s - self._began_s >= _WINDOW_S:
            self._close(plan)
            self._began_s = stats.at_s

    def answered(self) -> None:
        """The planner was told. What steps take from now on is expected, of every plan: the ratio itself may
        still have had a window in it from before the change."""
        self._expected_us.clear()
        self.ratio = 1.0
        self._restart()

    def _close(self, plan: Digest) -> None:
        window, self._window = self._window, {}
        if not self._settled:  # programs were being prepared
            self._settled = True
            return
        self._windows.append(window)
        if len(self._windows) < _WINDOWS:
            return
        expected = self._expected_us.get(plan, {})
        if new := self._learned(expected):
            self.profiled(plan, 1, new)
            expected = self._expected_us[plan]
        ratios = [ratio for one in self._windows if (ratio := _ratio(one, expected)) is not None]
        if len(ratios) == _WINDOWS:
            self.ratio = median(ratios)

    def _learned(self, expected: Mapping[int, float]) -> dict[int, float]:
        """What blocks took that nothing was expected of, those that ran in all of the newest windows."""
        everywhere = set.intersection(*(set(one) for one in self._windows)) - expected.keys()
        return {
            block: median(one[block][1] / one[block][0] for one in self._windows)
            for block in everywhere
            if all(one[block][0] >= _BLOCK_STEPS for one in self._windows)
        }

    def _restart(self) -> None:
        self._windows.clear()
        self._window, self._began_s = {}, None


def _ratio(window: _Window, expected: Mapping[int, float]) -> float | None:
    """Measured over expected; None for too few steps."""
    known = [(steps, us, expected[block]) for block, (steps, us) in window.items() if block in expected]
    planned_us = sum(steps * each_us for steps, _, each_us in known)
    measured_us = sum(us for _, us, _ in known)
    if sum(steps for steps, _, _ in known) < _STEPS or planned_us <= 0.0 or measured_us <= 0.0:
        return None
    return measured_us / planned_us
