"""Whether the running plan's steps take as long as when it was profiled here. Pure.

The planner's predictions are not in a plan, so a device knows what to expect of one only after a stage
profile of it. Compared are steps with all members active, as profiled, and only where no other step runs
beside them (one lane): what lanes cost each other is load, not drift. Without a profile nothing has drifted.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from edge_agent.worker.messages import Stats
from shared.ids import Digest

_STEPS: Final = 50
"""Fewer say more about a moment than about the device."""

_PLANS: Final = 8


class Drift:
    """Measured over profiled step time of the running plan."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._planned_us: dict[Digest, dict[int, float]] = {}
        self._running: Digest | None = None
        self._steps = 0
        self._measured_us = 0.0
        self._expected_us = 0.0

    def profiled(self, plan: Digest, lanes: int, step_us: Mapping[int, float]) -> None:
        """Blocks of a plan were profiled: per combined block the time of a step with all members active."""
        known = self._planned_us.pop(plan, {})
        new = {block: us for block, us in step_us.items() if us > 0} if lanes == 1 else {}
        self._planned_us[plan] = {**known, **new}
        while len(self._planned_us) > _PLANS:
            del self._planned_us[next(iter(self._planned_us))]

    def add(self, stats: Stats, plan: Digest | None, members: Sequence[Sequence[str]]) -> None:
        """One report of the engine; `members` are the running plan's, per combined block."""
        if plan != self._running:
            self._running, self.ratio = plan, 1.0
            self._restart()
        planned_us = self._planned_us.get(plan, {}) if plan is not None else {}
        for one in stats.combined:
            full = one.combined < len(members) and one.mask + 1 == 1 << len(members[one.combined])
            if full and one.key == stats.key and one.combined in planned_us:
                self._steps += one.steps
                self._measured_us += one.busy_s * 1e6
                self._expected_us += one.steps * planned_us[one.combined]
        if self._steps >= _STEPS and self._measured_us > 0.0:
            self.ratio = self._measured_us / self._expected_us
            self._restart()

    def _restart(self) -> None:
        self._steps, self._measured_us, self._expected_us = 0, 0.0, 0.0
