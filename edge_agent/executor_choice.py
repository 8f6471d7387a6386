"""Which executor runs a model fastest on this device: measured once, at first sight, and remembered.

An agent that makes its plan itself serves at once, on what it knows. What it does not know it has the engine
process measure while nothing is to be served, one model on one executor after another. When all is known and
another plan is better, that plan takes over under the guard.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.edge_agent.lifecycle.events import PlanMeasured
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.store import StateFile
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, Origin, StageProfileRequest
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.auto import KnownModel, auto_plan, fastest
from stageloom.shared.search.compose import ModelChoice, compose

FIRST_CHOICE: Final = "onnx"
"""Runs whatever was imported; others must show that they are faster."""

_PACKAGES: Final = {"onnx": "onnxruntime", "openvino": "openvino"}
_LIMIT_S: Final = 4.0  # of work per measurement, with opening the session
_ROUNDS: Final = (
    2  # of every model on every executor; the shorter time counts, as whatever disturbs adds to it
)
_MOST: Final = 1024  # times that are remembered

TimesByExecutor = dict[str, float]
"""Seconds of one run of a whole model on one thread; infinity where it cannot run there."""


def installed() -> tuple[str, ...]:
    """Executors on the processor that this environment has."""
    return tuple(name for name, package in _PACKAGES.items() if find_spec(package) is not None)


class _Remembered(Struct, frozen=True):
    """What was measured in one environment, by artifact; the newest last."""

    environment: str
    times_s: dict[str, TimesByExecutor]


class ExecutorTimes:
    """What was measured on this device as it is now; another power mode or runtime makes it void."""

    def __init__(self, file: StateFile, environment: str) -> None:
        self._file = file
        self._environment = environment
        self._times_s: dict[str, TimesByExecutor] = {}
        body = file.load().body
        if body is not None:
            try:
                found = msgspec.msgpack.decode(body, type=_Remembered)
            except msgspec.MsgspecError:
                return  # of another version: measured again
            if found.environment == environment:
                self._times_s = found.times_s

    def of(self, artifact: Digest) -> Mapping[str, float]:
        """What is known of a model, by executor."""
        return self._times_s.get(artifact, {})

    def note(self, artifact: Digest, executor: str, seconds: float) -> None:
        """Remember what a model takes, in memory."""
        known = self._times_s.pop(artifact, {})
        self._times_s[artifact] = {**known, executor: seconds}
        while len(self._times_s) > _MOST:
            del self._times_s[next(iter(self._times_s))]

    def save(self) -> None:
        """Raises:
        StorageError: it cannot be written; the next start measures again.
        """
        self._file.save(msgspec.msgpack.encode(_Remembered(self._environment, self._times_s)))


@dataclass(frozen=True)
class OwnModels:
    """The models of an agent that makes its plan itself."""

    choices: tuple[ModelChoice, ...]
    needs: tuple[ArtifactNeed, ...]  # of the same models

    def runnable(self, plan: Plan, counter: int = 0) -> RunnablePlan:
        """A plan of these models, ready to run."""
        return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL, counter), plan.wire, self.needs)

    def best(self, times: ExecutorTimes) -> Plan:
        """The plan for what is known."""
        known = {}
        for one in self.choices:
            times_s = times.of(one.artifact)
            name = fastest(times_s, FIRST_CHOICE)
            if times_s.get(name, math.inf) < math.inf:
                known[one.artifact] = KnownModel(name, times_s[name])
        return auto_plan(self.choices, known, FIRST_CHOICE, sorted(os.sched_getaffinity(0)))


class ExecutorChoice:
    """Has measured what is not known, and offers the better plan that follows."""

    def __init__(
        self,
        models: OwnModels,
        times: ExecutorTimes,
        running: Plan,
        executors: Sequence[str],
    ) -> None:
        """`running`: the plan that the agent begins with."""
        self._models = models
        self._times = times
        self._running = running
        self._executors = executors
        self._open: dict[int, tuple[ModelChoice, str]] = {}
        self.problems: list[str] = []  # that were met since they were last looked at

    @property
    def left(self) -> int:
        """Measurements that are still to be made."""
        return len(self._open)

    def requests(self) -> list[StageProfileRequest]:
        """What is to be measured; nothing with one executor, or once all is known."""
        if len(self._executors) < 2:
            return []
        wanted = [
            (choice, need, name)
            for _ in range(_ROUNDS)
            for choice, need in zip(self._models.choices, self._models.needs, strict=True)
            for name in self._executors
            if name not in self._times.of(choice.artifact)
        ]
        made = []
        for number, (choice, need, name) in zip(count(1), wanted, strict=False):
            plan = compose([choice], executor=ExecutorOptions(name=name))
            self._open[number] = (choice, name)
            made.append(
                StageProfileRequest(
                    request=number,
                    plan_digest=plan.digest,
                    plan=plan.wire,
                    artifacts=(need,),
                    budget_s=_LIMIT_S,
                )
            )
        return made

    def answered(self, request: int, step_us: float | None, reason: str) -> PlanMeasured | None:
        """A measurement ended, without a time where it could not be made; the better plan after the last."""
        choice, name = self._open.pop(request)
        if step_us is None:
            self.problems.append(f"model {choice.name!r} is not measured on {name}: {reason}")
        known_s = self._times.of(choice.artifact).get(name, math.inf)
        self._times.note(choice.artifact, name, min(known_s, math.inf if step_us is None else step_us * 1e-6))
        if self._open:
            return None
        try:
            self._times.save()
        except StorageError as error:
            self.problems.append(str(error))
        best = self._models.best(self._times)
        if best.structure == self._running.structure:
            return None
        return PlanMeasured(self._models.runnable(best), self._cause(best))

    def _cause(self, plan: Plan) -> str:
        """What was measured, for people."""
        said = []
        for block in plan.combined:
            member, name = block.members[0], plan.executors[block.executor].name
            model = plan.models[member.model]
            times_s = self._times.of(model.artifact)
            if member.replica == 0 and name != FIRST_CHOICE and FIRST_CHOICE in times_s:
                said.append(
                    f"{model.name} {times_s[FIRST_CHOICE] / times_s[name]:.1f} times as fast on {name}"
                )
        return ", ".join(said) or "measured"
