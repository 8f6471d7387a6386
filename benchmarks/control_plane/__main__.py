"""The control plane: 1,000 devices on one planner process.

    python -m benchmarks.control_plane [--quick] [--json]

The planner is a process of its own, started as users start it, on its SQLite store. The devices live in one
other process: real CURVE connections (three each, as an agent has), real messages, one thread. Everything is
loopback, so planner, devices and this script share the machine's cores.

Heartbeats count when the device has the planner's acknowledgement, rows when it has the acknowledgement that
follows the commit. A push is timed from the request to the planner's API, for all devices at
once, to the acknowledgement of that device's report, while each device sends one heartbeat and one row a
second (`push_p99_ms`), and beside the full load before (`push_beside_load_p99_ms`). `_us_per_` figures are
CPU time: of the planner's threads, and of the devices' process, which takes its share of the cores.

After the kill a newer plan is written to the database before the planner starts again: every device has
something to be told. The time runs from the SIGKILL, that writing included; looking for what is lost is not.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import quantiles
from typing import Any

from sqlalchemy import func, select

from benchmarks.control_plane.clients import Clients, Freeze, Pace, Seen
from benchmarks.control_plane.planner import (
    PLAN,
    Enrolled,
    PlannerProcess,
    enrol,
    free_ports,
    push_behind_the_planners_back,
    push_to_all,
)
from benchmarks.runner import Report, progress, run
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.tables import ReportedRow, TelemetryRow
from stageloom.shared.ids import DeviceId

Figures = dict[str, float]

HEARTBEATS_PER_S = 10_500.0
ROWS_PER_S = 5_250.0
"""Offered: a little above the budget, so that what is acknowledged can reach it."""

ORDINARY_HEARTBEATS_PER_S = 1_000.0
ORDINARY_ROWS_PER_S = 1_000.0
"""What a thousand devices do that are not driven to the planner's limit."""

_FROZEN = 20
_PATIENCE_S = 240.0


def until(clients: Clients, condition: Callable[[Seen], bool], what: str) -> None:
    """Look until it is so.

    Raises:
        RuntimeError: it is not, after a time that only a broken planner takes.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition(clients.look()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what} did not happen in {_PATIENCE_S:g} s")
        time.sleep(0.1)


def connect(clients: Clients, devices: int) -> Figures:
    """Every device has a session, then every one a row acknowledged."""
    began_s = time.monotonic()
    until(clients, lambda now: now.welcomed == devices, "a session for every device")
    welcomed_s = time.monotonic()
    clients.tell(Pace(1.0 * devices, 5.0 * devices))
    until(clients, lambda now: now.measuring == devices, "a row of every device")
    return {"connected_s": welcomed_s - began_s, "measuring_s": time.monotonic() - began_s}


def load(planner: PlannerProcess, clients: Clients, pace: Pace, seconds: float) -> Figures:
    """Acknowledgements per second under an offered load, and what they cost."""
    clients.tell(pace)
    time.sleep(2.0)
    before, cpu = clients.look(), planner.cpu_s()
    time.sleep(seconds)
    after, cpu_after = clients.look(), planner.cpu_s()
    window_s = after.at_s - before.at_s
    library_s, python_s = (now - then for now, then in zip(cpu_after, cpu, strict=True))
    acknowledged = after.tally.acknowledged - before.tally.acknowledged
    percentiles = quantiles(after.tally.latency_s, n=100)
    return {
        "heartbeats_per_s": acknowledged / window_s,
        "rows_committed_per_s": (after.tally.rows - before.tally.rows) / window_s,
        "heartbeat_ack_p50_ms": percentiles[49] * 1e3,
        "heartbeat_ack_p99_ms": percentiles[98] * 1e3,
        "planner_cores": (library_s + python_s) / window_s,
        "planner_python_cores": python_s / window_s,
        "client_cores": (after.cpu_s - before.cpu_s) / window_s,
        "planner_cpu_us_per_heartbeat": (library_s + python_s) / max(acknowledged, 1) * 1e6,
        "client_cpu_us_per_heartbeat": (after.cpu_s - before.cpu_s) / max(acknowledged, 1) * 1e6,
        "refused": float(after.tally.refused - before.tally.refused),
    }


def push(planner: PlannerProcess, clients: Clients, pace: Pace, fleet: Sequence[Enrolled]) -> Figures:
    """A plan for every device at once beside `pace`, until each one's report of it is acknowledged."""
    clients.tell(pace)
    time.sleep(2.0)
    quiet_s, quiet = time.monotonic(), sum(planner.cpu_s())
    time.sleep(2.0)
    began_s, began = time.monotonic(), sum(planner.cpu_s())
    asked_s, generation = push_to_all(planner.data_dir, PLAN, [one.device for one in fleet])
    answered_s = time.monotonic()
    until(clients, lambda now: now.told >= generation, "a report of the pushed plan from every device")
    ended_s, ended = time.monotonic(), sum(planner.cpu_s())
    books = clients.look(books=True).books
    took_ms = sorted((one.acknowledged_at_s - asked_s[one.device]) * 1e3 for one in books)
    beside = (began - quiet) / (began_s - quiet_s) * (ended_s - began_s)
    return {
        "push_p50_ms": took_ms[len(took_ms) // 2],
        "push_p99_ms": took_ms[int(len(took_ms) * 0.99)],
        "push_max_ms": took_ms[-1],
        "pushes_answered_s": answered_s - min(asked_s.values()),
        "planner_cpu_us_per_push": max(ended - began - beside, 0.0) / len(fleet) * 1e6,
    }


def dead(clients: Clients, data_dir: Path) -> Figures:
    """Devices that hang while their connections stand, until the planner has noted each as offline."""
    clients.tell(Freeze(_FROZEN))
    frozen = clients.look(books=True)
    offset_s = time.time() - time.monotonic()
    last_s = {one.device: one.last_heartbeat_s for one in frozen.books[:_FROZEN]}
    deadline_s = time.monotonic() + 30.0
    noticed_s: dict[str, float] = {}
    with closing(ReadStore.open(data_dir)) as store:
        while len(noticed_s) < len(last_s) and time.monotonic() < deadline_s:
            time.sleep(0.2)
            for at_us, device, code, _ in store.read(newest_events, limit=10 * _FROZEN):
                began_s = last_s.get(DeviceId(device))
                if code == "offline" and began_s is not None and at_us / 1e6 - offset_s > began_s:
                    noticed_s.setdefault(device, at_us / 1e6 - offset_s - began_s)
    clients.tell(Freeze(0))
    if len(noticed_s) < len(last_s):
        raise RuntimeError(f"only {len(noticed_s)} of {len(last_s)} dead devices were noticed")
    until(clients, lambda now: now.welcomed == len(frozen.books), "the return of the frozen devices")
    return {"dead_device_noticed_s": max(noticed_s.values())}


def kill(
    planner: PlannerProcess,
    clients: Clients,
    fleet: Sequence[Enrolled],
    restart: Callable[[], PlannerProcess],
) -> tuple[Figures, PlannerProcess]:
    """SIGKILL under load; a newer plan is desired of everyone meanwhile; a new planner on the same data."""
    data_dir = planner.data_dir
    killed_s = planner.kill()
    acknowledged = clients.look(books=True)
    began_s = time.monotonic()
    # Now: once a device has told the new planner something newer, nobody sees that its report was lost.
    lost_rows, lost_reports, rows = lost(data_dir, acknowledged)
    looked_s = time.monotonic() - began_s
    generation = push_behind_the_planners_back(data_dir, fleet)
    pushed_s = time.monotonic()
    again = restart()
    ready_s = time.monotonic()
    until(clients, lambda now: now.welcomed == len(fleet) and now.told >= generation, "convergence")
    clients.tell(Pace(1.0 * len(fleet), 5.0 * len(fleet), new_rows=False))
    until(clients, lambda now: now.idle == len(fleet), "the last telemetry")
    settled = clients.look(books=True)
    again_lost_rows, again_lost_reports, again_rows = lost(data_dir, settled)
    return {
        "reconverged_s": max(one.acknowledged_at_s for one in settled.books) - killed_s - looked_s,
        "planner_away_s": ready_s - killed_s - (pushed_s - began_s),
        "planner_startup_s": again.startup_s,
        "acknowledged_rows_at_kill": float(rows),
        "acknowledged_rows_at_end": float(again_rows),
        "lost_acknowledged": float(max(lost_rows, again_lost_rows) + lost_reports + again_lost_reports),
        "reconnects": float(settled.tally.reconnects),
    }, again


def lost(data_dir: Path, seen: Seen) -> tuple[int, int, int]:
    """(rows and newest reports that were acknowledged and are not in the store, rows acknowledged)."""
    by_boot = (TelemetryRow.device, TelemetryRow.boot)
    rows = select(*by_boot, func.count(), func.max(TelemetryRow.sequence)).group_by(*by_boot)
    with closing(ReadStore.open(data_dir)) as store, store.database.read() as session:
        stored = {(device, boot): (count, last) for device, boot, count, last in session.execute(rows)}
        revisions = dict(session.execute(select(ReportedRow.device, ReportedRow.revision)).all())
    lost_rows = lost_reports = acknowledged = 0
    for one in seen.books:
        acknowledged += one.rows_acknowledged
        count, last = stored.get((one.device, one.boot), (0, -1))
        holes = last + 1 - count
        lost_rows += max(one.rows_acknowledged - (last + 1), 0) + holes
        lost_reports += revisions.get(one.device, -1) < one.revision_acknowledged
    return lost_rows, lost_reports, acknowledged


DEVICES = 1_000
_HEARTBEAT_INTERVAL_S = 0.1


def measure(devices: int, seconds: float) -> tuple[Figures, list[dict[str, Any]]]:
    """All phases on a planner and a fleet of their own."""
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        data_dir, port = Path(folder) / "planner", free_ports()

        def start() -> PlannerProcess:
            return PlannerProcess(data_dir, port, heartbeat_interval_s=_HEARTBEAT_INTERVAL_S)

        progress(f"enrolling {devices} devices through the store")
        data_dir.mkdir()
        fleet = enrol(data_dir, devices)
        planner = start()
        clients = Clients(fleet, planner.public_key, planner.endpoints)
        try:
            return _phases(planner, clients, fleet, start, seconds)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{planner.last_words()}") from error
        finally:
            clients.stop()


def _phases(
    planner: PlannerProcess,
    clients: Clients,
    fleet: Sequence[Enrolled],
    start: Callable[[], PlannerProcess],
    seconds: float,
) -> tuple[Figures, list[dict[str, Any]]]:
    data_dir, scale = planner.data_dir, len(fleet) / DEVICES
    figures: Figures = {"devices": float(len(fleet)), **connect(clients, len(fleet))}
    rows: list[dict[str, Any]] = [{"phase": "connect", "planner_startup_s": planner.startup_s}]
    progress("heartbeats alone")
    alone = load(planner, clients, Pace(HEARTBEATS_PER_S * scale, 0.0), seconds / 2)
    rows.append({"phase": "heartbeats alone", **alone})
    progress("heartbeats and telemetry")
    offered = Pace(HEARTBEATS_PER_S * scale, ROWS_PER_S * scale)
    mixed = load(planner, clients, offered, seconds)
    rows.append({"phase": "heartbeats and telemetry", **mixed})
    figures |= mixed
    for name in ("planner_cpu_us_per_heartbeat", "client_cpu_us_per_heartbeat"):
        figures[name] = alone[name]
    # What heartbeats beside rows cost more than heartbeats alone.
    more_us = mixed["planner_cpu_us_per_heartbeat"] - alone["planner_cpu_us_per_heartbeat"]
    more_us *= mixed["heartbeats_per_s"] / max(mixed["rows_committed_per_s"], 1.0)
    figures["planner_cpu_us_per_row"] = more_us
    figures["client_cpu_share"] = mixed["client_cores"] / (mixed["client_cores"] + mixed["planner_cores"])
    progress("a plan for everyone, beside all that")
    beside = push(planner, clients, offered, fleet)
    rows.append({"phase": "push beside heartbeats and telemetry", **beside})
    figures["push_beside_load_p99_ms"] = beside["push_p99_ms"]
    progress("a plan for everyone, at an ordinary pace")
    ordinary = Pace(ORDINARY_HEARTBEATS_PER_S * scale, ORDINARY_ROWS_PER_S * scale)
    figures |= push(planner, clients, ordinary, fleet)
    progress("devices that hang")
    figures |= dead(clients, data_dir)
    progress("the planner is killed")
    killed, planner = kill(planner, clients, fleet, start)
    planner.stop()
    return figures | killed, rows


def run_all(report: Report, options: argparse.Namespace) -> None:
    report.add(*measure(DEVICES, 6.0 if options.quick else 20.0))


if __name__ == "__main__":
    sys.exit(run(run_all, ("stageloom", "pyzmq", "msgspec", "msgpack", "sqlalchemy")))
