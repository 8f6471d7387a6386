"""Stageloom as applications meet it: an agent's processes, and its client."""

import contextlib
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageloom.edge_agent.bench.contestant import Ended, TimedTask
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.rival_threads import TaskErrors
from stageloom.edge_agent.config import AgentConfig, ModelFile, Precision, encode_config
from stageloom.edge_agent.executor_choice import FIRST_CHOICE, TIMES_NAME, ExecutorTimes
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.ingest.client import Client
from stageloom.edge_agent.machine.control_groups import has_own_cores, usable_cores
from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.reporting.status import AgentStatus, ask_status
from stageloom.edge_agent.store import StateFile
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import RefusedError, UnavailableError
from stageloom.shared.module_command import module_command
from stageloom.shared.plan import Plan
from stageloom.shared.search.arrangements import Times
from stageloom.shared.search.auto import auto_plan
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.text import counted

_STEP_S: Final = 240.0  # of a start, in which something that it waits for must come nearer
_POLL_S: Final = 0.1
_STOP_S: Final = 15.0
_SUSPENDED_S: Final = 86_400.0


@dataclass(frozen=True)
class AgentSetting:
    """An agent with the plan that it makes itself or, if `plan` is not empty, with that plan's bytes."""

    name: str
    plan: bytes = b""
    serves: tuple[str, ...] = ()  # these models alone; empty: all
    precision: Precision = "fp32"  # that a plan which the agent makes itself may use
    folder: str = ""  # where its home is made, which stays there if it is killed; empty: the system's own
    times_folder: str = ""  # where agents of one device leave what they measured, and find it; empty: nowhere

    @property
    def measures(self) -> bool:
        return not self.plan

    def make(self, models: Sequence[ModelUnderTest]) -> "StageloomContestant":
        """The agent and its client, not started."""
        return StageloomContestant(models, self)


class StartPatience:
    """How long to wait for an agent: until for `step_s` it serves no further model and ends no measurement.

    No fixed time fits a GPU, where each model may take a minute on each executor.
    """

    def __init__(self, now_s: float, step_s: float = _STEP_S) -> None:
        self._step_s = step_s
        self._until_s = now_s + step_s
        self._missing = self._measuring = 0

    def note(self, missing: int, measuring: int, now_s: float) -> None:
        """So many models it does not serve now, and so many runs of models it still times."""
        if missing < self._missing or measuring < self._measuring:
            self._until_s = now_s + self._step_s
        self._missing, self._measuring = missing, measuring

    def is_over(self, now_s: float) -> bool:
        """Whether it got no further for so long."""
        return now_s >= self._until_s


class StageloomContestant(TaskErrors):
    """An agent process in a home of its own, and a client in this one."""

    def __init__(self, models: Sequence[ModelUnderTest], setting: AgentSetting) -> None:
        super().__init__()
        self._models = models
        self._precision = setting.precision
        self._served = [model for model in models if not setting.serves or model.name in setting.serves]
        self._plan = setting.plan
        self._times = Path(setting.times_folder, TIMES_NAME) if setting.times_folder else None
        self._home = Path(tempfile.mkdtemp(prefix="stageloom-", dir=setting.folder or None))
        self._log = self._home / "log"
        self._agent: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._ended: Ended = _nobody

    def start(self, ended: Ended) -> None:
        """Start the agent and connect once it serves all models.

        Raises:
            UnavailableError: it ended, or got no further for minutes.
        """
        self._ended = ended
        if self._times is not None and self._times.exists():
            shutil.copy(self._times, self._home / TIMES_NAME)
        with self._log.open("wb") as sink:
            self._agent = subprocess.Popen(self._command(), stdout=sink, stderr=sink)
        self._client = self._connected(self._agent)
        if self._times is not None and (self._home / TIMES_NAME).exists():
            shutil.copy(self._home / TIMES_NAME, self._times)

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Hand a task to the agent; one that it refuses is given up.

        Raises:
            UnavailableError: the agent is gone.
        """
        assert self._client is not None and self._agent is not None
        left_s = task.due_s - time.monotonic()
        if left_s <= 0.0 or self._models[task.model] not in self._served:  # warming up is with all models
            self._ended(task, False)
            return
        deadline_s = left_s if left_s < _SUSPENDED_S else None
        try:
            future = self._client.submit(self._models[task.model].name, feeds, deadline_s=deadline_s)
        except RefusedError as error:
            self._failed(task, error)
            return
        except UnavailableError as error:
            raise self._gone(self._agent, error) from error
        future.add_done_callback(self._done(task))

    def stop(self) -> None:
        """Disconnect, and end the agent."""
        if self._client is not None:
            self._client.close()
        if self._agent is not None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(_STOP_S)
            self._agent.kill()
            self._agent.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def _done(self, task: TimedTask) -> Callable[[Future[Any]], None]:
        def done(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                self._failed(task, error)
            else:
                self._ended(task, True)

        return done

    def _failed(self, task: TimedTask, error: BaseException) -> None:
        if task.due_s == math.inf:  # else it may have come too late
            self.note_error(error)
        self._ended(task, False)

    def _gone(self, agent: "subprocess.Popen[bytes]", error: UnavailableError) -> UnavailableError:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its socket closes before it has ended
            agent.wait(_STOP_S)
        how = error.cause
        if agent.returncode is not None:
            how = f"the agent has ended with exit status {agent.returncode}"
        return UnavailableError(
            f"{how}; its last line: {self._last_line()}",
            remedy="see whether memory ran out, and compare again",
        )

    def _last_line(self) -> str:
        return (self._log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]

    def _command(self) -> list[str]:
        """Of `stageloom-agent run`, or of the same agent with a plan that is given to it."""
        models = model_files(self._served)
        config = AgentConfig(
            home=str(self._home),
            models=() if self._plan else models,
            silent_engine_s=_SUSPENDED_S,  # it is suspended together with its engine
            alarms=False,
            precision=self._precision,
        )
        if not self._plan:
            return module_command("stageloom.edge_agent.run", encode_config(config))
        file = self._home / "plan"
        file.write_bytes(self._plan)
        store = self._home / "artifacts"
        store.mkdir(parents=True)
        for digest, artifact in {model.digest: model.artifact for model in self._served}.items():
            (store / digest).symlink_to(artifact.resolve())
        return module_command("stageloom.edge_agent.bench.plan_agent", encode_config(config), str(file))

    def _connected(self, agent: "subprocess.Popen[bytes]") -> Client:
        patience = StartPatience(time.monotonic())
        awaited = ""
        while agent.poll() is None and not patience.is_over(time.monotonic()):
            with contextlib.suppress(UnavailableError):
                client = Client(socket_of(self._home))
                missing = {model.name for model in self._served} - client.models().keys()
                status = ask_status(socket_of(self._home))
                awaited = what_is_left(missing, status)
                if not awaited:
                    self.plan = status.plan.digest if status.plan is not None else ""
                    return client
                client.close()
                patience.note(len(missing), status.measuring, time.monotonic())
            time.sleep(_POLL_S)
        if agent.poll() is not None or not awaited:
            raise UnavailableError(f"the agent does not serve: {self._last_line()}")
        raise UnavailableError(
            f"the agent got no further for {_STEP_S:.0f} s: {awaited}; its last line: {self._last_line()}",
            remedy="end what else computes on this machine, and try again",
        )


def what_is_left(missing: Collection[str], status: AgentStatus) -> str:
    """What an agent that does not serve the models `missing` has to do before it counts; empty once it serves
    all, and believes in its plan."""
    if missing:
        return f"it does not serve {', '.join(sorted(missing))}"
    if status.measuring:
        return f"it still measures {counted(status.measuring, 'run')} of models on executors"
    return "" if status.trial is None else f"its plan is still in {status.trial.phase}"


def model_files(models: Sequence[ModelUnderTest]) -> tuple[ModelFile, ...]:
    """The models as an agent's settings name them."""
    return tuple(ModelFile(path=str(one.path.resolve()), name=one.name, shapes={}) for one in models)


def kept_times(models: Sequence[ModelUnderTest], folder: str) -> dict[str, Times]:
    """What agents that share `folder` have measured of these models on this device, by name."""
    kept = ExecutorTimes(StateFile(Path(folder, TIMES_NAME)), device_class())
    return {one.name: kept.of(one.digest) for one in models}


def own_plan(models: Sequence[ModelUnderTest], times: Mapping[str, Times], *, whole: bool = False) -> Plan:
    """The plan that an agent makes of these models where it has measured this. `times`: by model.

    `whole`: no model is cut.

    Raises:
        PlanError: the models allow no plan.
    """
    choices = [
        ModelChoice(name=one.name, artifact=one.digest, graph=open_artifact(one.artifact).graph)
        for one in models
    ]
    known = [times[one.name] for one in models]
    return auto_plan(choices, known, FIRST_CHOICE, usable_cores(), whole=whole, pinned=has_own_cores())


def _nobody(task: TimedTask, completed: bool) -> None:
    """Before it is started."""
