"""Measuring the ways to run a model, executors times threads: what is asked of the engine process, and when.

A way is measured as the stages of a plan that runs one model as a whole on one lane. That happens in moments
in which nothing is served, so what disturbs can only lengthen it, and the shortest of some measurements
counts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, StageProfileRequest
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.arrangements import ON_GPU, Times
from stageloom.shared.search.compose import ModelChoice, compose

LIMIT_S: Final = 4.0  # of work per measurement, with opening the session
GPU_LIMIT_S: Final = 60.0  # the same on a GPU: kernels are looked for
ROUNDS: Final = 4
"""Of every model on every executor on the processor; a GPU is timed by its own clock. A core that a virtual
machine shares with others is slower for a second or two, now and then: one of four rounds will miss that."""
OWN_REQUESTS: Final = 1 << 40
"""From here on requests are the agent's own: the planner numbers its from 1."""

ATTEMPTS: Final = 3  # at one measurement, on a device that is too busy
PAUSE_S: Final = 2.0
"""After each measurement while tasks come: what is served waits for a run of a model at the most."""
QUIET_PAUSE_S: Final = 0.1
HELD_S: Final = 5.0
"""So long after one was asked for, or its own limit, tasks may wait for it: sessions take time to open."""
RECOVERY_S: Final = 0.5
"""After one ended, until what waited for it has been served."""
BUSY_PAUSE_S: Final = 60.0
"""After one that found no moment: the device may have more of them later."""


class KnownTimes(Protocol):
    """What is known of models on this device."""

    def of(self, artifact: Digest) -> Times: ...


class WayRequests:
    """The measurements of some models, each asked for as a profile."""

    def __init__(self, times: KnownTimes, wanted: Sequence[ExecutorOptions], *, first: int = 1) -> None:
        """`wanted`: the ways to run a model; `first`: the number of the first request."""
        self._times = times
        self._wanted = wanted
        self._numbers = count(first)
        self.open: dict[int, tuple[ModelChoice, ExecutorOptions]] = {}
        self.cut_short: set[tuple[Digest, ExecutorOptions]] = set()  # ways left out with rounds to come
        self.fatal: set[tuple[Digest, str]] = set()  # models and executors that ended the engine process

    def of(self, models: Sequence[tuple[ModelChoice, ArtifactNeed]]) -> list[StageProfileRequest]:
        """What is to be measured; nothing where there is no choice, or once all is known."""
        if len(self._wanted) < 2:
            return []
        wanted = [
            (choice, need, options)
            for round_ in range(ROUNDS)
            for choice, need in models
            for options in self._wanted
            if options not in self._times.of(choice.artifact) or (choice.artifact, options) in self.cut_short
            if not (round_ and options.name in ON_GPU) and not self.is_fatal(choice, options)
        ]
        return [self._request(*one) for one in wanted]

    def is_fatal(self, choice: ModelChoice, options: ExecutorOptions) -> bool:
        """The engine process ended at the model on that executor: with other threads it may end as badly."""
        return (choice.artifact, options.name) in self.fatal

    @property
    def unfinished(self) -> set[tuple[Digest, ExecutorOptions]]:
        """The ways of which measurements are still to come, or were left out."""
        return self.cut_short | {(choice.artifact, options) for choice, options in self.open.values()}

    def _request(
        self, choice: ModelChoice, need: ArtifactNeed, options: ExecutorOptions
    ) -> StageProfileRequest:
        number = next(self._numbers)
        plan = compose([choice], executor=options)
        self.open[number] = choice, options
        self.cut_short.discard((choice.artifact, options))
        return StageProfileRequest(
            request=number,
            plan_digest=plan.digest,
            plan=plan.wire,
            artifacts=(need,),
            budget_s=GPU_LIMIT_S if options.name in ON_GPU else LIMIT_S,
        )


@dataclass(slots=True)
class _Asked:
    """A measurement that was sent, and how often it found no moment before."""

    request: StageProfileRequest
    attempts: int = 0


@dataclass
class PlannedWays:
    """The ways of the models that a planner's plans name: one measurement at a time, with pauses.

    A measurement that found no moment is made again, and given up after a few: what is not known is not told.
    """

    requests: WayRequests
    _due: deque[_Asked] = field(default_factory=deque)
    _sent: _Asked | None = None
    _seen: set[Digest] = field(default_factory=set)
    _named: set[Digest] = field(default_factory=set)  # by the plan that runs
    _not_before_s: float = 0.0
    _held_until_s: float = 0.0

    @property
    def left(self) -> int:
        """Measurements that are still to be made."""
        return len(self._due) + (self._sent is not None)

    @property
    def asked(self) -> bool:
        """A measurement was asked for and has not ended."""
        return self._sent is not None

    def add(self, models: Sequence[tuple[ModelChoice, ArtifactNeed]], not_before_s: float) -> None:
        """The models of the plan that runs now; those that were seen before change nothing, and what others
        lack is left out when the next is asked for: the sides of a trial take turns."""
        self._named = {choice.artifact for choice, _ in models}
        self._not_before_s = max(self._not_before_s, not_before_s)
        fresh = [(choice, need) for choice, need in models if choice.artifact not in self._seen]
        self._seen.update(choice.artifact for choice, _ in fresh)
        self._due.extend(map(_Asked, self.requests.of(fresh)))

    def next(self, now_s: float) -> StageProfileRequest | None:
        """What to ask for now; None while a measurement is made, in a pause, and once all are made."""
        if self._sent is not None or now_s < self._not_before_s:
            return None
        self._seen &= self._named
        self.requests.cut_short |= {way for way in self.requests.unfinished if way[0] not in self._named}
        self._leave_out(lambda choice, _: choice.artifact not in self._named)
        if not self._due:
            return None
        self._sent = self._due.popleft()
        self._held_until_s = now_s + max(HELD_S, self._sent.request.budget_s)
        return self._sent.request

    def disturbs(self, now_s: float) -> bool:
        """A measurement that is made, or has just been, may be why tasks wait."""
        return now_s < self._held_until_s

    def answered(
        self, step_us: float | None, now_s: float, *, quiet: bool, cannot: bool = False, fatal: bool = False
    ) -> tuple[ModelChoice, ExecutorOptions] | None:
        """The measurement that was asked for ended; returns what it was of, unless it is made again.

        `quiet`: no task is there. `cannot`: the model cannot run so, and further rounds leave that way out.
        `fatal`: the engine process ended at it, and all ways of that model on that executor are left out.
        """
        sent = self._sent
        assert sent is not None, "nothing was asked for"
        self._sent = None
        self._held_until_s = min(self._held_until_s, now_s + RECOVERY_S)
        if step_us is not None or cannot or fatal:
            self._not_before_s = now_s + (QUIET_PAUSE_S if quiet else PAUSE_S)
            found = self.requests.open.pop(sent.request.request)
            if fatal:
                self.requests.fatal.add((found[0].artifact, found[1].name))
                self._leave_out(self.requests.is_fatal)
            elif step_us is None:
                self._leave_out(lambda choice, its: (choice.artifact, its) == (found[0].artifact, found[1]))
            return found
        self._not_before_s = now_s + BUSY_PAUSE_S
        sent.attempts += 1
        if sent.attempts < ATTEMPTS:
            self._due.append(sent)
            return None
        return self.requests.open.pop(sent.request.request)

    def _leave_out(self, of: Callable[[ModelChoice, ExecutorOptions], bool]) -> None:
        of_it = {number for number, found in self.requests.open.items() if of(*found)}
        for number in of_it:
            del self.requests.open[number]
        self._due = deque(one for one in self._due if one.request.request not in of_it)
