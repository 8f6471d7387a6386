"""One device with the real lifecycle core, and a played engine process."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from stageloom.edge_agent.ingest.messages import ModelSignature
from stageloom.edge_agent.lifecycle import events
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.events import (
    CheckPlan,
    JournalNote,
    KeepFallback,
    LoadInEngine,
    StartEngine,
    StopEngine,
)
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.probation import ProbationConfig
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.edge_agent.worker.messages import (
    CompareOutputs,
    ModelFigures,
    OpenWindow,
    PauseLaunches,
    SwitchPlan,
    Unload,
    WindowMeasured,
)
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Desired, Origin
from stageloom.shared.messages.telemetry import PlanActivated, TrialEnded


@dataclass(frozen=True)
class Nature:
    """How a plan behaves on this device."""

    legal: bool = True
    loads: bool = True
    crashes_loading: bool = False
    hangs_loading: bool = False
    crashes_after_s: float | None = None
    fails_tasks: bool = False
    speed: float = 1.0  # in the windows of a trial

    @property
    def sound(self) -> bool:
        return replace(self, speed=1.0) == Nature()


SOUND = Nature()
BAD = (
    Nature(legal=False),
    Nature(loads=False),
    Nature(crashes_loading=True),
    Nature(hangs_loading=True),
    Nature(crashes_after_s=0.1),
    Nature(crashes_after_s=2.0),
    Nature(fails_tasks=True),
)


def plan(letter: str) -> RunnablePlan:
    return RunnablePlan(PlanRef(Digest(letter * 64), Origin.PLANNER), letter.encode(), ())


def facts(letter: str, *, comparable: bool = False) -> PlanFacts:
    """Each plan serves a model of its own, so no two can be compared; or all serve the same one."""
    digest = plan(letter).ref.digest
    model, artifact = ("m", Digest("f" * 64)) if comparable else (letter, digest)
    return PlanFacts(digest, {model: ModelSignature(model, (), ())}, {model: artifact})


def desired(letter: str, generation: int) -> Desired:
    return Desired(
        epoch=1, generation=generation, plan_digest=Digest(letter * 64), plan=letter.encode(), artifacts=()
    )


@dataclass
class World:
    """One device. Every channel keeps its order; which of them moves next is random."""

    rng: Random
    natures: dict[str, Nature]
    disk: LinkState
    now_s: float = 0.0
    channels: list[deque[Callable[[], None]]] = field(default_factory=lambda: [deque() for _ in range(3)])
    timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    loaded: dict[PlanKey, str] = field(default_factory=dict)
    running: str | None = None
    kept: bool = False  # the last swap kept the plan before, and the wider bounds of both plans' queues
    hangs: bool = False  # the engine's loading thread
    life: int = 0  # of the engine process; what an earlier one had to say is lost
    fallback: RunnablePlan | None = None
    comparable: bool = False  # all plans serve the same model, under load
    busy: bool = True  # tasks come all the time
    tasks_per_s: float = 1000.0  # that end where the plan's speed is 1; below, the device keeps up
    environment: str = "here"
    trial: TrialConfig = field(default_factory=TrialConfig)
    waiting: WaitingLog = field(default_factory=WaitingLog)
    rows: list[TrialEnded] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)  # every plan that was launched into, in order

    def __post_init__(self) -> None:
        self.boot()

    def boot(self) -> None:
        """The main process starts (again): only the disk remains."""
        for channel in self.channels:
            channel.clear()
        self.timers.clear()
        self.engine_gone()
        self.manager = PlanManager(
            Supervisor(Random(self.rng.random())),
            self.fallback,
            rng=self.rng,
            waiting=self.waiting,
            probation=ProbationConfig(length_s=5.0),
            trial=self.trial,
        )
        config = LinkConfig(boot=self.rng.getrandbits(60) | 1)
        self.core = Lifecycle(self.disk, config=config, plans=self.manager)
        self.core.boot(self.environment, frozenset(), self.now_s)
        self.run()
        self.do([StartEngine(0.0)])

    def engine_gone(self) -> None:
        self.life += 1
        self.hangs = False
        self.loaded.clear()
        self.running = None

    def later(self, channel: int, call: Callable[[], None]) -> None:
        self.channels[channel].append(call)

    def tell(self, event: events.Event) -> None:
        self.core.handle(event, self.now_s)
        self.run()

    def do(self, actions: list[events.Action]) -> None:
        self.core.add(actions)
        self.run()

    def run(self) -> None:
        while (action := self.core.next(self.now_s)) is not None:
            match action:
                case events.Persist(state):
                    self.disk = state
                    self.core.persisted(state)
                case events.Hold(state):
                    self.core.held(state)
                case TrialEnded():
                    self.rows.append(action)
                case CheckPlan(one):
                    self.later(1, lambda one=one: self.check(one))  # type: ignore[misc]
                case LoadInEngine(key, one):
                    self.engine(lambda key=key, one=one: self.load(key, one))  # type: ignore[misc]
                case SwitchPlan(key, keep):
                    self.engine(partial(self.swap, PlanKey(key), keep))
                case PauseLaunches():
                    self.engine(lambda: self.do(self.manager.drained()))
                case OpenWindow():
                    self.engine(partial(self.measure, action))
                case CompareOutputs():
                    self.engine(partial(self.compare, action))
                case PlanActivated():
                    pass
                case Unload(key):
                    self.engine(lambda key=key: self.unload(key))  # type: ignore[misc]
                case StopEngine():
                    self.engine(lambda: self.exit("stopped"))
                case StartEngine(delay_s):
                    self.at(self.now_s + delay_s, self.start)
                case KeepFallback(one):
                    self.fallback = one
                case JournalNote():
                    pass

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self.timers.append((when_s, len(self.timers), call))
        self.timers.sort(key=lambda timer: timer[:2])

    def engine(self, call: Callable[[], None]) -> None:
        life = self.life
        self.later(0, lambda: call() if life == self.life else None)

    def start(self) -> None:
        self.do(self.manager.ready())

    def check(self, one: RunnablePlan) -> None:
        digest, letter = one.ref.digest, one.wire.decode()
        if self.natures[letter].legal:
            self.do(self.manager.checked(facts(letter, comparable=self.comparable)))
        else:
            self.do(self.manager.check_failed(digest, "illegal", frozenset()))

    def load(self, key: PlanKey, one: RunnablePlan) -> None:
        nature = self.natures[one.wire.decode()]
        assert nature.legal, "an unchecked plan reached the engine"
        self.hangs |= nature.hangs_loading
        if self.hangs:
            return
        if nature.crashes_loading:
            self.exit("signal 11")
        elif not nature.loads:
            self.do(self.manager.load_failed(key, "out of memory"))
        else:
            self.loaded[key] = one.wire.decode()
            self.do(self.manager.loaded(key))

    def measure(self, order: OpenWindow) -> None:
        """Tell what the plan that runs did, once the window has ended."""
        life, letter = self.life, self.running

        def report() -> None:
            if life != self.life:
                return
            length_s = order.to_s - order.from_s
            noise = self.rng.gauss(1.0, 0.03)
            speed = self.natures[letter].speed if letter and self.busy else 0.0
            saturated = self.tasks_per_s == 1000.0
            rate = self.tasks_per_s * (noise * speed if saturated else bool(speed))
            tasks = int(rate * length_s + self.rng.random()) if not saturated else round(rate * length_s)
            busy_s = (0.9 * length_s if saturated else 0.0009 * tasks / speed) if tasks else 0.0
            log_latency = tasks * math.log(0.002 / (speed * noise)) if tasks else 0.0
            figures = ModelFigures("m", tasks, busy_s, tasks, tasks * 0.002, tasks, tasks, log_latency)
            p99_s = 0.002 if tasks else 0.0
            seen = (figures,), tasks, tasks
            self.do(
                self.manager.measured(
                    WindowMeasured(order.number, 1, length_s, busy_s, saturated, 0, p99_s, 0.0, *seen),
                    self.now_s,
                )
            )

        self.at(order.to_s, report)

    def compare(self, order: CompareOutputs) -> None:
        """The engine runs two versions on inputs of real tasks."""
        raise AssertionError("nobody asked for a comparison of outputs here")

    def swap(self, key: PlanKey, keep: bool = False) -> None:
        if key not in self.loaded:  # freed already, though the manager has not heard of it yet
            self.do(self.manager.load_failed(key, f"plan {key} is not loaded"))
            return
        letter = self.loaded[key]
        old = next((k for k, name in self.loaded.items() if name == self.running and k != key), None)
        self.running, self.kept = letter, keep
        self.ran.append(letter)
        nature, life = self.natures[letter], self.life
        self.do(self.manager.activated(key, self.now_s))
        if keep:
            self.engine(lambda: self.do(self.manager.settled(key, self.now_s)))
        if old is not None and not keep:
            del self.loaded[old]
            # The word of it waits behind whatever else the engine process prepares.
            self.later(2, lambda: self.do(self.manager.released(old)) if life == self.life else None)
        if nature.crashes_after_s is not None:
            self.at(
                self.now_s + nature.crashes_after_s,
                lambda: self.exit("signal 11") if self.still(life, letter) else None,
            )
        outcome = Outcome.FAILED if nature.fails_tasks else Outcome.COMPLETED
        for i in range(5):
            self.at(
                self.now_s + i / 5,
                lambda: (
                    self.do(self.manager.task_ended(outcome, "wrong", key))
                    if self.still(life, letter)
                    else None
                ),
            )

    def still(self, life: int, letter: str) -> bool:
        """The same engine process runs the same plan."""
        return (life, letter) == (self.life, self.running)

    def unload(self, key: PlanKey) -> None:
        assert self.loaded.get(key) != self.running, "the running plan was unloaded"
        self.loaded.pop(key, None)
        self.do(self.manager.released(key))

    def exit(self, how: str) -> None:
        self.engine_gone()
        self.do(self.manager.exited(how, self.now_s))

    def step(self) -> bool:
        """One thing happens; False when all is quiet."""
        busy = [channel for channel in self.channels if channel]
        if busy and (not self.timers or self.rng.random() < 0.9):
            self.rng.choice(busy).popleft()()
            return True
        if self.timers:
            when_s, _, call = self.timers.pop(0)
            self.now_s = max(self.now_s, when_s)
            call()
            return True
        return False

    def settle(self, seconds: float = 400.0) -> None:
        """Until nothing happens any more, and for a while after."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for _ in range(10_000):
                if not any(self.channels) and (not self.timers or self.timers[0][0] > self.now_s):
                    break
                self.step()
            else:
                raise AssertionError("it never comes to rest")
            self.now_s += 0.5
            while self.timers and self.timers[0][0] <= self.now_s:
                self.timers.pop(0)[2]()
            self.do(self.manager.tick(self.now_s))
            self.tell(events.TimePassed())


def deploy(world: World, letter: str, generation: int) -> None:
    world.tell(events.Received(desired(letter, generation)))


GOOD = LinkState(last_good=plan("g"))


def world_of(seed: int, natures: dict[str, Nature], disk: LinkState = GOOD, **changes: Any) -> World:
    return World(Random(seed), {"g": SOUND, **natures}, disk, **changes)
