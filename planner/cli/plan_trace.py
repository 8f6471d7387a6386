"""`stageloom plan trace`: the way of a device's plans, from alarm to verdict, as OpenTelemetry spans."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import connected, first
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import progress, show
from stageloom.planner.schema.base import PAGE_MAX
from stageloom.planner.schema.plan import HistoryEntry, PlanHistoryRequest
from stageloom.planner.schema.replan import ReplanInfo, ReplanListRequest, TrialInfo
from stageloom.planner.schema.trial import TrialCompareRequest
from stageloom.shared.errors import ExitCode, StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.spans import RecordedSpan, send_spans
from stageloom.shared.text import counted

SERVICE = "stageloom-planner"
_FAILED = ("rejected", "rolled_back")


def trace(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="The device whose plans to follow.")],
    otlp: Annotated[str, typer.Option(metavar="URL", help="OTLP collector, such as http://localhost:4318.")],
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=PAGE_MAX, help="Newest generations to send.")
    ] = 20,
) -> None:
    """Send the way of a device's plans to a collector. A trace each: search, trial and verdict.

    What is sent are the records that the planner keeps; sent again, they are other traces.

    \b
    stageloom plan trace shop-7 --otlp http://localhost:4318
    """
    of = DeviceId(device)
    entries = first(routes.PLAN_HISTORY, checked(PlanHistoryRequest(device=of)), limit)
    infos = first(routes.REPLAN_LIST, ReplanListRequest(device=of, limit=PAGE_MAX), PAGE_MAX)
    replans = {(info.epoch, info.generation): info for info in infos}
    sent = send_spans(plan_spans(entries, replans, _trials(of, entries)), otlp, SERVICE)
    show({"traces": len(entries), "spans": sent}, lambda: progress(f"sent {counted(sent, 'span')}"))


def _trials(device: DeviceId, entries: Sequence[HistoryEntry]) -> dict[tuple[int, int], TrialInfo]:
    """Of those generations whose plan came to a trial."""
    found = {}
    with connected(live=False) as caller:
        for entry in entries:
            request = TrialCompareRequest(device=device, generation=entry.generation)
            try:
                trial = caller.call(routes.TRIAL_COMPARE, request).trial
            except StageloomError as error:
                if error.exit_code != ExitCode.USAGE:  # which says that there was no trial
                    raise
                continue
            if trial.candidate == entry.digest:  # else one that the device made and tried meanwhile
                found[entry.epoch, entry.generation] = trial
    return found


def plan_spans(
    entries: Sequence[HistoryEntry],
    replans: Mapping[tuple[int, int], ReplanInfo],
    trials: Mapping[tuple[int, int], TrialInfo],
) -> list[RecordedSpan]:
    """A trace per generation; re-plans and trials by epoch and generation.

    The search of a re-plan lasts from the alarm to the push. A trial's instants are of the device's clock.
    """
    spans = []
    for entry in entries:
        at = entry.epoch, entry.generation
        replan, trial = replans.get(at), trials.get(at)
        children = []
        if replan is not None:
            about = {"stageloom.cause": replan.cause, "stageloom.how": replan.how}
            children.append(_span("search", replan.at_us, entry.at_us, about))
        if trial is not None:
            about = {"stageloom.verdict": trial.verdict, "stageloom.how": trial.how}
            children.append(_span("trial", trial.began_us, trial.decided_us, about))
        spans.append(
            RecordedSpan(
                name="plan",
                began_us=min([entry.at_us, *(child.began_us for child in children)]),
                ended_us=max([entry.at_us, *(child.ended_us for child in children)]),
                attributes={
                    "stageloom.device": entry.device,
                    "stageloom.plan": entry.plan,
                    "stageloom.generation": f"{entry.epoch}.{entry.generation}",
                    "stageloom.decided_by": entry.decided_by,
                    "stageloom.state": entry.state,
                },
                failed=entry.reason or entry.state if entry.state in _FAILED else "",
                children=tuple(children),
            )
        )
    return spans


def _span(name: str, began_us: int, ended_us: int, about: Mapping[str, str]) -> RecordedSpan:
    return RecordedSpan(name=name, began_us=began_us, ended_us=ended_us, attributes=about)
