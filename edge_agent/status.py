"""What `stageloom-agent status` shows: one value, JSON on the local socket."""

from msgspec import Struct


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


class LinkStatus(Struct, frozen=True, kw_only=True):
    """The link to the planner. `state`: alone, connecting, connected, wrong_key, denied, ..."""

    state: str
    detail: str = ""
    device: str = ""
    desired: str = ""  # "epoch.generation", empty if nothing is desired
    desired_state: str = ""  # a value of shared.messages.control.DeviceState
    reason: str = ""
    telemetry_produced: int = 0
    telemetry_acknowledged: int = 0
    telemetry_dropped: int = 0
    telemetry_spooled: int = 0


class QueueStatus(Struct, frozen=True, kw_only=True):
    """One model's queue when the engine last told."""

    model: str
    tasks: int
    oldest_age_s: float


class TaskTotals(Struct, frozen=True, kw_only=True):
    """One model's tasks since the agent started; submitted = the sum of the others."""

    model: str
    submitted: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    expired: int
    open: int


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
    trial: str  # phase of the plan on trial, empty if none
    link: LinkStatus
    queues: tuple[QueueStatus, ...]
    tasks: tuple[TaskTotals, ...]
    applications: int
    problems: tuple[str, ...]  # newest last
