"""The control plane: 1,000 devices on one planner process.

    python -m benchmarks.control_plane [--quick] [--json]

The planner is a process of its own, started as users start it, on its SQLite store. The devices live in one
other process: real CURVE connections (three each, as an agent has), real messages, one thread. Everything is
loopback, so planner, devices and this script share the machine's cores.

Heartbeats count when the device has the planner's acknowledgement, rows when it has the acknowledgement that
follows the commit. A push is timed from the request on the planner's admin socket, all devices' requests at
once, to the acknowledgement of that device's report, while each device sends one heartbeat and one row a
second (`push_p99_ms`), and beside the full load before (`push_beside_load_p99_ms`). `_us_per_` figures are
CPU time: of the planner's threads, and of the devices' process, which takes its share of the cores.

After the kill a newer plan is written to the database before the planner starts again: every device has
something to be told. The time runs from the SIGKILL, that writing included.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.control_plane import phases
from benchmarks.control_plane.clients import Clients, Pace, Setting
from benchmarks.control_plane.enrolled import Enrolled, enrol
from benchmarks.control_plane.planner import PlannerProcess, free_ports
from benchmarks.report import Report, arguments, emit, progress

DEVICES = 1_000
_HEARTBEAT_INTERVAL_S = 0.1


def measure(devices: int, seconds: float) -> tuple[phases.Figures, list[dict[str, Any]]]:
    """All phases on a planner and a fleet of their own."""
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        data_dir, port = Path(folder) / "planner", free_ports()

        def start() -> PlannerProcess:
            return PlannerProcess(data_dir, port, heartbeat_interval_s=_HEARTBEAT_INTERVAL_S)

        progress(f"enrolling {devices} devices through the store")
        data_dir.mkdir()
        fleet = enrol(data_dir, devices)
        planner = start()
        clients = Clients(Setting(fleet, planner.public_key, planner.endpoints))
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
) -> tuple[phases.Figures, list[dict[str, Any]]]:
    data_dir, scale = planner.data_dir, len(fleet) / DEVICES
    figures: phases.Figures = {"devices": float(len(fleet)), **phases.connect(clients, len(fleet))}
    rows: list[dict[str, Any]] = [{"phase": "connect", "planner_startup_s": planner.startup_s}]
    progress("heartbeats alone")
    alone, _ = phases.load(planner, clients, Pace(phases.HEARTBEATS_PER_S * scale, 0.0), seconds / 2)
    rows.append({"phase": "heartbeats alone", **alone})
    progress("heartbeats and telemetry")
    offered = Pace(phases.HEARTBEATS_PER_S * scale, phases.ROWS_PER_S * scale)
    mixed, _ = phases.load(planner, clients, offered, seconds)
    rows.append({"phase": "heartbeats and telemetry", **mixed})
    figures |= mixed
    for name in ("planner_cpu_us_per_heartbeat", "client_cpu_us_per_heartbeat"):
        figures[name] = alone[name]
    figures["planner_cpu_us_per_row"] = _us_per_row(alone, mixed)
    figures["client_cpu_share"] = mixed["client_cores"] / (mixed["client_cores"] + mixed["planner_cores"])
    progress("a plan for everyone, beside all that")
    beside = phases.push(planner, clients, offered, fleet)
    rows.append({"phase": "push beside heartbeats and telemetry", **beside})
    figures["push_beside_load_p99_ms"] = beside["push_p99_ms"]
    progress("a plan for everyone, at an ordinary pace")
    ordinary = Pace(phases.ORDINARY_HEARTBEATS_PER_S * scale, phases.ORDINARY_ROWS_PER_S * scale)
    figures |= phases.push(planner, clients, ordinary, fleet)
    progress("devices that hang")
    figures |= phases.dead(clients, data_dir)
    progress("the planner is killed")
    killed, planner = phases.kill(planner, clients, fleet, start)
    planner.stop()
    return figures | killed, rows


def _us_per_row(alone: phases.Figures, mixed: phases.Figures) -> float:
    """The planner's CPU for a row: what heartbeats beside rows cost more than heartbeats alone."""
    more_us = mixed["planner_cpu_us_per_heartbeat"] - alone["planner_cpu_us_per_heartbeat"]
    return more_us * mixed["heartbeats_per_s"] / max(mixed["rows_committed_per_s"], 1.0)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.prog = "python -m benchmarks.control_plane"
    options = parser.parse_args()
    report = Report("control_plane")
    report.add(*measure(DEVICES, 6.0 if options.quick else 20.0))
    emit(report, as_json=options.json, packages=("stageloom", "pyzmq", "msgspec", "msgpack", "sqlalchemy"))


if __name__ == "__main__":
    main()
