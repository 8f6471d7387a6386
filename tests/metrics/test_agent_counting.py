"""What an agent counts for Prometheus, from ends of tasks and from rows of telemetry."""

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stageloom.edge_agent.ingest.ledger import MOST_MODELS, OTHER_MODELS, TaskLedger
from stageloom.edge_agent.ingest.messages import MAX_PACKET_BYTES, MetricsPage, Status, encode
from stageloom.edge_agent.metrics.counting import AgentCounters, AgentFigures, CountedLink
from stageloom.edge_agent.metrics.scrape import _add_tasks
from stageloom.edge_agent.reporting.status import task_totals
from stageloom.edge_agent.serving.request_counts import RequestCounters, RequestSeconds, decode_requests
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.engine.trial import Verdict
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import Event, PlanActivated, RowData, StepTimings, TrialEnded
from stageloom.shared.metrics import SECONDS, Samples

PLAN = Digest("a" * 64)


def _figures(counters: AgentCounters) -> AgentFigures:
    """All pages as one."""
    models: list[Any] = []
    while True:
        body, more = counters.page(len(models), 2.5)
        figures = msgspec.json.decode(body, type=AgentFigures)
        models += figures.models
        if not more:
            return msgspec.structs.replace(figures, models=tuple(models))


def _verdict(verdict: Verdict) -> TrialEnded:
    return TrialEnded(1, 2, Origin.PLANNER, "trial", verdict.value, PLAN, None, None, None, None, 0, 1, 2)


@pytest.mark.promise("metrics-count-each-once")
def test_times_of_completed_tasks_alone_are_counted() -> None:
    counters = AgentCounters(tuple)
    ledger = TaskLedger(counters)
    for outcome, started_s in ((Outcome.COMPLETED, 1.003), (Outcome.EXPIRED, 1.5), (Outcome.REFUSED, None)):
        task = ledger.open(owner=1, owner_task=1, model="a", now_s=1.0)
        ledger.end(task.id, outcome, 1.02, started_s)
        ledger.end(task.id, Outcome.COMPLETED, 9.0, 8.0)  # the first end stands
    [times] = _figures(counters).models
    for counted, seconds in ((times.latency, 0.02), (times.queueing, 0.003)):
        [at] = [at for at, count in enumerate(counted.counts) if count]
        assert SECONDS[at - 1] < seconds <= SECONDS[at]
        assert counted.sum_s == pytest.approx(seconds)
    assert times.model == "a"


def test_rows_are_counted_and_passed_on() -> None:
    class Kept:
        rows: Sequence[RowData] = ()

        def record(self, rows: Sequence[RowData]) -> None:
            self.rows = rows

    kept, counters = Kept(), AgentCounters(tuple)
    rows: list[RowData] = [
        StepTimings(PLAN[:16], 0, 1, 40, 250_000, 9_000),
        StepTimings(PLAN[:16], 1, 1, 2, 500_000, 9_000),
        PlanActivated(PLAN, Origin.LOCAL, 1, 2),
        _verdict(Verdict.COMMIT),
        _verdict(Verdict.NO_GAIN),
        _verdict(Verdict.COMMIT),
        Event("alarm", "queues diverge"),
        Event("storage", "the disk is full"),
    ]
    link: Any = kept
    CountedLink(link, counters).record(rows)
    assert kept.rows is rows
    figures = _figures(counters)
    assert (figures.steps, figures.step_s, figures.activations, figures.alarms) == (42, 0.75, 1, 1)
    assert figures.verdicts == {one.value: 0 for one in Verdict} | {"commit": 2, "no_gain": 1}
    assert figures.engine_busy_s == 2.5


@pytest.mark.promise("metrics-count-each-once")
def test_every_page_fits_a_packet_and_models_are_bounded() -> None:
    counters = AgentCounters(tuple)
    for model in range(MOST_MODELS + 5):
        counters.task_completed(f"{model:0128d}", 0.0, 0.001, 0.01)
    for times in counters._models.values():
        times.latency.counts = times.queueing.counts = [2**53] * len(times.latency.counts)
    start, names = 0, list[str]()
    while True:
        body, more = counters.page(start, 0.0)
        assert len(encode(MetricsPage(2**53, body, more))) <= MAX_PACKET_BYTES
        page = msgspec.json.decode(body, type=AgentFigures).models
        names += [one.model for one in page]
        start += len(page)
        if not more:
            break
    assert names == [f"{model:0128d}" for model in range(MOST_MODELS)]


@pytest.mark.promise("metrics-count-each-once")
def test_models_that_are_served_no_more_make_room_for_those_that_are() -> None:
    old, served = [f"a{model}" for model in range(MOST_MODELS)], {"a7", "new"}
    counters = AgentCounters(lambda: served)
    for model in (*old, "gone", "new"):
        counters.task_completed(model, 0.0, 0.001, 0.01)
    assert [times.model for times in _figures(counters).models] == ["a7", "new"]


def test_requests_are_told_once_by_method_and_status_and_fit_a_packet_beside_models() -> None:
    """All methods, each with times in every bucket, beside as many models as there may be."""
    counted = RequestCounters()
    statuses = ("OK", "UNAVAILABLE", "NOT_FOUND", "INVALID_ARGUMENT", "CANCELLED")
    for method in range(40):
        for number, seconds in enumerate((*SECONDS, 1e3)):
            for _ in range(50):
                counted.add("grpc", f"SystemSharedMemoryRegister{method}", statuses[number % 5], seconds)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, theirs:
        counted.tell(theirs.fileno())
        requests = ours.recv(1 << 16)
        counted.tell(theirs.fileno())
        with pytest.raises(BlockingIOError):
            ours.recv(1)  # nothing came since
    counters = AgentCounters(tuple)
    for model in range(40):
        counters.task_completed(f"{model:064d}", 1.0, 1.1, 1.2)
    models, more = 0, True
    told: list[RequestSeconds] = []
    while more:
        body, more = counters.page(models, 0.0, requests)
        assert len(encode(MetricsPage(1, body, more))) <= MAX_PACKET_BYTES
        page = msgspec.json.decode(body, type=AgentFigures)
        models, told = models + len(page.models), [*told, *page.requests]
    assert (models, len(told)) == (40, 40)
    assert {sum(one.statuses.values()) for one in told} == {50 * 24}
    assert {tuple(one.seconds.counts) for one in told} == {(50,) * 24}


def test_counts_of_requests_that_are_cut_off_are_none() -> None:
    assert decode_requests(b"") == () == decode_requests(b'[{"protocol":')


def test_status_fits_a_packet_however_many_models_were_served_and_its_totals_add_up() -> None:
    """The oldest that is served no more and has no open task gives its place up."""
    names = [f"{number:0128d}" for number in range(1000)]
    ledger = TaskLedger(served=lambda: names[:1])
    waits = ledger.open(owner=1, owner_task=1, model=names[1], now_s=0.0)
    for name in (names[0], *names[2:]):
        task = ledger.open(owner=1, owner_task=1, model=name, now_s=0.0)
        ledger.end(task.id, Outcome.FAILED, 0.0)
    ledger.end(waits.id, Outcome.CANCELLED, 0.0)
    totals = task_totals(ledger)
    assert {one.model for one in totals} == {OTHER_MODELS, names[0], names[1], *names[-MOST_MODELS + 2 :]}
    assert (sum(one.failed for one in totals), sum(one.cancelled for one in totals)) == (999, 1)
    assert len(encode(Status(1, msgspec.json.encode(totals)))) < MAX_PACKET_BYTES / 2
    status: Any = SimpleNamespace(tasks=totals, queues=())
    told = Samples()
    _add_tasks(told, status, AgentFigures())
    text, _ = told.render("")
    assert b"(others)" not in text, "a scrape before has counted them"
