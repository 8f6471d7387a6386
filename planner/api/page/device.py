"""One device: what runs, how it does, what was decided for it and why, and its alarms."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, Final, NamedTuple

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.page.fleet import Badge, plan_state, presence
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.device import DeviceShowRequest
from stageloom.planner.schema.job import JobShowRequest
from stageloom.planner.schema.plan import HistoryEntry
from stageloom.planner.schema.replan import ReplanInfo, ReplanListRequest, ReplanningShowRequest, TrialInfo
from stageloom.planner.schema.service import WatchRequest
from stageloom.planner.schema.telemetry import TELEMETRY_PAGE, DeviceTelemetryRequest, RollUp, TelemetryItem
from stageloom.planner.store.fleet_view import newest_alarms
from stageloom.planner.store.trials import trial_infos, trial_of
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import Alarm
from stageloom.shared.messages.telemetry import LatencyHistogram, RowKind, quantile_us
from stageloom.shared.plan import MAX_MODELS

_CHANGES: Final = 30
_CURVES_S: Final = 2 * 3600.0
_CURVE_PAGES: Final = ceil(2 * MAX_MODELS * (_CURVES_S / 60.0 + 1) / TELEMETRY_PAGE)
"""Of two kinds, a minute's entry of each model that a plan may have."""
_MINUTE_US: Final = 60_000_000
_GAP_US: Final = 2 * _MINUTE_US


class PlanChange(NamedTuple):
    """A plan that was decided for a device, or a re-plan that pushed none: why, its trial, how it ended."""

    at_us: int
    entry: HistoryEntry | None
    replan: ReplanInfo | None
    trial: TrialInfo | None
    state: Badge


class Curves(NamedTuple):
    """One chart: its title and unit, the span that it shows and moments in seconds since 1970, and for each
    model its values. A moment at which no model has one stands for a time in which nothing was measured."""

    title: str
    unit: str
    span: tuple[float, float]
    moments: Sequence[float]
    models: Sequence[str]
    values: Sequence[Sequence[float | None]]

    @property
    def json(self) -> str:
        """As the script draws it."""
        return msgspec.json.encode(self._asdict()).decode()

    @property
    def rows(self) -> list[tuple[int, list[float | None]]]:
        """(microseconds since 1970, each model's value) of what was measured, newest first."""
        by_moment = [(round(1e6 * at), [one[i] for one in self.values]) for i, at in enumerate(self.moments)]
        return [(at_us, row) for at_us, row in reversed(by_moment) if any(one is not None for one in row)]


def show(visit: Visit) -> Rendered:
    """All of a device but its curves, which take longer."""
    device = visit.path["device"]
    found = visit.ask(routes.DEVICE_SHOW, DeviceShowRequest, device=device)
    replans = visit.ask(routes.REPLAN_LIST, ReplanListRequest, device=device, limit=_CHANGES).items
    trials = visit.api.reader.read(trial_infos, found.device.device, limit=4 * _CHANGES)
    alarms = visit.api.reader.read(newest_alarms, found.device.device)
    return Rendered(
        "device.html",
        {
            **_figures(visit),
            "machine": found.machine,
            "changes": _changes(found.history, replans, trials),
            "alarms": [(alarm, _answer(alarm, replans)) for alarm in alarms],
        },
    )


def live(visit: Visit) -> Rendered:
    """What changes by the second; buttons and what runs only where they are others now."""
    figures = _figures(visit)
    others = {part: visit.query.get(part) != figures[f"{part}_key"] for part in ("buttons", "runs")}
    return Rendered("device_live.html", {**figures, **others})


def _figures(visit: Visit) -> dict[str, Any]:
    device = visit.path["device"]
    look = visit.ask(routes.WATCH, WatchRequest, device=device)
    info = look.devices[0]
    replanning = visit.ask(routes.REPLANNING_SHOW, ReplanningShowRequest, device=device).enabled
    return {
        "device": info,
        "presence": presence(info),
        "state": plan_state(info.report.state.value) if info.report.state else None,
        "rates": look.rates,
        "at_us": look.at_us,
        "replanning": replanning,
        "buttons_key": _key(info.revoked, bool(info.quarantine), replanning),
        "runs_key": _key(
            *(info.report.active, info.report.reason, info.desired_plan),
            *(info.desired_epoch, info.desired_generation, replanning),
        ),
    }


def _key(*shown: object) -> str:
    """It differs where what is shown does."""
    return digest_bytes([repr(shown).encode()])[:8]


def _changes(
    history: Sequence[HistoryEntry], replans: Sequence[ReplanInfo], trials: Sequence[TrialInfo]
) -> list[PlanChange]:
    """What was decided, newest first: generations with re-plans and trials, and re-plans without one."""
    pushed = {(replan.epoch, replan.generation): replan for replan in replans if replan.generation}
    changes = [
        PlanChange(
            entry.at_us,
            entry,
            pushed.get((entry.epoch, entry.generation)),
            trial_of(entry, trials),
            plan_state(entry.state),
        )
        for entry in history
    ]
    changes += [
        PlanChange(replan.at_us, None, replan, None, plan_state(replan.outcome))
        for replan in replans
        if not replan.generation
    ]
    return sorted(changes, key=lambda change: -change.at_us)[:_CHANGES]


def _answer(alarm: Alarm, replans: Sequence[ReplanInfo]) -> ReplanInfo | None:
    """The re-plan that an alarm began."""
    wanted = (alarm.boot, alarm.number)
    return next((replan for replan in replans if (replan.boot, replan.alarm) == wanted), None)


# -- curves -----------------------------------------------------------------------------------------------


def curves(visit: Visit) -> Rendered:
    """Queues and latency of the last hours, by the minute."""
    kinds = (RowKind.LATENCY_HISTOGRAM.value, RowKind.QUEUE_SAMPLE.value)
    # By whole minutes: a page that is loaded again asks for the same, and waits for what was begun for it.
    until_us = visit.api.clock.wall_us()
    since_us = max(until_us - round(1e6 * _CURVES_S), 0) // _MINUTE_US * _MINUTE_US
    items: list[TelemetryItem] = []
    after = ""
    for _ in range(_CURVE_PAGES):
        page = visit.ask(
            routes.DEVICE_TELEMETRY,
            DeviceTelemetryRequest,
            **{"device": visit.path["device"], "kind": kinds, "by": RollUp.MINUTE.value},
            **{"since_us": since_us, "after": after, "limit": TELEMETRY_PAGE},
        )
        items += page.items
        after = page.next
        if not after:
            break
    queues: defaultdict[str, dict[int, float]] = defaultdict(dict)
    latencies: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for item in items:
        if item.kind is RowKind.QUEUE_SAMPLE and "tasks" in item.values:
            tasks = item.values["tasks"]
            queues[item.values["model"]][item.at_us] = tasks["mean"] if isinstance(tasks, dict) else tasks
        elif item.kind is RowKind.LATENCY_HISTOGRAM and "buckets" in item.values:
            histogram = LatencyHistogram(**item.values)
            latencies[histogram.model][item.at_us] = quantile_us([histogram], 0.99) / 1e3
    span = since_us / 1e6, until_us / 1e6
    charts = [
        _chart("Queue", "tasks, mean of a minute", span, queues),
        _chart("Latency", "ms, p99", span, latencies),
    ]
    return Rendered("curves.html", {"charts": [chart for chart in charts if len(chart.moments) > 1]})


def _chart(title: str, unit: str, span: tuple[float, float], found: dict[str, dict[int, float]]) -> Curves:
    moments = _broken({at_us for values in found.values() for at_us in values})
    models = sorted(found)
    values = [[found[model].get(at_us) for at_us in moments] for model in models]
    return Curves(title, unit, span, [at_us / 1e6 for at_us in moments], models, values)


def _broken(measured: Collection[int]) -> list[int]:
    """Moments in order, with one more in each time in which nothing was measured: a curve breaks there."""
    moments = sorted(measured)
    breaks = [before + _MINUTE_US for before, at in pairwise(moments) if at - before > _GAP_US]
    return sorted([*moments, *breaks])


# -- buttons ----------------------------------------------------------------------------------------------


def confirm_revoke(visit: Visit) -> Rendered:
    """The question before a device's key is taken away."""
    visit.require(Role.ADMIN)
    found = visit.ask(routes.DEVICE_SHOW, DeviceShowRequest, device=visit.path["device"])
    return Rendered("revoke.html", {"device": found.device})


def job(visit: Visit) -> Rendered:
    """A re-plan by hand, as it goes on."""
    return Rendered("job.html", progress(visit).values)


def progress(visit: Visit) -> Rendered:
    """How far it is."""
    info = visit.ask(routes.JOB_SHOW, JobShowRequest, job=visit.path["job"])
    elapsed_s = max((info.ended_at_us or visit.api.clock.wall_us()) - info.began_at_us, 0) / 1e6
    return Rendered(
        "job_progress.html", {"job": info, "device_name": visit.path["device"], "elapsed_s": elapsed_s}
    )
