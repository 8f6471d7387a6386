"""When to start the engine process again after a crash, and which plan not to trust with it. Pure.

The first restart is immediate: one crash should cost as little as it can. Further ones wait, longer each
time, until the process has lived for `stable_s`. A plan under which it crashed `max_crashes` times within
`window_s` is condemned for the life of the agent.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from stageloom.shared.backoff import backoff_s
from stageloom.shared.ids import Digest


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """Pace of restarts."""

    max_crashes: int = 3
    window_s: float = 60.0
    stable_s: float = 30.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0


class Supervisor:
    """The memory of crashes."""

    def __init__(self, rng: Random, config: SupervisorConfig | None = None) -> None:
        self.config = config or SupervisorConfig()
        self.restarts = 0
        self._rng = rng
        self._started_s = 0.0
        self._delays: Iterator[float] | None = None
        self._crashes: dict[Digest, deque[float]] = {}
        self._condemned: set[Digest] = set()

    def started(self, now_s: float) -> None:
        """The process was started."""
        self._started_s = now_s

    def crashed(self, plan: Digest | None, now_s: float) -> float:
        """The process ended by itself while `plan` ran or was loaded; returns seconds to wait."""
        self.restarts += 1
        if plan is not None:
            crashes = self._crashes.setdefault(plan, deque())
            crashes.append(now_s)
            while crashes[0] < now_s - self.config.window_s:
                crashes.popleft()
            if len(crashes) >= self.config.max_crashes:
                self._condemned.add(plan)
        if now_s - self._started_s >= self.config.stable_s:
            self._delays = None
        if self._delays is None:
            self._delays = backoff_s(
                self._rng, first_s=self.config.first_delay_s, cap_s=self.config.longest_delay_s
            )
            return 0.0
        return next(self._delays)

    def pardon(self, plan: Digest) -> None:
        """It was tried again and has outlived its probation: what it did before is forgotten."""
        self._condemned.discard(plan)
        self._crashes.pop(plan, None)

    def condemned(self, plan: Digest) -> bool:
        """It has crashed the engine too often."""
        return plan in self._condemned
