"""What one scrape of an agent tells: its status and what it counted, as samples."""

from pathlib import Path
from typing import Any, Final

import msgspec

from stageloom.edge_agent.ingest.channel import ask
from stageloom.edge_agent.ingest.ledger import OTHER_MODELS
from stageloom.edge_agent.ingest.messages import AskMetrics, MetricsPage
from stageloom.edge_agent.metrics.counting import AgentFigures, ModelSeconds
from stageloom.edge_agent.reporting.status import AgentStatus, LinkStatus, ask_status
from stageloom.edge_agent.serving.request_counts import RequestSeconds
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.metrics import MetricKind, MetricSpec, Samples

_PLAN_CHARS: Final = 12

_gauge, _counter, _histogram = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM

INFO: Final = MetricSpec("stageloom_agent_info", _gauge, "1, with the agent's version.", ("version",))
READY: Final = MetricSpec("stageloom_agent_ready", _gauge, "1 where a task would be taken, else 0.")
UPTIME: Final = MetricSpec("stageloom_agent_uptime_seconds", _gauge, "Since the agent started.")
APPLICATIONS: Final = MetricSpec(
    "stageloom_agent_applications", _gauge, "Connected applications; HTTP and gRPC together are one."
)
REQUESTS: Final = MetricSpec(
    "stageloom_serving_requests_total",
    _counter,
    "Requests answered over HTTP and gRPC; from zero with each serving process.",
    ("protocol", "method", "status"),
)
REQUEST_SECONDS: Final = MetricSpec(
    "stageloom_serving_request_duration_seconds",
    _histogram,
    "To a request's answer; over HTTP from its head, over gRPC from when its whole message was received.",
    ("protocol", "method"),
)
ENGINE_UP: Final = MetricSpec("stageloom_engine_up", _gauge, "1 where the engine process answers, else 0.")
RESTARTS: Final = MetricSpec(
    "stageloom_engine_restarts_total", _counter, "Engine processes that were started after one had ended."
)
ENGINE_BUSY: Final = MetricSpec(
    "stageloom_engine_busy_seconds_total",
    _counter,
    "Time in which at least one step ran; from zero with each engine process.",
)
LATENCY: Final = MetricSpec(
    "stageloom_task_latency_seconds",
    _histogram,
    "Completed tasks, from when the agent read one until its outputs were written.",
    ("model",),
)
QUEUEING: Final = MetricSpec(
    "stageloom_task_queueing_seconds",
    _histogram,
    "Completed tasks, from when the agent read one until its first step began.",
    ("model",),
)
SUBMITTED: Final = MetricSpec("stageloom_tasks_submitted_total", _counter, "Tasks that arrived.", ("model",))
TASKS: Final = MetricSpec(
    "stageloom_tasks_total",
    _counter,
    "Tasks that ended: completed, refused, failed, cancelled or expired.",
    ("model", "outcome"),
)
OPEN: Final = MetricSpec("stageloom_tasks_open", _gauge, "Tasks that have arrived and not ended.", ("model",))
QUEUE: Final = MetricSpec(
    "stageloom_queue_tasks", _gauge, "Tasks that wait in the engine when it last told.", ("model",)
)
OLDEST: Final = MetricSpec(
    "stageloom_queue_oldest_seconds", _gauge, "Age of the oldest of them, 0 where none waits.", ("model",)
)
STEPS: Final = MetricSpec("stageloom_steps_total", _counter, "Steps that the engine ran.")
STEP_SECONDS: Final = MetricSpec("stageloom_step_seconds_total", _counter, "Time that they took, summed.")
PLAN: Final = MetricSpec(
    "stageloom_plan_info",
    _gauge,
    "1, with the plan that runs (its digest's first characters) and where it is from.",
    ("plan", "origin"),
)
EPOCH: Final = MetricSpec("stageloom_plan_epoch", _gauge, "Epoch of what the planner desires, 0 for nothing.")
GENERATION: Final = MetricSpec(
    "stageloom_plan_generation", _gauge, "Generation of what the planner desires, 0 for nothing."
)
ACTIVATIONS: Final = MetricSpec("stageloom_plan_activations_total", _counter, "Plans that became active.")
TRYING: Final = MetricSpec("stageloom_trial_running", _gauge, "1 while a plan is on trial, else 0.")
VERDICTS: Final = MetricSpec(
    "stageloom_trial_verdicts_total",
    _counter,
    "How plans ended, with a trial or without: commit, reject, no_gain, refused, abandoned or idle.",
    ("verdict",),
)
ALARMS: Final = MetricSpec("stageloom_alarms_total", _counter, "Alarms, after which another plan is wanted.")
CONNECTED: Final = MetricSpec("stageloom_link_connected", _gauge, "1 where the planner answers, else 0.")
SPOOL: Final = MetricSpec("stageloom_spool_waiting_rows", _gauge, "Telemetry rows kept for the planner.")
ROWS: Final = MetricSpec(
    "stageloom_spool_rows_total",
    _counter,
    "Telemetry rows of this start, and of earlier ones that the planner lacked rows of by then.",
)
ROWS_ACKNOWLEDGED: Final = MetricSpec(
    "stageloom_spool_rows_acknowledged_total", _counter, "Telemetry rows that the planner has stored."
)
ROWS_DROPPED: Final = MetricSpec(
    "stageloom_spool_rows_dropped_total", _counter, "Telemetry rows that were too many or too old to keep."
)

AGENT_METRICS: Final = (
    *(INFO, READY, UPTIME, APPLICATIONS, REQUESTS, REQUEST_SECONDS, ENGINE_UP, RESTARTS, ENGINE_BUSY),
    *(LATENCY, QUEUEING, SUBMITTED, TASKS, OPEN, QUEUE, OLDEST, STEPS, STEP_SECONDS),
    *(PLAN, EPOCH, GENERATION, ACTIVATIONS, TRYING, VERDICTS, ALARMS),
    *(CONNECTED, SPOOL, ROWS, ROWS_ACKNOWLEDGED, ROWS_DROPPED),
)

_PROCESSES: Final = ("stageloom_agent", "stageloom_engine")
PROCESS_METRICS: Final = tuple(
    f"{process}_process_{name}"
    for process in _PROCESSES
    for name in (
        *("virtual_memory_bytes", "resident_memory_bytes", "start_time_seconds"),
        *("cpu_seconds_total", "open_fds", "max_fds"),
    )
)
"""What prometheus-client tells of a process, here of the agent's two."""


def scrape(socket: Path, accept: str) -> tuple[bytes, str]:
    """(body, content type) of the metrics of the agent that listens at `socket`.

    Raises:
        UnavailableError: the agent does not answer.
    """
    status = ask_status(socket)
    return agent_samples(status, ask_figures(socket)).render(accept, _processes(status))


def ask_figures(socket: Path) -> AgentFigures:
    """What an agent counted, all pages of it.

    Raises:
        UnavailableError: it does not answer.
    """
    models: list[ModelSeconds] = []
    requests: tuple[RequestSeconds, ...] = ()
    while True:
        page = ask(socket, AskMetrics(0, len(models)), MetricsPage, 5.0)
        figures = msgspec.json.decode(page.body, type=AgentFigures)
        models += figures.models
        requests += figures.requests
        if not page.more:
            return msgspec.structs.replace(figures, models=tuple(models), requests=requests)


def _processes(status: AgentStatus) -> list[Any]:
    """Memory, processor time and open files of the agent's two processes."""
    from prometheus_client import ProcessCollector

    pids = (status.pid, status.engine.pid)
    return [
        ProcessCollector(name, lambda pid=pid: pid, registry=None)  # type: ignore[misc]
        for name, pid in zip(_PROCESSES, pids, strict=True)
        if pid is not None
    ]


def agent_samples(status: AgentStatus, figures: AgentFigures) -> Samples:
    """All of `AGENT_METRICS`; a model's once it saw a task."""
    told = Samples()
    told.add(INFO, 1, status.version)
    told.add(READY, status.ready)
    told.add(UPTIME, status.uptime_s)
    told.add(APPLICATIONS, max(status.applications - 1, 0))  # this scrape is one
    for counted in figures.requests:
        for code, count in sorted(counted.statuses.items()):
            told.add(REQUESTS, count, counted.protocol, counted.method, code)
        told.add(REQUEST_SECONDS, counted.seconds, counted.protocol, counted.method)
    told.add(ENGINE_UP, status.engine.up)
    told.add(RESTARTS, status.engine.restarts)
    told.add(ENGINE_BUSY, figures.engine_busy_s)
    told.add(STEPS, figures.steps)
    told.add(STEP_SECONDS, figures.step_s)
    _add_tasks(told, status, figures)
    if status.plan is not None:
        told.add(PLAN, 1, status.plan.digest[:_PLAN_CHARS], status.plan.origin)
    told.add(ACTIVATIONS, figures.activations)
    told.add(TRYING, status.trial is not None and status.trial.phase == "trial")
    for verdict, count in sorted(figures.verdicts.items()):
        told.add(VERDICTS, count, verdict)
    told.add(ALARMS, figures.alarms)
    _add_link(told, status.link)
    return told


def _add_tasks(told: Samples, status: AgentStatus, figures: AgentFigures) -> None:
    for times in figures.models:
        told.add(LATENCY, times.latency, times.model)
        told.add(QUEUEING, times.queueing, times.model)
    for totals in status.tasks:
        if totals.model == OTHER_MODELS:
            continue  # these tasks were counted under their models' names
        told.add(SUBMITTED, totals.submitted, totals.model)
        told.add(OPEN, totals.open, totals.model)
        for outcome in Outcome:
            told.add(TASKS, getattr(totals, outcome.value), totals.model, outcome.value)
    for queue in status.queues:
        told.add(QUEUE, queue.tasks, queue.model)
        told.add(OLDEST, queue.oldest_age_s, queue.model)


def _add_link(told: Samples, link: LinkStatus) -> None:
    epoch, _, generation = link.desired.partition(".")
    told.add(EPOCH, int(epoch or 0))
    told.add(GENERATION, int(generation or 0))
    told.add(CONNECTED, link.state == "connected")
    told.add(SPOOL, link.telemetry_spooled)
    told.add(ROWS, link.telemetry_produced)
    told.add(ROWS_ACKNOWLEDGED, link.telemetry_acknowledged)
    told.add(ROWS_DROPPED, link.telemetry_dropped)
