"""What the agent's main process counts while metrics are wanted, and how it hands that over.

Times of tasks come from the ends that the engine process reports anyway; the rest from the telemetry rows
that pass on their way to the spool. The engine process does nothing for it.
"""

from collections.abc import Callable, Container, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.edge_agent.ingest.ledger import MOST_MODELS
from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.shell import Link
from stageloom.edge_agent.reporting.status import LinkStatus
from stageloom.edge_agent.serving.request_counts import RequestSeconds, decode_requests
from stageloom.shared.engine.trial import Verdict
from stageloom.shared.messages.telemetry import Event, PlanActivated, RowData, StepTimings, TrialEnded
from stageloom.shared.metrics import CountedSeconds

_PER_PAGE: Final = 32  # models, so that a page fits a packet of the local socket
_BESIDE_REQUESTS: Final = 8  # models: the protocol has some 40 methods, each with one histogram


class ModelSeconds(Struct):
    """Completed tasks of one model: from when the agent read them to their end, and to their first step."""

    model: str
    latency: CountedSeconds
    queueing: CountedSeconds


class AgentFigures(Struct, kw_only=True):
    """What the agent counted since it started; times of some models."""

    steps: int = 0
    step_s: float = 0.0
    activations: int = 0
    alarms: int = 0
    verdicts: dict[str, int] = {}
    engine_busy_s: float = 0.0  # of the engine process that runs
    models: tuple[ModelSeconds, ...] = ()
    requests: tuple[RequestSeconds, ...] = ()  # of the serving process that runs; on the first page alone


class AgentCounters:
    """Used on the main loop's thread alone."""

    def __init__(self, served: Callable[[], Container[str]]) -> None:
        """`served` tells the models of the active plan: others give their places up when one is wanted."""
        self._served = served
        self._figures = AgentFigures(verdicts={verdict.value: 0 for verdict in Verdict})
        self._models: dict[str, ModelSeconds] = {}

    def task_completed(self, model: str, received_s: float, started_s: float, ended_s: float) -> None:
        """A task's instants on one clock."""
        times = self._models.get(model)
        if times is None:
            if len(self._models) >= MOST_MODELS and not self._forget_unserved(model):
                return
            times = ModelSeconds(model, CountedSeconds.empty(), CountedSeconds.empty())
            self._models[model] = times
        times.latency.add(ended_s - received_s)
        times.queueing.add(started_s - received_s)

    def _forget_unserved(self, wanted: str) -> bool:
        """Make room for a model that is served; False if there is none."""
        served = self._served()
        if wanted in served:
            self._models = {name: times for name, times in self._models.items() if name in served}
        return len(self._models) < MOST_MODELS

    def row(self, row: RowData) -> None:
        """A row is recorded for the planner."""
        figures = self._figures
        match row:
            case StepTimings():
                figures.steps += row.count
                figures.step_s += row.sum_us / 1e6
            case PlanActivated():
                figures.activations += 1
            case TrialEnded():
                figures.verdicts[row.verdict] = figures.verdicts.get(row.verdict, 0) + 1
            case Event(code="alarm"):
                figures.alarms += 1

    def page(self, start: int, engine_busy_s: float, requests: bytes = b"") -> tuple[bytes, bool]:
        """(figures with times of models from `start` on, as JSON; whether there are more).

        `requests`: as the serving process told them last. The first page holds them, and fewer models.
        """
        models = tuple(self._models.values())
        of_requests = () if start else tuple(decode_requests(requests))
        shown = models[start : start + (_BESIDE_REQUESTS if of_requests else _PER_PAGE)]
        figures = msgspec.structs.replace(
            self._figures, engine_busy_s=engine_busy_s, models=shown, requests=of_requests
        )
        return msgspec.json.encode(figures), start + len(shown) < len(models)


class CountedLink:
    """A link whose rows are counted as they pass."""

    def __init__(self, link: Link, counters: AgentCounters) -> None:
        self._link = link
        self._counters = counters

    def fileno(self) -> int:
        return self._link.fileno()

    def take(self) -> Sequence[ev.Event]:
        return self._link.take()

    def act(self, action: ev.SendMessage | ev.FetchArtifact | ev.Reconnect) -> None:
        self._link.act(action)

    def record(self, rows: Sequence[RowData]) -> None:
        for row in rows:
            self._counters.row(row)
        self._link.record(rows)

    def status(self) -> LinkStatus:
        return self._link.status()

    def stop(self) -> None:
        self._link.stop()
