"""What `stageloom-agent status` shows: one value, JSON on the local socket."""

from collections.abc import Container, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from stageloom.edge_agent.ingest.channel import ask
from stageloom.edge_agent.ingest.ledger import TaskLedger, TaskTotals
from stageloom.edge_agent.ingest.messages import AskStatus, Status
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.states import PlanRef
from stageloom.edge_agent.serving.keeper import ServingStatus
from stageloom.edge_agent.worker.messages import Stats
from stageloom.shared.errors import UnavailableError


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The engine process."""

    pid: int | None
    up: bool
    restarts: int
    last_exit: str = ""


class PlanStatus(Struct, frozen=True, kw_only=True):
    """The plan that runs."""

    digest: str
    origin: str
    models: tuple[str, ...]


class TrialStatus(Struct, frozen=True, kw_only=True):
    """The plan of the present attempt, which does not count as good yet."""

    phase: str  # verifying, staging, staged, trial, activating, probation
    pairs: int = 0  # of windows, so far
    ratio: float | None = None  # over these pairs; above 1: the candidate is better
    seconds_left: float = 0.0  # of the trial, at most


class LinkStatus(Struct, frozen=True, kw_only=True):
    """The link to the planner. `state`: alone, connecting, connected, wrong_key, denied, ..."""

    state: str
    detail: str = ""
    device: str = ""
    desired: str = ""  # "epoch.generation", empty if nothing is desired
    desired_state: str = ""  # a value of stageloom.shared.messages.control.DeviceState
    reason: str = ""
    telemetry_produced: int = 0
    telemetry_acknowledged: int = 0
    telemetry_dropped: int = 0
    telemetry_spooled: int = 0


class PolicyStatus(Struct, frozen=True, kw_only=True):
    """The learned policy that plans here while the planner is away; `refused`: why it does not."""

    digest: str = ""
    refused: str = ""


class QueueStatus(Struct, frozen=True, kw_only=True):
    """One model's queue when the engine last told."""

    model: str
    tasks: int
    oldest_age_s: float


class AgentStatus(Struct, frozen=True, kw_only=True):
    """The agent. It is healthy if it answers at all, and ready if a task would be taken."""

    version: str
    pid: int
    home: str
    uptime_s: float
    ready: bool
    reason: str  # why it is not ready
    engine: EngineStatus
    plan: PlanStatus | None
    trial: TrialStatus | None
    policy: PolicyStatus | None
    last_pause_ms: float | None  # in which nothing was launched, as two plans did not fit into memory
    link: LinkStatus
    queues: tuple[QueueStatus, ...]
    tasks: tuple[TaskTotals, ...]
    applications: int
    problems: tuple[str, ...]  # newest last
    serving: ServingStatus | None = None  # over HTTP and gRPC
    metrics: ServingStatus | None = None  # the process that tells metrics, under `http`
    measuring: int = 0  # runs of models on executors that are still to be timed


def plan_status(ref: PlanRef, models: Iterable[str]) -> PlanStatus:
    """Of the plan that runs."""
    return PlanStatus(digest=ref.digest, origin=ref.origin.value, models=tuple(models))


def trial_status(manager: PlanManager, now_s: float) -> TrialStatus | None:
    """Of the present attempt, if there is one."""
    phase, runner = manager.phase, manager.runner
    if phase is None:
        return None
    if runner is None:
        return TrialStatus(phase=phase)
    pairs, ratio, left_s = runner.progress(now_s)
    return TrialStatus(phase=phase, pairs=pairs, ratio=ratio, seconds_left=round(left_s, 1))


def queue_status(stats: Stats, served: Container[str]) -> tuple[QueueStatus, ...]:
    """Of every model that the active plan serves, and of others while they still hold tasks."""
    return tuple(
        QueueStatus(model=one.name, tasks=one.queue_length, oldest_age_s=one.oldest_age_s)
        for one in stats.models
        if one.name in served or one.queue_length
    )


def task_totals(ledger: TaskLedger) -> tuple[TaskTotals, ...]:
    """Of every model that saw a task."""
    return tuple(totals for _, totals in sorted(ledger.totals.items()))


def ask_status(path: Path, timeout_s: float = 5.0) -> AgentStatus:
    """The status of the agent that listens at `path`.

    Raises:
        UnavailableError: no agent answers in time.
    """
    body = ask(path, AskStatus(0), Status, timeout_s).body
    try:
        return msgspec.json.decode(body, type=AgentStatus)
    except msgspec.MsgspecError as error:
        raise UnavailableError(
            f"the agent at {path} does not answer: {error}", remedy="look at its log"
        ) from error
