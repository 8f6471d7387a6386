"""On which resource a task runs that has become ready: StarPU's eager, dm, dmda and heft, pure.

A task here is one run of a combined block; a worker is a resource of the plan. Of every worker is known when
it is expected to have done all that was placed on it:

    exp_start = when its first lane is expected to be free, not before now
    exp_len   = sum of the predictions of tasks placed there that have not begun
    exp_end   = exp_start + exp_len / lanes

For a task that would take t(w) there, and xfer(w) until its inputs are on the worker's memory node:

    start(w)   = max(exp_end(w), now + xfer(w))
    end(w)     = start(w) + t(w)
    fitness(w) = alpha * (end(w) - min end) + beta * xfer(w)

- `dmda` takes the smallest fitness, the first of equal ones. xfer counts in `start` and again in `fitness`.
- `dm` leaves xfer out of all three.
- `heft` takes the resource as `dmda`, and orders: older batches first, within a batch the largest upward
  rank first, and of at most five equal ones the one that ends first.
- `eager` has one queue; a resource with a free lane takes the first task that it may run.
- `fixed` takes the first resource that the plan allows.

While some allowed resource has no prediction for the task, one of those is forced: the one with the least
tasks over relative speedup. Nothing is booked for it.

Source: StarPU 1.4, `src/sched_policies/deque_modeling_policy_data_aware.c` (dm, dmda), `component_heft.c` and
`helper_mct.c` (heft), `eager_central_policy.c`. Ours: the term for energy is left out; ranks are compared
within a batch only; a resource with several lanes is one worker. A decision takes O(resources * (tasks
queued there + reads)).
"""

from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

from stageloom.shared.engine.history import DurationHistory, Footprint
from stageloom.shared.engine.residency import NodeId, Residency, exposed_transfer_s
from stageloom.shared.plan import PlacementPolicy

SlotT = TypeVar("SlotT", bound=Hashable)

WINDOW: Final = 5
"""Tasks of equal order that `heft` compares; `NTASKS` in StarPU."""


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """A resource as placement sees it."""

    kind: str  # resources of one kind share what is known of durations
    node: NodeId  # where its inputs must lie
    lanes: int = 1
    relative_speedup: float = 1.0  # of a lane over a processor's; asked only while nothing is measured


class ReadyTask(Struct, Generic[SlotT], frozen=True):
    """One run of a combined block whose inputs are made: a copy of them could begin now."""

    id: Hashable
    footprint: Footprint
    allowed: tuple[int, ...]  # resources, ascending; at least one
    reads: tuple[SlotT, ...] = ()
    batch: int = 0  # the oldest of its members' instances: lower is older
    rank_s: float = 0.0  # see `upward_ranks_s`
    kinds: tuple[str, ...] = ()  # per allowed resource what runs it there; empty: as the workers say

    def kind_on(self, resource: int, worker: WorkerSpec) -> str:
        """What its durations on a resource are known under."""
        return self.kinds[self.allowed.index(resource)] if self.kinds else worker.kind

    @property
    def order(self) -> tuple[int, float]:
        """Ascending: who goes first under `heft`, in the common queue and in that of a resource."""
        return (self.batch, -self.rank_s)


class Placed(Struct, Generic[SlotT], frozen=True):
    """A decision. What it booked is taken back when the task ends."""

    task: ReadyTask[SlotT]
    resource: int
    compute_s: float  # booked
    transfer_s: float  # booked: what of the transfer outlasts the queue
    copies: tuple[SlotT, ...]  # slots to copy to the resource's node, now
    known: bool = True  # False: not calibrated there, and nothing is booked


class Worker:
    """What is placed on one resource and has not ended."""

    __slots__ = ("_begun", "_placed", "spec")

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._placed: dict[Hashable, tuple[float, float]] = {}  # not begun: predicted compute and transfer
        self._begun: dict[Hashable, float] = {}  # when it is expected to end

    @property
    def tasks(self) -> int:
        """Tasks placed here that have not ended."""
        return len(self._placed) + len(self._begun)

    def exp_start_s(self, now: float) -> float:
        """When the first lane is expected to be free."""
        if len(self._begun) < self.spec.lanes:
            return now
        return max(now, min(self._begun.values()))

    @property
    def exp_len_s(self) -> float:
        """Predicted work that has not begun. Summed anew, so that nothing is left of what has ended."""
        return sum(compute_s + transfer_s for compute_s, transfer_s in self._placed.values())

    def exp_end_s(self, now: float) -> float:
        """When all that is placed here is expected to have ended; with several lanes, spread evenly."""
        return self.exp_start_s(now) + self.exp_len_s / self.spec.lanes

    def book(self, task: Hashable, compute_s: float, transfer_s: float) -> None:
        """Add a task to what has not begun."""
        self._placed[task] = (compute_s, transfer_s)

    def begin(self, task: Hashable, now: float) -> None:
        """The task's transfers are over and it computes from now on.

        Raises:
            KeyError: no such task waits here.
        """
        compute_s, _ = self._placed.pop(task)
        self._begun[task] = now + compute_s

    def take_back(self, task: Hashable) -> None:
        """The task ended, begun or not: nothing that it booked stays."""
        self._placed.pop(task, None)
        self._begun.pop(task, None)


class _Estimate(NamedTuple):
    """What a task would meet on a resource, in seconds."""

    resource: int
    compute_s: float
    transfer_s: float
    end_s: float
    known: bool = True  # False: not calibrated there, and the seconds mean nothing


class Placer(Generic[SlotT]):
    """The tasks that are ready, the workers, and the policy.

    `alpha` and `beta` weigh lateness and transfers; beta = 0 counts a transfer once.

    Whoever drives it calls `ready` for a task, `place` whenever something became ready or ended, `begin` when
    a task begins to compute, and `end` or `withdraw` when it goes. It reports writes of slots to `residency`,
    before a task that reads them is ready, and issues the copies that a decision names.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        workers: Sequence[WorkerSpec],
        *,
        history: DurationHistory,
        residency: Residency[SlotT],
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        self.policy = policy
        self.workers = tuple(map(Worker, workers))
        self.history = history
        self.residency = residency
        self._alpha = alpha
        self._beta = beta
        self._waiting: dict[Hashable, ReadyTask[SlotT]] = {}  # not placed, in the order of arrival
        self._placed: dict[Hashable, Placed[SlotT]] = {}

    def ready(self, task: ReadyTask[SlotT]) -> None:
        """A task could run; `place` says where.

        Raises:
            ValueError: it may run nowhere, or a task of this id is there already.
        """
        if not task.allowed:
            raise ValueError(f"task {task.id} may run on no resource")
        if task.id in self._waiting or task.id in self._placed:
            raise ValueError(f"task {task.id} is there already")
        self._waiting[task.id] = task

    def place(self, now: float) -> list[Placed[SlotT]]:
        """Decide for every waiting task; `eager` leaves those for which no lane is free."""
        if not self._waiting:
            return []
        if self.policy is PlacementPolicy.EAGER:
            return list(self._place_eagerly(now))
        if self.policy is PlacementPolicy.HEFT:
            return list(self._place_by_rank(now))
        return [self._settle(task, self._best(task, now), now) for task in tuple(self._waiting.values())]

    def begin(self, task: Hashable, now: float) -> None:
        """A placed task begins to compute.

        Raises:
            KeyError: it is not placed, or has begun before.
        """
        self.workers[self._placed[task].resource].begin(task, now)

    def end(self, task: Hashable, compute_s: float | None = None) -> None:
        """A placed task ended; `compute_s` is what it took, None where it failed.

        Raises:
            KeyError: it is not placed.
            ValueError: `compute_s` is no duration.
        """
        placed = self._placed.pop(task)
        worker = self.workers[placed.resource]
        worker.take_back(task)
        if compute_s is not None:
            kind = placed.task.kind_on(placed.resource, worker.spec)
            self.history.add(placed.task.footprint, kind, compute_s)

    def withdraw(self, task: Hashable) -> None:
        """A task will not run: its instance is gone. Nothing is learned of it.

        Raises:
            KeyError: it is neither waiting nor placed.
        """
        if self._waiting.pop(task, None) is None:
            self.end(task)

    def _place_eagerly(self, now: float) -> Iterator[Placed[SlotT]]:
        for resource, worker in enumerate(self.workers):
            for task in tuple(self._waiting.values()):
                if worker.tasks >= worker.spec.lanes:
                    break
                if resource in task.allowed:
                    yield self._settle(task, self._estimate(task, resource, now), now)

    def _place_by_rank(self, now: float) -> Iterator[Placed[SlotT]]:
        heap: list[tuple[tuple[int, float], int, ReadyTask[SlotT]]] = []
        for arrival, task in enumerate(self._waiting.values()):
            heappush(heap, (task.order, arrival, task))
        while heap:
            window = [heappop(heap)]
            while heap and len(window) < WINDOW and heap[0][0] == window[0][0]:
                window.append(heappop(heap))
            ends = [min(one.end_s for one in self._estimates(task, now)) for _, _, task in window]
            _, _, task = window.pop(ends.index(min(ends)))
            for entry in window:
                heappush(heap, entry)
            yield self._settle(task, self._best(task, now), now)

    def _best(self, task: ReadyTask[SlotT], now: float) -> _Estimate:
        """Where the policy wants the task."""
        if self.policy is PlacementPolicy.FIXED:
            return self._estimate(task, task.allowed[0], now)
        estimates = self._estimates(task, now)
        if unknown := [one for one in estimates if not one.known]:
            return min(unknown, key=self._load)
        soonest_s = min(one.end_s for one in estimates)
        alpha, beta = self._alpha, self._beta
        if self.policy is PlacementPolicy.DM:
            alpha, beta = 1.0, 0.0
        return min(estimates, key=lambda one: alpha * (one.end_s - soonest_s) + beta * one.transfer_s)

    def _load(self, estimate: _Estimate) -> float:
        """Tasks for the speed of a resource."""
        worker = self.workers[estimate.resource]
        return worker.tasks / (worker.spec.relative_speedup * worker.spec.lanes)

    def _estimates(self, task: ReadyTask[SlotT], now: float) -> list[_Estimate]:
        """Per allowed resource what the task would meet there."""
        return [self._estimate(task, resource, now) for resource in task.allowed]

    def _estimate(self, task: ReadyTask[SlotT], resource: int, now: float) -> _Estimate:
        worker = self.workers[resource]
        compute_s = self.history.expected_s(task.footprint, task.kind_on(resource, worker.spec))
        if compute_s is None:
            return _Estimate(resource, 0.0, 0.0, now, known=False)
        start_s, transfer_s = worker.exp_end_s(now), 0.0
        if self.policy is not PlacementPolicy.DM:
            transfer_s = self.residency.transfer_s(task.reads, worker.spec.node)
            start_s = max(start_s, now + transfer_s)
        return _Estimate(resource, compute_s, transfer_s, start_s + compute_s)

    def _settle(self, task: ReadyTask[SlotT], choice: _Estimate, now: float) -> Placed[SlotT]:
        """Book the task, and have what it reads copied to where it will run."""
        worker = self.workers[choice.resource]
        expected_end_s = worker.exp_end_s(now)
        transfer_s = exposed_transfer_s(choice.transfer_s, now=now, expected_end_s=expected_end_s)
        worker.book(task.id, choice.compute_s, transfer_s)
        copies = self.residency.missing(task.reads, worker.spec.node)
        for slot in copies:
            self.residency.copy(slot, worker.spec.node)
        del self._waiting[task.id]
        placed = Placed(task, choice.resource, choice.compute_s, transfer_s, copies, choice.known)
        self._placed[task.id] = placed
        return placed


def upward_ranks_s(
    mean_s: Sequence[float], successors: Sequence[Sequence[tuple[int, float]]]
) -> tuple[float, ...]:
    """Upward ranks of tasks in topological order, in seconds. [num_tasks]

    rank(i) = mean t(i) + max over successors j of (mean xfer(i, j) + rank(j)), as HEFT has it (Topcuoglu et
    al. 2002, equation 6). `mean_s` is taken over resources [num_tasks]; `successors` hold, per task, later
    tasks with the mean transfer to them. O(tasks + edges).
    """
    ranks = [0.0] * len(mean_s)
    for task in reversed(range(len(mean_s))):
        behind = max((transfer_s + ranks[later] for later, transfer_s in successors[task]), default=0.0)
        ranks[task] = mean_s[task] + behind
    return tuple(ranks)
