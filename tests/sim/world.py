"""One planner, its devices, their engines, disks and the network, all driven by one seed and one clock.

The cores are the real ones: dispatch core, lifecycle core, engine core; so are the spool, the state
files and the artifact folder. Every action and every failpoint is a place where a process may stop. After
every step `watch` checks what must hold; when the faults are over the world must converge.
"""

import heapq
import logging
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import msgspec

from stageloom.edge_agent.lifecycle.states import VERDICTS
from stageloom.edge_agent.link import spool
from stageloom.planner.dispatch.ports import FleetMember, TelemetryWrite
from stageloom.shared import failpoint
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.ids import DeviceId, TaskId
from stageloom.shared.messages.control import Activation, Autonomy, Desired, DeviceState, Report
from tests.link.memory_store import MemoryStore
from tests.sim.agent import Agent
from tests.sim.faults import FAULTS_END_S, Faults
from tests.sim.library import BAD, MODELS, SOUND, KnownPlan, Nature, stock
from tests.sim.network import DOWN, UP, Network
from tests.sim.planner import Planner
from tests.sim.watch import Watch, require

DEVICE = DeviceId("sim")
KEY = "k" * 40
BATCH_ROWS = 24
"""A backlog takes several batches, as it does in earnest."""
PATIENCE_S = 180.0
"""A world that has not converged so long after its last fault never does."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often things happen by themselves, in seconds."""

    tick_s: float = 0.25
    planner_tick_s: float = 0.5
    heartbeat_s: float = 1.0
    dead_s: float = 4.0
    measure_s: float = 0.7
    task_s: float = 0.8


@dataclass
class Store(MemoryStore):
    """The planner's store, which also knows its rows as one mask per boot."""

    masks: dict[int, int] = field(default_factory=dict)
    written: int = 0
    audited: int = 0  # `written` when the books were last checked

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> Sequence[tuple[DeviceId, Desired]]:
        told = super().append_telemetry(writes)
        self.written += 1
        for write in writes:
            for row in write.rows:
                if (write.device, row.boot, row.sequence) in self.rows:
                    self.masks[row.boot] = self.masks.get(row.boot, 0) | 1 << row.sequence
        return told

    def snapshot(self) -> Self:
        copy = super().snapshot()
        copy.masks = dict(self.masks)
        return copy


class Pipe:
    """Messages that keep their order, each a while after the one before."""

    def __init__(self, world: "World", delays_s: tuple[float, ...]) -> None:
        self._world = world
        self._delays_s = delays_s
        self._last_s = 0.0
        self._open = True

    def put(self, do: Callable[[], None]) -> None:
        """Happens later, unless the pipe is closed before."""
        world = self._world
        self._last_s = max(self._last_s, world.now_s + world.rng.choice(self._delays_s))
        world.later(self._last_s - world.now_s, lambda: do() if self._open else None)

    def close(self) -> None:
        """What has not arrived never does."""
        self._open = False


class World:
    """One scenario; `run` plays it to its end."""

    def __init__(
        self, seed: int, folder: Path, faults: Faults | None = None, pace: Pace | None = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = Faults.draw(self.rng) if faults is None else faults
        self.pace = pace or Pace()
        self.now_s = 0.0
        self.faults_end_s = FAULTS_END_S
        self.log: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=400)
        self.happened: Counter[str] = Counter()
        self.points: set[str] = set()
        self.outcomes: Counter[Outcome] = Counter()
        self.runs_now: Agent | None = None
        self.steps = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._wall_offset_us = 1_700_000_000_000_000
        self._next_task = 0
        self._folder = folder
        self._draw_plans()
        self.store = Store(artifacts=dict(stock().blobs))
        self.store.members[DEVICE] = FleetMember(DEVICE, KEY)
        self.backup = self.store.snapshot()
        self.network = Network(self)
        self.watch = Watch(self)
        self.planner: Planner | None = Planner(self)
        self.agents = [Agent(self, "agent", folder, KEY)]

    def _draw_plans(self) -> None:
        """How each plan behaves here."""
        known = stock()
        self.plans = [*self.rng.sample(known.plans, 7), self.rng.choice(known.nonsense)]
        self.bound = {plan.digest: plan.bound for plan in self.plans if plan.bound is not None}
        self.natures = {
            plan.digest: Nature(legal=False) if plan.bound is None else self._nature() for plan in self.plans
        }
        self.last_word = self.plans[0]
        self.natures[self.last_word.digest] = SOUND

    def _nature(self) -> Nature:
        speed = self.rng.choice((0.7, 1.0, 1.3, 1.6))
        return self.rng.choice(BAD[1:]) if self.rng.random() < 0.4 else Nature(speed=speed)

    # -- what everything here uses --------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        """The device's own agent; others are copies of its key."""
        return self.agents[0]

    @property
    def member(self) -> FleetMember:
        """The device as the planner's store has it."""
        return self.store.members[DEVICE]

    @property
    def calm(self) -> bool:
        """Nothing goes wrong any more."""
        return self.now_s >= self.faults_end_s

    @property
    def measures(self) -> bool:
        """Telemetry is produced; it ends so that the end can be waited for."""
        return self.now_s < self.faults_end_s + 3.0

    def chance(self, probability: float) -> bool:
        """Whether something bad happens now."""
        return probability > 0.0 and not self.calm and self.rng.random() < probability

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Do it after a while."""
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, do))

    def pipe(self, *delays_s: float) -> Pipe:
        """A channel between two processes or threads of one machine."""
        return Pipe(self, delays_s or (0.0, 0.001, 0.05))

    def note(self, who: str, text: str, *values: Any) -> None:
        """A line of the event log, put into words only when somebody reads it."""
        self.log.append((self.now_s, who, text, values))

    def wall_us(self) -> int:
        """What clocks on the wall show: anything."""
        return self._wall_offset_us + round(self.now_s * 1e6)

    def new_task(self) -> TaskId:
        """A number that no task had before."""
        self._next_task += 1
        return TaskId(self._next_task)

    # -- the course of a scenario ---------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, calm, and a last word that must be obeyed."""
        first = next(plan for plan in self.plans if len(plan.needs) == MODELS)
        if self.rng.random() < 0.7:
            self.natures[first.digest] = SOUND
            self.later(0.5, lambda: self.push(first) if self.planner is not None else None)
        for _ in range(self.rng.randint(1, 4)):
            self.later(self.rng.random() * (self.faults_end_s - 3.0), self.operator)
        if self.chance(self.faults.clone):
            self.later(self.rng.random() * self.faults_end_s, self.join_clone)
        self.begin()
        self.until(self.faults_end_s)
        self.dismiss_clones()
        self.converge()
        self.push(self.last_word)
        self.converge()
        self.check_obeyed()

    def begin(self) -> None:
        """Start the device."""
        self.later(0.0, self._second)
        self.agent.start()

    def until(self, end_s: float) -> None:
        """Play until this time, checking after every step."""
        queue, watch = self._queue, self.watch
        with armed(self._reached):
            while queue and queue[0][0] <= end_s:
                self.now_s, _, do = heapq.heappop(queue)
                self.steps += 1
                do()
                watch.check()
        self.now_s = end_s

    def converge(self, patience_s: float = PATIENCE_S) -> None:
        """Play until nothing is left to be done, and see that it stays so."""
        give_up_s = self.now_s + patience_s
        quiet = 0
        while quiet < 2:
            self.until(self.now_s + 1.5)
            problem = self.unsettled()
            quiet = 0 if problem else quiet + 1
            require(not problem or self.now_s < give_up_s, "convergence", problem)

    def _reached(self, point: str) -> None:
        if self.runs_now is not None:
            self.runs_now.reached(point)

    def _second(self) -> None:
        self.later(1.0, self._second)
        if self.calm:
            return
        if self.chance(self.faults.cut):
            directions = self.rng.choice(((UP,), (DOWN,), (UP, DOWN)))
            length_s = min(self.rng.random() * 12, self.faults_end_s - self.now_s)
            self.note("network", "cut %s for %.1f s", directions, length_s)
            self.happened[f"cut {directions}"] += 1
            self.network.cut(directions, length_s)
        if self.chance(self.faults.corrupt) and self.agent.home.is_dir():
            self.agent.damage()
        if self.chance(self.faults.wall_jump):
            self.happened["wall_jump"] += 1
            self._wall_offset_us = self.rng.randrange(0, 4_000_000_000_000_000)
        if self.chance(self.faults.alarm) and self.agent.up:
            self.happened["alarm"] += 1
            self.agent.alarm(self.rng.choice(self.plans))
        if self.chance(0.1):
            self.backup = self.store.snapshot()

    def operator(self) -> None:
        """A person pushes a plan, or the same one again."""
        if self.planner is None:
            self.later(1.0, self.operator)
        elif self.rng.random() < 0.2 and self.member.desired is not None:
            self.planner.push(DEVICE, self.member.desired)
        else:
            now = self.rng.random() < 0.2
            activation = Activation.NOW if now else Activation.TRIAL
            self.push(self.rng.choice(self.plans), activation, self.rng.choice(list(Autonomy)))

    def push(
        self,
        plan: KnownPlan,
        activation: Activation = Activation.NOW,
        autonomy: Autonomy = Autonomy.OFF,
    ) -> None:
        """Desire a plan."""
        assert self.planner is not None, "nobody to push to"
        self.note("operator", "pushes %s, which is %s", plan.digest[:8], self.natures[plan.digest])
        self.planner.push(
            DEVICE,
            Desired(
                epoch=0,
                generation=0,
                plan_digest=plan.digest,
                plan=plan.wire,
                artifacts=plan.needs,
                activation=activation,
                autonomy=autonomy,
            ),
        )

    def planner_stops(self) -> None:
        """The planner's process is gone; another one starts after a while, perhaps on an older database."""
        if self.planner is None:
            return
        self.note("planner", "stops")
        self.happened["planner_crash"] += 1
        self.planner.alive = False
        self.planner = None
        self.network.planner_stopped()
        if self.chance(self.faults.restore):
            self.restore()
        self.later(self.rng.random() * 4, self.planner_starts)

    def planner_starts(self) -> None:
        """On what the store has."""
        self.note("planner", "starts")
        self.planner = Planner(self)

    def restore(self) -> None:
        """An older copy takes the database's place."""
        self.note("planner", "an older database is restored")
        self.happened["restore"] += 1
        old, self.store = self.store, self.backup.snapshot()
        for boot, mask in old.masks.items():
            self.watch.lost[boot] |= mask & ~self.store.masks.get(boot, 0)
        self.watch.restored()

    def join_clone(self) -> None:
        """A second agent with the same key appears."""
        self.happened["clone"] += 1
        clone = Agent(self, "clone", self._folder, KEY)
        self.agents.append(clone)
        clone.start()

    def dismiss_clones(self) -> None:
        """Only the device's own agent stays."""
        for clone in self.agents[1:]:
            clone.crash()
            clone.ended = True

    # -- the end --------------------------------------------------------------------------------------------

    def unsettled(self) -> str:
        """What planner and device still disagree about; nothing when they have converged."""
        agent, member = self.agent, self.member
        if not agent.up or not agent.core.session.welcomed:
            return "the device is not connected"
        state, report = agent.core.state, agent.core.report()
        # Which value the device knows, not what it did with it; the planner keeps none of it.
        kept = msgspec.structs.replace(report, activation=None, autonomy=None)
        if (member.report or Report()) != kept:  # one that says nothing yet need not be stored
            return f"the planner has {member.report}, the device reports {kept}"
        if member.desired is not None and _named(state.desired) != _named(member.desired):
            return f"desired is {_named(member.desired)}, the device knows {_named(state.desired)}"
        if state.desired is not None and state.state not in (DeviceState.COMMITTED, *VERDICTS):
            return f"the device is still {state.state}"
        running = agent.engine.running if agent.engine is not None else None
        if running != report.active:
            return f"{running} runs, {report.active} is reported"
        if agent.spool.counts().spooled:
            return "telemetry did not drain"
        told = {boot: book for (_, boot), book in self.store.books.items()}
        for boot, (produced, dropped, _) in agent.spool.masks().items():
            known = told.get(boot)
            counts = (produced.bit_length(), dropped.bit_count())
            if counts != (0, 0) and (known is None or (known.produced, known.dropped) < counts):
                return f"the planner counts {known} of {counts}"
        return "tasks are open" if agent.open and not self._serves() else ""

    def _serves(self) -> bool:
        """Whether the youngest of the open tasks is young."""
        return max(self.agent.open) > self._next_task - 20

    def check_obeyed(self) -> None:
        """The last word was pushed when all was calm, and is sound: it is committed and runs."""
        state = self.agent.core.state
        committed = state.state is DeviceState.COMMITTED
        require(committed, "convergence", f"a sound plan pushed in calm is {state.state}: {state.reason}")
        active = self.agent.core.report().active
        require(active == self.last_word.digest, "convergence", f"{active} runs after the last word")

    def story(self, lines: int = 60) -> str:
        """The last events, one a line."""
        return "\n".join(_line(*entry) for entry in list(self.log)[-lines:])


def _named(desired: Desired | None) -> tuple[object, ...]:
    """What makes a desired value this one and no other."""
    return (desired.epoch, desired.generation, desired.plan_digest) if desired is not None else ()


def _line(now_s: float, who: str, text: str, values: tuple[Any, ...]) -> str:
    words = text % tuple(_short(value) for value in values) if values else text
    return f"{now_s:9.3f} {who:8} {words}"


def _short(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}..."


@contextmanager
def armed(act: Callable[[str], None]) -> Iterator[None]:
    """Failpoints call `act` within the block."""
    before = failpoint.arm(act)
    try:
        yield
    finally:
        failpoint.arm(before)


@contextmanager
def silence() -> Iterator[None]:
    """What the real code logs about thousands of full disks tells nobody anything."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def scratch() -> "tempfile.TemporaryDirectory[str]":
    """A folder in memory where there is one: syncing to a disk says nothing here."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


@contextmanager
def world(seed: int, faults: Faults | None = None, pace: Pace | None = None) -> Iterator[World]:
    """A world to be played within the block; what goes wrong there is told with seed and events."""
    with scratch() as folder, silence(), patch.object(spool, "MAX_BATCH_ROWS", BATCH_ROWS):
        made = World(seed, Path(folder), faults, pace)
        try:
            yield made
        except BaseException as error:
            error.add_note(f"{made.story()}\n\nreplay with: python -m tests.sim {seed}")
            raise
        finally:
            for agent in made.agents:
                if agent.life:
                    agent.spool.close()


def run(seed: int) -> World:
    """One scenario from its beginning to its end."""
    with world(seed) as made:
        made.run()
    return made
