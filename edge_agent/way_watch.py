"""Has the ways measured that the models of a planner's plans could run in, and tells the planner of them.

It measures while nothing is served and no plan is on trial or on its way, and remembers what it found for the
next start.
"""

from collections.abc import Collection, Mapping
from typing import Final

from stageloom.edge_agent.config import AUTO
from stageloom.edge_agent.executor_choice import TIMES_NAME, ExecutorTimes, installed, ways
from stageloom.edge_agent.lifecycle.shell import NoLink
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.machine.control_groups import usable_cores
from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.parts import Parts
from stageloom.edge_agent.reporting.profiles import ENDED_TWICE
from stageloom.edge_agent.store import StateFile
from stageloom.edge_agent.way_measuring import OWN_REQUESTS, PlannedWays, WayRequests
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan
from stageloom.shared.search.compose import ModelChoice

SETTLE_S: Final = 2.0
"""After a plan became active: its first tasks come first."""


class WayWatch:
    """Of an agent under a planner, which is set to no executor of its own: without one nobody plans by it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        asked = parts.config.executor == AUTO and not isinstance(parts.lifecycle.link, NoLink)
        self._installed = installed() if asked else ()
        self._active: RunnablePlan | None = None
        self._mode = parts.machine.power_mode
        self._begin(device_class())

    def _begin(self, environment: str) -> None:
        """Go by what was measured in an environment."""
        self._times = ExecutorTimes(StateFile(self._parts.config.home_path / TIMES_NAME), environment)
        wanted = ways(self._installed, len(usable_cores()))
        self._ways = PlannedWays(WayRequests(self._times, wanted, first=OWN_REQUESTS))

    @property
    def left(self) -> int:
        """Measurements that are still to be made."""
        return self._ways.left

    @property
    def disturbs(self) -> bool:
        """A measurement may be why tasks wait: no reason to plan anew."""
        return self._ways.disturbs(self._parts.loop.now())

    def plan_active(self, active: RunnablePlan) -> None:
        """Measure its models, where it runs them on executors that are chosen from."""
        self._active = active
        try:
            plan = decode_plan(active.wire)
        except StageloomError:  # it runs, so it was readable; nothing here may end the agent
            return
        checker = self._parts.checker
        chosen = {options.name for options in plan.executors} <= set(self._installed)
        needs = {need.digest: need for need in active.artifacts if chosen}
        self._parts.background.run(
            lambda: {digest: checker.graph(digest) for digest in needs},
            lambda graphs: self._add(plan, graphs, needs),
        )

    def _add(
        self, plan: Plan, graphs: Mapping[Digest, Graph | None], needs: Mapping[Digest, ArtifactNeed]
    ) -> None:
        found = {}
        for model in plan.models:
            graph = graphs.get(model.artifact)
            if graph is not None:
                choice = ModelChoice(name=model.name, artifact=model.artifact, graph=graph)
                found[model.artifact] = choice, needs[model.artifact]
        self._ways.add(list(found.values()), self._parts.loop.now() + SETTLE_S)

    def tick(self, *, free: bool) -> None:
        """Ask for the next measurement where it is due; `free`: no plan is on trial or on its way."""
        machine = self._parts.machine
        if machine.power_mode != self._mode and not self._ways.asked:  # times of another mode are others
            self._mode = machine.power_mode
            self._begin(machine.environment())
            if self._active is not None:
                self.plan_active(self._active)
        if free and (request := self._ways.next(self._parts.loop.now())) is not None:
            self._parts.profiles.wanted(request)

    def answered(self, step_us: float | None, *, cannot: bool, quiet: bool, reason: str) -> None:
        """What was asked for ended, for `reason` if without a time. `cannot`: the model cannot run so;
        `quiet`: no task is there."""
        fatal = reason == ENDED_TWICE
        found = self._ways.answered(step_us, self._parts.loop.now(), quiet=quiet, cannot=cannot, fatal=fatal)
        if found is None:
            return
        choice, options = found
        if (step_us is not None or cannot) and self._parts.machine.power_mode == self._mode:
            self._times.measured(choice.artifact, options, step_us, fatal=fatal)
            self._parts.journal.record(
                [row for row in self._times.rows(choice.artifact) if row.executor == options.name]
            )
        unfinished = self._ways.requests.unfinished
        if (choice.artifact, options) not in unfinished:
            self._save(unfinished)

    def _save(self, unfinished: Collection[tuple[Digest, ExecutorOptions]]) -> None:
        """What further rounds may shorten is measured anew after a restart."""
        try:
            self._times.save(unfinished)
        except StageloomError as error:
            self._parts.journal.note("executor_times", str(error))
