"""A simulated engine process: the real engine core on a device in memory, behind commands and reports."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.messages import OpenWindow
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Action, FinishTask, PlanKey, ReleasePlan, Step, Task
from stageloom.shared.ids import Digest, TaskId
from tests.engine.played import PlayedEngine

if TYPE_CHECKING:
    from tests.sim.agent import Agent

KILLED = -9
SEGFAULT = -11
STOPPED = 0


class EngineProcess(PlayedEngine):
    """One life, from its start to its exit. Commands and reports keep their order and take their time."""

    def __init__(self, agent: "Agent") -> None:
        world = agent.world
        super().__init__(world.rng, EngineCore(), self._after)
        self._agent = agent
        self._world = world
        self.alive = True
        self.running: Digest | None = None  # the plan that new launches go to
        self._plans: dict[PlanKey, Digest] = {}
        self._load_until_s = 0.0  # plans load in turn
        self._wake_s = float("inf")
        self._draining = False
        self._settling: PlanKey | None = None
        self._measuring = 0  # number of the window
        self._queued_s: dict[TaskId, float] = {}
        self.commands = world.pipe()
        self.reports = world.pipe()
        self.reports.put(lambda: agent.report(self, messages.Ready(1)))

    # -- what the agent's main process asks for -------------------------------------------------------------

    def command(self, what: Callable[[], None]) -> None:
        """Send a command; the process may be killed in the moment in which it takes it."""

        def obey() -> None:
            if self._world.chance(self._world.faults.engine_crash):
                self.exit(KILLED, "killed")
            else:
                self.now = self._world.now_s
                what()

        self.commands.put(obey)

    def load(self, key: PlanKey, digest: Digest) -> None:
        """Load beside what runs, after the loads before it."""
        nature = self._world.natures[digest]
        assert nature.legal, "an unchecked plan reached the engine"
        start_s = max(self._load_until_s, self._world.now_s)
        self._load_until_s = start_s + (1e9 if nature.hangs_loading else self.random.random() * 0.5)
        self._after(self._load_until_s - self._world.now_s, lambda: self._loaded(key, digest))

    def _loaded(self, key: PlanKey, digest: Digest) -> list[Action]:
        nature = self._world.natures[digest]
        if nature.crashes_loading:
            self.exit(SEGFAULT, "crashes while it loads")
            return []
        if not nature.loads:
            self._say(messages.PlanFailed(key, "out of memory"))
            return []
        bound = self._world.bound[digest]
        self._plans[key] = digest
        self.device.load(key, bound)
        self._say(messages.PlanLoaded(key, True, 0, 1 << 30))
        return self.core.load(key, bound, self.now)

    def activate(self, key: PlanKey, keep: bool) -> None:
        """Launch into this plan; with `keep` the one before stays loaded."""
        digest = self._plans.get(key)
        if digest is None:
            self._say(messages.PlanFailed(key, f"plan {key} is not loaded"))
            return
        self.running = digest
        self._world.watch.plan_runs(self._agent, digest)
        self._draining = False
        self._settling = None
        self._do(self.core.activate(key, self.now, keep=keep))
        self._say(messages.PlanActive(key))
        self._settling = key if keep else None
        self._do([])
        crash_s = self._world.natures[digest].crashes_after_s
        if crash_s is not None:
            self._world.later(crash_s, lambda: self._crash_under(digest))

    def _crash_under(self, digest: Digest) -> None:
        if self.alive and self.running == digest:
            self.exit(SEGFAULT, f"crashes under {digest[:8]}")

    def drain(self) -> None:
        """Launch nothing until the next plan is activated."""
        self._draining = True
        self._do(self.core.drain(self.now))

    def measure(self, order: OpenWindow) -> None:
        """Report what happens between two instants; a newer order takes an older one's place."""
        self._measuring = order.number
        self._after(max(0.0, order.to_s - self.now), lambda: self._measured(order))

    def _measured(self, order: OpenWindow) -> list[Action]:
        """Played figures: what the plan is worth, with a little noise."""
        if self._measuring != order.number or self.running is None:
            return []
        nature, bound = self._world.natures[self.running], self._world.bound[self.running]
        number = round(200 * nature.speed * (1 + (self.random.random() - 0.5) * 0.02))
        length_s = max(order.to_s - order.from_s, 1e-3)
        models = tuple(
            messages.ModelFigures(model.name, number, length_s / len(bound.models), number, length_s * 0.9)
            for model in bound.plan.models
        )
        failed = number if nature.fails_tasks else 0
        self._say(
            messages.WindowMeasured(order.number, None, length_s, length_s, True, failed, 0.01, 0.0, models)
        )
        return []

    def unload(self, key: PlanKey) -> None:
        """Free a loaded plan."""
        try:
            self._do(self.core.unload(key, self.now))
        except ValueError as error:
            self._say(messages.PlanFailed(key, str(error)))

    def take(self, task: Task) -> None:
        """A task arrives."""
        self._queued_s[task.id] = self.now
        self._do(self.submit(task))

    def exit(self, returncode: int, why: str) -> None:
        """The process is gone. What it said before is still heard."""
        if not self.alive:
            return
        self._world.note(self._agent.name, "engine process: %s", why)
        self.alive = False
        self.running = None
        self.commands.close()
        self._say(messages.Exited(returncode))

    # -- time and actions -----------------------------------------------------------------------------------

    def _after(self, delay_s: float, event: Callable[[], list[Action]]) -> None:
        def happen() -> None:
            if self.alive:
                self.now = self._world.now_s
                self._do(event())

        self._world.later(delay_s, happen)

    def _do(self, actions: list[Action]) -> None:
        self.perform(actions)
        if self._draining and self.core.idle:
            self._draining = False
            self._say(messages.Drained())
        if self._settling is not None and self.core.settled:
            settled, self._settling = self._settling, None
            self._say(messages.Settled(settled))
        wake_s = self.core.next_wakeup(self.now)
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = wake_s
            self._after(wake_s - self.now, self._tick)

    def _tick(self) -> list[Action]:
        self._wake_s = float("inf")
        return self.core.tick(self.now)

    def duration_s(self, step: Step) -> float:
        """Steps of a better plan are shorter."""
        speed = self._world.natures[self._plans[step.program.plan]].speed
        return self.random.choice((0.001, 0.002, 0.01)) / speed

    def fails(self, step: Step) -> bool:
        return self._world.natures[self._plans[step.program.plan]].fails_tasks

    def answered(self, finish: FinishTask) -> None:
        outcome, plan = finish.outcome, finish.plan
        queued_s = self._queued_s.pop(finish.task)
        self._say(
            messages.TaskDone(
                finish.task, outcome, finish.code, finish.reason, queued_s, None, self.now, (), plan
            )
        )

    def released(self, action: ReleasePlan) -> None:
        self._plans.pop(action.plan, None)
        self._say(messages.PlanReleased(action.plan))

    def _say(self, report: messages.Report) -> None:
        self.reports.put(lambda: self._agent.report(self, report))
