"""What one scrape of a planner tells: its devices, its API, its searches and its books, as samples."""

from collections.abc import Sequence
from typing import Final

from stageloom.planner.api.context import ApiContext
from stageloom.planner.api.handlers.devices import now
from stageloom.planner.metrics.counting import OUTCOMES, SEARCH_ENDS, PlannerCounters
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.store.devices import device_infos, device_numbers, planner_epoch
from stageloom.planner.store.events import unreadable_records
from stageloom.planner.store.telemetry import telemetry_balance
from stageloom.shared.metrics import CountedSeconds, MetricKind, MetricSpec, Samples
from stageloom.shared.version import __version__

MOST_DEVICES: Final = 512
"""Devices that have metrics of their own."""

_gauge, _counter, _histogram = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM

INFO: Final = MetricSpec("stageloom_planner_info", _gauge, "1, with the planner's version.", ("version",))
UPTIME: Final = MetricSpec("stageloom_planner_uptime_seconds", _gauge, "Since the planner started.")
EPOCH: Final = MetricSpec(
    "stageloom_planner_epoch", _gauge, "Grows with every restored backup that devices were ahead of."
)
DEVICES: Final = MetricSpec(
    "stageloom_planner_devices",
    _gauge,
    "Devices: enrolled (all of them), online, quarantined or revoked.",
    ("state",),
)
BACKLOG: Final = MetricSpec(
    "stageloom_planner_backlog_rows", _gauge, "Telemetry rows taken in and not yet committed."
)
BACKLOG_LIMIT: Final = MetricSpec(
    "stageloom_planner_backlog_limit_rows", _gauge, "Beyond so many (backlog_rows) devices keep their rows."
)
FAILURES: Final = MetricSpec(
    "stageloom_planner_telemetry_failures_total",
    _counter,
    "Batches of telemetry that the database did not take; devices send them again.",
)
ROWS: Final = MetricSpec(
    "stageloom_planner_telemetry_rows_total",
    _counter,
    "Rows of all devices since its database began: stored, dropped by the device, or lost with a database.",
    ("fate",),
)
UNREADABLE: Final = MetricSpec(
    "stageloom_planner_unreadable_records", _gauge, "What devices sent and the database would not take."
)
REPLANS: Final = MetricSpec("stageloom_planner_replans_total", _counter, "Re-plans that alarms began.")
VERDICTS: Final = MetricSpec(
    "stageloom_planner_trial_verdicts_total",
    _counter,
    "How plans ended on devices: commit, reject, no_gain, refused, abandoned or idle.",
    ("verdict",),
)
REQUESTS: Final = MetricSpec(
    "stageloom_api_requests_total",
    _counter,
    "Answers of the API by the name of the verb (`none`: there is no such path).",
    ("route", "status"),
)
REQUEST_SECONDS: Final = MetricSpec(
    "stageloom_api_request_duration_seconds",
    _histogram,
    "From a request's head to its answer; of a stream to its first event.",
    ("route",),
)
SEARCHES: Final = MetricSpec(
    "stageloom_searches_total",
    _counter,
    "Searches that ended: completed, failed or cancelled, by where they began (ray or processes).",
    ("where", "outcome"),
)
SEARCH_SECONDS: Final = MetricSpec(
    "stageloom_search_duration_seconds",
    _histogram,
    "Completed searches, from when the pool had one to its result.",
    ("where",),
)
SEARCHING: Final = MetricSpec(
    "stageloom_searches_running", _gauge, "Searches that run or wait for a worker.", ("where",)
)
WORKERS: Final = MetricSpec("stageloom_search_workers", _gauge, "Searches that can run at once.")
ON_RAY: Final = MetricSpec("stageloom_search_on_ray", _gauge, "1 where the next search runs on Ray, else 0.")
UNTOLD: Final = MetricSpec(
    "stageloom_devices_untold", _gauge, f"Devices beyond the {MOST_DEVICES} that have metrics of their own."
)
ONLINE: Final = MetricSpec("stageloom_device_online", _gauge, "1 with a live session, else 0.", ("device",))
LAST_SEEN: Final = MetricSpec(
    "stageloom_device_last_seen_timestamp_seconds", _gauge, "Unix time of its last sign of life.", ("device",)
)
DESIRED: Final = MetricSpec(
    "stageloom_device_desired_generation", _gauge, "Newest generation that is desired of it.", ("device",)
)
REPORTED: Final = MetricSpec(
    "stageloom_device_reported_generation", _gauge, "Generation that it reports on.", ("device",)
)
STATE: Final = MetricSpec(
    "stageloom_device_plan_state",
    _gauge,
    "1, with how far it is with that generation (docs/states.md).",
    ("device", "state"),
)
TASKS: Final = MetricSpec(
    "stageloom_device_tasks_total",
    _counter,
    "Its tasks that ended, of all models, as telemetry tells.",
    ("device", "outcome"),
)

PLANNER_METRICS: Final = (
    *(INFO, UPTIME, EPOCH, DEVICES, BACKLOG, BACKLOG_LIMIT, FAILURES, ROWS, UNREADABLE, REPLANS, VERDICTS),
    *(REQUESTS, REQUEST_SECONDS, SEARCHES, SEARCH_SECONDS, SEARCHING, WORKERS, ON_RAY),
    *(UNTOLD, ONLINE, LAST_SEEN, DESIRED, REPORTED, STATE, TASKS),
)

_WHERE: Final = ("processes", "ray")


def scrape(api: ApiContext, accept: str) -> tuple[bytes, str]:
    """(body, content type) of a running planner's metrics.

    Raises:
        UnavailableError: prometheus-client is not installed.
        TimeoutError: the thread that serves devices does not answer.
    """
    return planner_samples(api).render(accept)


def planner_samples(api: ApiContext) -> Samples:
    """All of `PLANNER_METRICS`; a device's from when it enrols until it is revoked."""
    told, live, counters = Samples(), api.live, api.live.counters.copy()
    told.add(INFO, 1, __version__)
    told.add(UPTIME, api.clock.monotonic_s() - live.started_s)
    told.add(EPOCH, api.reader.read(planner_epoch))
    numbers = api.reader.read(device_numbers)
    for state, number in (*numbers._asdict().items(), ("online", len(live.fleet.online()))):
        told.add(DEVICES, number, state)
    told.add(BACKLOG, live.fleet.backlog_rows())
    told.add(BACKLOG_LIMIT, api.config.backlog_rows)
    told.add(FAILURES, live.fleet.telemetry_failures()[0])
    balance = api.reader.read(telemetry_balance, None)
    for fate in ("stored", "dropped", "lost"):
        told.add(ROWS, getattr(balance, fate), fate)
    told.add(UNREADABLE, api.reader.read(unreadable_records))
    told.add(REPLANS, counters.replans)
    for verdict, count in sorted(counters.verdicts.items()):
        told.add(VERDICTS, count, verdict)
    _add_work(told, counters)
    told.add(WORKERS, live.pool.workers)
    told.add(ON_RAY, live.pool.where == "ray")
    infos = now(api, api.reader.read(device_infos, limit=MOST_DEVICES, with_revoked=False))
    told.add(UNTOLD, max(numbers.enrolled - numbers.revoked - len(infos), 0))
    _add_devices(told, infos, counters)
    return told


def _add_work(told: Samples, counters: PlannerCounters) -> None:
    for (route, status), count in sorted(counters.requests.items()):
        told.add(REQUESTS, count, route, str(status))
    for route, counted in sorted(counters.request_s.items()):
        told.add(REQUEST_SECONDS, counted, route)
    for where in _WHERE:
        for outcome in SEARCH_ENDS:
            told.add(SEARCHES, counters.searches[where, outcome], where, outcome)
        told.add(SEARCH_SECONDS, counters.search_s.get(where, CountedSeconds.empty()), where)
        told.add(SEARCHING, counters.searching[where], where)


def _add_devices(told: Samples, infos: Sequence[DeviceInfo], counters: PlannerCounters) -> None:
    for info in infos:
        told.add(ONLINE, info.online, info.device)
        told.add(LAST_SEEN, info.last_seen_us / 1e6, info.device)
        told.add(DESIRED, info.desired_generation, info.device)
        told.add(REPORTED, info.report.generation, info.device)
        if info.report.state is not None:
            told.add(STATE, 1, info.device, info.report.state.value)
        for outcome in OUTCOMES:
            told.add(TASKS, counters.tasks[info.device][outcome], info.device, outcome)
