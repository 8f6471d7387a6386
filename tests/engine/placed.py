"""A discrete-event simulation of resources on which batches are placed part by part.

The simulation is driven by a `Placer` and holds it to account: data has versions, a copy takes as long as the
bus needs, and whatever begins on a node where its input is not the newest version is an error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from statistics import fmean

from stageloom.shared.engine.history import ENOUGH, DurationHistory, Footprint, HistoryRule
from stageloom.shared.engine.placement import (
    Placed,
    Placer,
    ReadyTask,
    WorkerSpec,
    upward_ranks_s,
)
from stageloom.shared.engine.residency import Bus, NodeId, Residency
from stageloom.shared.plan import PlacementPolicy

SlotName = tuple[int, int]
"""A slot of a replica, and the part that reads it."""

PartId = tuple[int, int]
"""A batch and one of its parts."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Resources, and a model that is cut into parts."""

    parts_s: Sequence[Sequence[float]]  # what each part takes on each resource [num_parts, num_resources]
    border_bytes: Sequence[int] = ()  # in front of each part; none where absent [num_parts]
    nodes: Sequence[int] = ()  # per resource its memory node; one for all where absent
    bus: Bus = field(default_factory=Bus)
    replicas: int = 16
    policy: PlacementPolicy = PlacementPolicy.DMDA
    rule: HistoryRule = HistoryRule.MEDIAN
    beta: float = 1.0
    spread: float = 0.0  # of durations: standard deviation of their logarithm
    calibrated: bool = True
    allowed: Sequence[Sequence[int]] = ()  # per part; every resource where absent
    prefetch: bool = True
    slows_at: int = 1 << 30  # from this batch on
    slower: float = 1.0  # the last resource is so many times slower


@dataclass
class Played:
    """What happened."""

    latencies_s: list[float] = field(default_factory=list)  # per batch, in order of arrival
    away: list[bool] = field(default_factory=list)  # per batch whether its last part ran off resource 0
    heads_away: int = 0  # first parts off resource 0
    most_waiting: int = 0  # batches in the system and no part of them running, at most
    idle_for_copies_s: float = 0.0  # lanes waited for tensors so long


class World:
    """One run. `placer` may be a defective one: `check` raises AssertionError where it is found out."""

    def __init__(
        self,
        scene: Scene,
        arrivals_s: Sequence[float],
        seed: int = 0,
        placer: type[Placer[SlotName]] = Placer,
    ) -> None:
        self.scene = scene
        self.arrivals_s = arrivals_s
        self.now = 0.0
        self.played = Played([math.nan] * len(arrivals_s), [False] * len(arrivals_s))
        self._random = Random(seed)
        resources = range(len(scene.parts_s[0]))
        self.nodes = [NodeId(scene.nodes[r] if scene.nodes else 0) for r in resources]
        history = DurationHistory(scene.rule)
        self.placer = placer(
            scene.policy,
            [WorkerSpec(kind=str(r), node=self.nodes[r]) for r in resources],
            history=history,
            residency=Residency(scene.bus),
            beta=scene.beta,
        )
        if scene.calibrated:
            for part, durations in enumerate(scene.parts_s):
                for resource, seconds in enumerate(durations):
                    for _ in range(max(ENOUGH, 11)):
                        history.add(Footprint(str(part)), str(resource), seconds)
        means = [fmean(durations) for durations in scene.parts_s]
        follow = [[(part + 1, 0.0)] for part in range(len(means) - 1)] + [[]]
        self._ranks_s = upward_ranks_s(means, follow)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._queues: list[list[Placed[SlotName]]] = [[] for _ in resources]
        self._running: list[PartId | None] = [None for _ in resources]
        self._idle_since: list[float | None] = [None for _ in resources]
        self._free_replicas = list(range(scene.replicas))
        self._replica: dict[int, int] = {}
        self._arrived: list[int] = []  # batches without a replica
        self._booked: dict[PartId, Placed[SlotName]] = {}
        self._ended: set[PartId] = set()
        self._versions: dict[tuple[SlotName, NodeId], int] = {}  # what physically lies there
        self._writer: dict[SlotName, NodeId] = {}
        self._copies: set[tuple[SlotName, NodeId]] = set()  # under way

    def run(self) -> Played:
        for batch, at_s in enumerate(self.arrivals_s):
            self._at(at_s, lambda batch=batch: self._arrive(batch))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heappop(self._events)
            event()
            while not self._events or self._events[0][0] > self.now:
                if not self._advance():
                    break
            self.check()
        assert len(self._ended) == len(self.arrivals_s) * len(self.scene.parts_s), "a part never ran"
        return self.played

    def check(self) -> None:
        """Compare what the placer believes with what was booked and is running."""
        for resource, worker in enumerate(self.placer.workers):
            waiting = self._queues[resource]
            booked_s = sum(placed.compute_s + placed.transfer_s for placed in waiting)
            running = self._running[resource]
            assert math.isclose(worker.exp_len_s, booked_s, abs_tol=1e-12), "a prediction was not taken back"
            assert worker.tasks == len(waiting) + (running is not None), "a prediction was not taken back"
            assert worker.exp_start_s(self.now) >= self.now, "exp_start lies in the past"
            if running is None:
                assert worker.exp_start_s(self.now) == self.now, "an idle worker is thought busy"

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        self._made += 1
        heappush(self._events, (at_s, self._made, event))

    def _arrive(self, batch: int) -> None:
        self._arrived.append(batch)

    def _advance(self) -> bool:
        """Launch, place and begin what can be; whether anything changed."""
        changed = False
        while self._arrived and self._free_replicas:
            batch = self._arrived.pop(0)
            self._replica[batch] = self._free_replicas.pop(0)
            self._write(self._slot((batch, 0)), self.nodes[0], batch, 0)
            self._ready((batch, 0))
            changed = True
        for placed in self.placer.place(self.now):
            part: PartId = placed.task.id  # type: ignore[assignment]
            assert part not in self._booked, "placed twice"
            self._booked[part] = placed
            self._queues[placed.resource].append(placed)
            if self.scene.prefetch:
                self._copy(placed)
            changed = True
        waiting = len(self._arrived) + sum(map(len, self._queues))
        for resource in range(len(self._queues)):
            changed |= self._begin(resource)
        self.played.most_waiting = max(self.played.most_waiting, waiting)
        return changed

    def _ready(self, part: PartId) -> None:
        batch, number = part
        everywhere = tuple(range(len(self._queues)))
        self.placer.ready(
            ReadyTask(
                part,
                Footprint(str(number)),
                tuple(self.scene.allowed[number]) if self.scene.allowed else everywhere,
                (self._slot(part),),
                batch,
                self._ranks_s[number],
            )
        )

    def _begin(self, resource: int) -> bool:
        queue = self._queues[resource]
        if self._running[resource] is not None or not queue:
            return False
        if self.scene.policy is PlacementPolicy.HEFT:
            queue.sort(key=lambda placed: placed.task.order)
        placed = queue[0]
        if not self.scene.prefetch:
            self._copy(placed)
        if any((slot, self.nodes[resource]) in self._copies for slot in placed.task.reads):
            self._idle_since[resource] = self._idle_since[resource] or self.now
            return False
        since = self._idle_since[resource]
        self.played.idle_for_copies_s += 0.0 if since is None else self.now - since
        self._idle_since[resource] = None
        queue.pop(0)
        part: PartId = placed.task.id  # type: ignore[assignment]
        for slot in placed.task.reads:
            lies = self._versions.get((slot, self.nodes[resource]))
            assert lies == part[0], "a slot is read on a node where it is not valid"
        self.placer.begin(part, self.now)
        self._running[resource] = part
        seconds = self._duration_s(part, resource)
        self._at(self.now + seconds, lambda: self._end(part, resource, seconds))
        return True

    def _duration_s(self, part: PartId, resource: int) -> float:
        batch, number = part
        seconds = self.scene.parts_s[number][resource]
        if batch >= self.scene.slows_at and resource == len(self._queues) - 1:
            seconds *= self.scene.slower
        return seconds * math.exp(self._random.gauss(0.0, self.scene.spread))

    def _end(self, part: PartId, resource: int, seconds: float) -> None:
        batch, number = part
        assert part not in self._ended, "a part ended twice"
        self._ended.add(part)
        self._running[resource] = None
        self.placer.end(part, seconds)
        self.placer.residency.release(self._slot(part))
        if number == 0:
            self.played.heads_away += resource != 0
        if number + 1 < len(self.scene.parts_s):
            self._write(self._slot((batch, number + 1)), self.nodes[resource], batch, number + 1)
            self._ready((batch, number + 1))
            return
        self.played.latencies_s[batch] = self.now - self.arrivals_s[batch]
        self.played.away[batch] = resource != 0
        self._free_replicas.append(self._replica.pop(batch))

    def _slot(self, part: PartId) -> SlotName:
        return (self._replica[part[0]], part[1])

    def _write(self, slot: SlotName, node: NodeId, batch: int, number: int) -> None:
        """Other nodes keep what lay there before."""
        self._versions[slot, node] = batch
        self._writer[slot] = node
        nbytes = self.scene.border_bytes[number] if self.scene.border_bytes else 0
        self.placer.residency.write(slot, node, [nbytes])

    def _copy(self, placed: Placed[SlotName]) -> None:
        node = self.nodes[placed.resource]
        for slot in placed.copies:
            version = self._versions[slot, self._writer[slot]]
            if (slot, node) in self._copies or self._versions.get((slot, node)) == version:
                continue
            self._copies.add((slot, node))
            number = slot[1]
            nbytes = self.scene.border_bytes[number] if self.scene.border_bytes else 0

            def arrive(slot: SlotName = slot, version: int = version) -> None:
                self._versions[slot, node] = version
                self._copies.discard((slot, node))

            self._at(self.now + self.scene.bus.copy_s([nbytes]), arrive)


def evenly(rate_per_s: float, batches: int) -> list[float]:
    """Arrivals at equal distances."""
    return [batch / rate_per_s for batch in range(batches)]


def poisson(rate_per_s: float, batches: int, seed: int) -> list[float]:
    """Arrivals of a Poisson process."""
    random = Random(seed)
    times, at_s = [], 0.0
    for _ in range(batches):
        at_s += random.expovariate(rate_per_s)
        times.append(at_s)
    return times


MOST_WAITING = 4
"""Batches, where a rate is said to be carried."""


def keeps_up(played: Played) -> bool:
    """Latency does not grow (slope not above 0 at 95 %), and at most `MOST_WAITING` batches wait."""
    latencies_s = played.latencies_s[len(played.latencies_s) // 10 :]
    count = len(latencies_s)
    centre, mean = (count - 1) / 2, fmean(latencies_s)
    spread = sum((i - centre) ** 2 for i in range(count))
    slope = sum((i - centre) * (one - mean) for i, one in enumerate(latencies_s)) / spread
    residual = sum((one - mean - slope * (i - centre)) ** 2 for i, one in enumerate(latencies_s))
    error = math.sqrt(residual / (count - 2) / spread)
    return slope <= 1.645 * error + 1e-12 and played.most_waiting <= MOST_WAITING


def highest_rate(scene: Scene, known_per_s: float, *, batches: int = 300) -> float:
    """The highest rate at which evenly spaced batches keep up, as a share of the known one, to 0.5 %.

    Looked for from above: below it there are rates at which latencies rise and fall so slowly that 300
    batches see a slope.
    """
    for step in range(40):
        share = 1.02 - 0.005 * step
        if keeps_up(World(scene, evenly(share * known_per_s, batches)).run()):
            return share
    return 0.0


def two_resources(
    slow: float, tail: float, policy: PlacementPolicy, *, heads: Sequence[int] = (0, 1)
) -> Scene:
    """A model of one second, cut in two, on a fast resource and one that is `slow` times slower."""
    return Scene(
        parts_s=[[1 - tail, slow * (1 - tail)], [tail, slow * tail]], policy=policy, allowed=[heads, (0, 1)]
    )


def known_rate(slow: float, tail: float) -> float:
    """Batches a second: 1 / (g1 + g2 - f* g2) with f* = min(1, (g1 + g2) / (g2 + c2))."""
    return 1 / (1 - tail * min(1.0, 1 / (tail + slow * tail)))


CUTS = ((3.0, 0.1), (3.0, 0.25), (3.0, 0.35), (6.0, 0.1), (6.0, 1 / 7), (6.0, 0.25))
"""The slow factor, and the tail's share of the model."""
