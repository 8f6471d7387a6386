"""The plan manager with the real link core and a played engine: deployments, crashes, kills, any order."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from edge_agent.ingest.messages import ModelInfo
from edge_agent.link import events as link
from edge_agent.link.core import LinkConfig, LinkCore
from edge_agent.link.events import LinkState, PlanRef, RunnablePlan
from edge_agent.plan_actions import (
    Action,
    CheckPlan,
    KeepFallback,
    LoadPlan,
    Note,
    StartEngine,
    StopEngine,
    SwapTo,
    Tell,
    UnloadPlan,
)
from edge_agent.plan_facts import PlanFacts
from edge_agent.plans import ManagerConfig, Phase, PlanManager
from edge_agent.probation import ProbationConfig
from edge_agent.supervisor import Supervisor
from shared.engine.steps import Outcome, PlanKey
from shared.ids import Digest
from shared.messages.control import Desired, DeviceState, Origin


@dataclass(frozen=True)
class Nature:
    """How a plan behaves on this device."""

    legal: bool = True
    loads: bool = True
    crashes_loading: bool = False
    hangs_loading: bool = False
    crashes_after_s: float | None = None
    fails_tasks: bool = False

    @property
    def sound(self) -> bool:
        return self == Nature()


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


def facts(letter: str) -> PlanFacts:
    """Each plan serves a model of its own, so no two can be compared."""
    digest = plan(letter).ref.digest
    return PlanFacts(digest, {letter: ModelInfo(letter, (), ())}, {letter: digest})


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
    channels: list[deque[Callable[[], None]]] = field(default_factory=lambda: [deque() for _ in range(5)])
    timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    loaded: dict[PlanKey, str] = field(default_factory=dict)
    running: str | None = None
    hangs: bool = False  # the engine's loading thread
    life: int = 0  # of the engine process; what an earlier one had to say is lost
    fallback: RunnablePlan | None = None

    def __post_init__(self) -> None:
        self.boot()

    def boot(self) -> None:
        """The main process starts (again): only the disk remains."""
        for channel in self.channels:
            channel.clear()
        self.timers.clear()
        self.engine_gone()
        self.core = LinkCore(self.disk, config=LinkConfig(boot=self.rng.getrandbits(60) | 1))
        self.manager = PlanManager(
            Supervisor(Random(self.rng.random())),
            ManagerConfig(probation=ProbationConfig(length_s=5.0)),
            self.fallback,
        )
        self.from_core(self.core.boot("here", frozenset(), self.now_s))
        self.do([StartEngine(0.0)])

    def engine_gone(self) -> None:
        self.life += 1
        self.hangs = False
        self.loaded.clear()
        self.running = None

    def later(self, channel: int, call: Callable[[], None]) -> None:
        self.channels[channel].append(call)

    def from_core(self, actions: list[link.Action]) -> None:
        for action in actions:
            match action:
                case link.Persist(state):
                    self.disk = state
                    self.core.persisted(state)
                case link.RestorePlan(one):
                    self.later(0, lambda one=one: self.do(self.manager.restore(one)))  # type: ignore[misc]
                case link.VerifyPlan(attempt, one):
                    self.order(self.manager.verify, attempt, one)
                case link.StagePlan(attempt, one):
                    self.order(self.manager.stage, attempt, one)
                case link.ActivatePlan(attempt, one):
                    self.order(self.manager.activate, attempt, one)
                case link.AbandonPlan(attempt):
                    self.order(self.manager.abandon, attempt)

    def order(self, method: Callable[..., list[Action]], *args: Any) -> None:
        self.later(0, lambda: self.do(method(*args)))

    def tell(self, event: link.Event) -> None:
        self.from_core(self.core.handle(event, self.now_s))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case CheckPlan(one):
                    self.later(1, lambda one=one: self.check(one))  # type: ignore[misc]
                case LoadPlan(key, one):
                    self.engine(lambda key=key, one=one: self.load(key, one))  # type: ignore[misc]
                case SwapTo(key):
                    self.engine(lambda key=key: self.swap(key))  # type: ignore[misc]
                case UnloadPlan(key):
                    self.engine(lambda key=key: self.unload(key))  # type: ignore[misc]
                case StopEngine():
                    self.engine(lambda: self.exit("stopped"))
                case StartEngine(delay_s):
                    self.at(self.now_s + delay_s, self.start)
                case Tell(event):
                    self.later(2, lambda event=event: self.tell(event))  # type: ignore[misc]
                case KeepFallback(one):
                    self.fallback = one
                case Note():
                    pass

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self.timers.append((when_s, len(self.timers), call))
        self.timers.sort(key=lambda timer: timer[:2])

    def engine(self, call: Callable[[], None]) -> None:
        life = self.life
        self.later(3, lambda: call() if life == self.life else None)

    def start(self) -> None:
        self.do(self.manager.ready())

    def check(self, one: RunnablePlan) -> None:
        digest, letter = one.ref.digest, one.wire.decode()
        if self.natures[letter].legal:
            self.do(self.manager.checked(facts(letter)))
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

    def swap(self, key: PlanKey) -> None:
        if key not in self.loaded:  # freed already, though the manager has not heard of it yet
            self.do(self.manager.load_failed(key, f"plan {key} is not loaded"))
            return
        letter = self.loaded[key]
        old = next((k for k, name in self.loaded.items() if name == self.running and k != key), None)
        self.running = letter
        nature, life = self.natures[letter], self.life
        self.do(self.manager.activated(key, self.now_s))
        if old is not None:
            del self.loaded[old]
            # The word of it waits behind whatever else the engine process prepares.
            self.later(4, lambda: self.do(self.manager.released(old)) if life == self.life else None)
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
        assert self.loaded[key] != self.running, "the running plan was unloaded"
        del self.loaded[key]
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
            self.tell(link.Tick())


def deploy(world: World, letter: str, generation: int) -> None:
    world.tell(link.Received(desired(letter, generation)))


GOOD = LinkState(last_good=plan("g"))


def world_of(seed: int, natures: dict[str, Nature], disk: LinkState = GOOD) -> World:
    return World(Random(seed), {"g": SOUND, **natures}, disk)


@pytest.mark.parametrize("seed", range(20))
def test_sound_plan_is_committed_and_becomes_last_known_good(seed: int) -> None:
    world = world_of(seed, {"a": SOUND})
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state is DeviceState.COMMITTED
    assert world.core.state.last_good == plan("a")
    assert world.running == "a"
    assert world.fallback == plan("g")
    assert list(world.loaded.values()) == ["a"]


@pytest.mark.parametrize("nature", BAD)
@pytest.mark.parametrize("seed", range(10))
def test_bad_plan_gets_a_verdict_with_a_reason_and_the_good_one_serves(seed: int, nature: Nature) -> None:
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
    assert world.core.state.reason
    assert world.core.state.last_good == plan("g")
    assert world.running == "g"
    report = world.core.report()
    assert report.active == plan("g").ref.digest, "a rolled-back device must not report the other plan"


def test_bad_plan_without_a_good_one_ends_idle(seed: int = 0) -> None:
    world = world_of(seed, {"a": Nature(fails_tasks=True)}, LinkState())
    deploy(world, "a", 1)
    world.settle()
    assert world.core.state.state is DeviceState.ROLLED_BACK
    assert world.running is None
    assert world.manager.engine_up


def test_last_good_plan_that_keeps_crashing_gives_way_to_the_one_before() -> None:
    world = world_of(3, {"a": Nature(crashes_after_s=20.0), "g": SOUND})
    deploy(world, "a", 1)
    world.settle(8.0)
    assert world.core.state.last_good == plan("a"), "it outlived its probation"
    world.settle()
    assert world.running == "g"
    active = world.core.report()
    assert (active.active, active.origin) == (plan("g").ref.digest, Origin.FALLBACK)


def test_last_good_plan_that_keeps_crashing_with_nothing_before_it_ends_idle_not_in_a_loop() -> None:
    world = world_of(3, {"g": Nature(crashes_after_s=1.0)})
    world.settle()
    assert world.running is None
    assert world.manager.engine_up
    assert world.life < 10


@pytest.mark.parametrize("seed", range(60))
def test_kills_at_any_moment_end_in_the_desired_plan_or_a_verdict(seed: int) -> None:
    rng = Random(seed)
    nature = rng.choice((SOUND, SOUND, *BAD))
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    for _ in range(rng.randint(1, 60)):
        world.step()
    if rng.random() < 0.5:
        world.boot()  # kill -9 of the main process, which takes the engine with it
    else:
        world.exit("signal 9")
    world.settle()
    state = world.core.state
    if nature.sound and state.state is DeviceState.COMMITTED:
        assert world.running == "a"
        assert state.last_good == plan("a")
    else:
        assert state.state in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
        assert world.running == "g"
    assert world.core.report().active == plan(world.running).ref.digest


@pytest.mark.parametrize("seed", range(60))
def test_newer_generations_overtake_older_ones_in_any_order_of_events(seed: int) -> None:
    rng = Random(seed)
    natures = {letter: rng.choice((SOUND, *BAD)) for letter in "abc"}
    world = world_of(seed, {**natures, "d": SOUND})
    for generation, letter in enumerate("abc", 1):
        deploy(world, letter, generation)
        for _ in range(rng.randint(0, 40)):
            world.step()
    deploy(world, "d", 4)
    world.settle()
    if world.core.state.state is not DeviceState.COMMITTED:
        # What ran until then brought the engine down in the very moment in which `d` was loaded.
        assert "crashed while it was loaded" in world.core.state.reason
        assert world.running == "g"
        return
    assert world.running == "d"
    assert list(world.loaded.values()) == ["d"], "what was staged in between is freed"
    assert world.core.report().active == plan("d").ref.digest


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nature", [SOUND, Nature(fails_tasks=True), Nature(crashes_after_s=2.0)])
def test_plan_desired_again_while_on_probation_still_gets_a_verdict(nature: Nature, seed: int) -> None:
    """A second push, or a profile that is asked for, makes a new generation of the plan that already runs."""
    rng = Random(seed)
    world = world_of(seed, {"a": nature})
    deploy(world, "a", 1)
    while world.running != "a":
        world.step()
    for _ in range(rng.randint(0, 8)):
        world.step()
    deploy(world, "a", 2)
    world.settle()
    if nature.sound:
        assert world.core.state.state is DeviceState.COMMITTED
        assert world.core.state.last_good == plan("a")
    else:
        assert world.core.state.state in (
            DeviceState.REJECTED,
            DeviceState.ROLLED_BACK,
            DeviceState.COMMITTED,
        )
    assert world.core.report().active == plan(world.running or "-").ref.digest


def test_damaged_artifact_is_asked_for_again_and_the_plan_is_not_blamed() -> None:
    manager = PlanManager(Supervisor(Random(0)))
    manager.ready()
    manager.verify((1, 1), plan("a"))
    artifact = Digest("f" * 64)
    actions = manager.check_failed(plan("a").ref.digest, "damaged", frozenset({artifact}))
    assert Tell(link.ArtifactGone(artifact)) in actions
    assert not any(isinstance(a, Tell) and isinstance(a.event, link.PlanRefused) for a in actions)


def test_repeated_orders_change_nothing() -> None:
    manager = PlanManager(Supervisor(Random(0)))
    manager.ready()
    assert manager.verify((1, 1), plan("a")) == [CheckPlan(plan("a"))]
    assert manager.verify((1, 1), plan("a")) == []
    manager.checked(facts("a"))
    (load,) = manager.stage((1, 1), plan("a"))
    assert isinstance(load, LoadPlan)
    assert manager.stage((1, 1), plan("a")) == []
    assert Tell(link.PlanStaged((1, 1))) in manager.loaded(load.key)
    assert manager.activate((1, 1), plan("a")) == [SwapTo(load.key)]
    assert manager.activate((1, 1), plan("a")) == []
    manager.activated(load.key, 0.0)
    assert manager.activate((1, 1), plan("a")) == []
    assert manager.phase is Phase.PROBATION


def manager_under_probation() -> tuple[PlanManager, PlanKey, PlanKey]:
    """The good plan `g` ran, `n` is under probation; their keys."""
    manager = PlanManager(Supervisor(Random(0)), ManagerConfig(probation=ProbationConfig(min_failed=1)))
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    assert isinstance(load, LoadPlan)
    assert manager.loaded(load.key) == [SwapTo(load.key)]
    manager.activated(load.key, 0.0)
    manager.activate((1, 1), plan("n"))
    (new,) = manager.checked(facts("n"))
    assert isinstance(new, LoadPlan)
    assert manager.loaded(new.key) == [SwapTo(new.key)]
    manager.activated(new.key, 1.0)
    assert manager.phase is Phase.PROBATION
    return manager, load.key, new.key


def test_task_of_the_old_plan_that_fails_after_the_swap_does_not_speak_against_the_new_one() -> None:
    manager, old, new = manager_under_probation()
    for key in (old, None):
        assert manager.task_ended(Outcome.FAILED, "late", key) == []
    assert manager.phase is Phase.PROBATION
    actions = manager.task_ended(Outcome.FAILED, "wrong", new)
    assert [a.event for a in actions if isinstance(a, Tell)] == [
        link.ProbationFailed((1, 1), "1 of 1 tasks failed: wrong")
    ]


def test_plan_to_return_to_that_was_freed_meanwhile_is_loaded_again_and_not_given_up() -> None:
    manager, old, new = manager_under_probation()
    assert SwapTo(old) in manager.task_ended(Outcome.FAILED, "wrong", new)
    actions = manager.load_failed(old, f"plan {old} is not loaded, or it is in use")
    (again,) = actions
    assert isinstance(again, LoadPlan)
    assert again.plan == plan("g")
    assert manager.released(old) == []
    assert manager.loaded(again.key) == [SwapTo(again.key)]


def test_tasks_are_checked_against_the_plan_that_they_will_meet() -> None:
    manager, _, new = manager_under_probation()
    assert list(manager.models) == ["n"]
    manager.task_ended(Outcome.FAILED, "wrong", new)  # asks to swap back
    assert manager.active == plan("n")
    assert list(manager.models) == ["g"], "what is sent now comes after the order to swap"


def test_load_that_hangs_is_ended_with_its_engine_and_the_good_plan_comes_back() -> None:
    manager = PlanManager(Supervisor(Random(0)), ManagerConfig(load_limit_s=10.0))
    manager.ready()
    manager.restore(plan("g"))
    (load,) = manager.checked(facts("g"))
    assert isinstance(load, LoadPlan)
    manager.loaded(load.key)
    manager.activated(load.key, 0.0)
    manager.stage((1, 1), plan("n"))
    manager.checked(facts("n"))
    assert manager.tick(100.0) == []
    assert manager.tick(110.0) == [], "the limit counts from when its turn to load came"
    note, told, stop = manager.tick(110.1)
    assert isinstance(note, Note)
    assert isinstance(told, Tell)
    assert isinstance(told.event, link.PlanRefused)
    assert "not loaded within 10 s" in told.event.reason
    assert stop == StopEngine()
    assert manager.tick(130.0) == [], "it is ended once"
    assert manager.exited("stopped", 130.0) == [StartEngine(0.0)]
    (again,) = manager.ready()
    assert isinstance(again, LoadPlan)
    assert again.plan == plan("g")


def test_plan_that_waits_for_its_turn_to_load_is_not_blamed_for_the_one_that_hangs() -> None:
    manager = PlanManager(Supervisor(Random(0)), ManagerConfig(load_limit_s=10.0))
    manager.ready()
    manager.stage((1, 1), plan("h"))
    manager.checked(facts("h"))
    manager.tick(0.0)
    manager.stage((1, 2), plan("n"))
    manager.checked(facts("n"))
    actions = manager.tick(10.1)
    assert [type(action) for action in actions] == [Note, StopEngine]
    manager.exited("stopped", 10.2)
    (load,) = manager.ready()
    assert isinstance(load, LoadPlan)
    assert load.plan == plan("n")


def test_plans_that_were_refused_are_forgotten() -> None:
    manager = PlanManager(Supervisor(Random(0)))
    manager.ready()
    for number in range(100):
        letter = f"{number:02}"
        one = RunnablePlan(PlanRef(Digest(letter * 32), Origin.PLANNER), letter.encode(), ())
        manager.stage((1, number), one)
        if number % 2:
            manager.check_failed(one.ref.digest, "illegal", frozenset())
            continue
        (load,) = manager.checked(PlanFacts(one.ref.digest, {}, {}))
        assert isinstance(load, LoadPlan)
        assert len(manager.checked_plans) == 1
        manager.load_failed(load.key, "out of memory")
    assert not manager.checked_plans
    assert not manager._unusable


def test_nothing_is_reported_as_running_once_nothing_runs() -> None:
    manager, old, new = manager_under_probation()
    manager.task_ended(Outcome.FAILED, "wrong", new)
    (again,) = manager.load_failed(old, "not loaded")
    assert isinstance(again, LoadPlan)
    assert StopEngine() in manager.load_failed(again.key, "out of memory")
    assert Tell(link.ActiveChanged(None)) in manager.exited("stopped", 2.0)


def test_plan_that_ran_on_from_an_earlier_attempt_goes_when_it_fails_in_a_later_one() -> None:
    """Desired twice: the second attempt's failure must not leave the first one's run going on."""
    manager, old, new = manager_under_probation()
    manager.abandon((1, 1))
    manager.activate((1, 2), plan("n"))
    manager.tick(1.5)
    assert manager.phase is Phase.PROBATION
    assert SwapTo(old) in manager.task_ended(Outcome.FAILED, "wrong", new)


def test_nothing_is_reported_as_running_after_a_crash_that_leaves_nothing_to_run() -> None:
    """The third crash may come while the plan is being loaded again, when nothing runs already."""
    manager = PlanManager(Supervisor(Random(0)))
    manager.ready()
    manager.restore(plan("g"))
    manager.checked(facts("g"))
    actions: list[Action] = []
    for second in range(3):
        actions = manager.exited("signal 9", float(second))
        manager.ready()
    assert Tell(link.ActiveChanged(None)) in actions
