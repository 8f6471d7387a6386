"""Makes `version_0_1_0.json.gz`: a populated database of version 0.1.0, written by that version's own code.

    git archive 5cfc748 | tar -x -C /tmp/version_0_1_0
    PYTHONPATH=benchmarks/adversary/older:/tmp/version_0_1_0 \\
        python tests/data/version_0_1_0.py tests/data/version_0_1_0.json.gz

Three devices enrol at a real planner; one is revoked, one raises an alarm, and all report and send rows of
several kinds. The file holds every table, the artifact, and what that version reads of it. It is JSON, and no
SQL dump, so that the same rows go into SQLite and into Postgres; bytes are {"hex": text}.
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import MetaData, select

from stageloom.planner.store.database import Database
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import telemetry

DEVICES = ("nano", "orin", "gone")
PROFILED = Digest("0" * 64)
_KINDS = tuple(telemetry.RowKind)


def read_all(store: Any) -> dict[str, Any]:
    """Everything that version 0.1.0 shows of its database, as JSON values."""
    history, _ = store.history(None, limit=64)
    found = {
        "devices": store.devices(),
        "models": store.models(),
        "plans": store.plans(),
        "history": history,
        "events": store.events(),
        "balance": store.telemetry_balance()._asdict(),
        **{f"rows of {name}": store.telemetry(DeviceId(name), _KINDS) for name in DEVICES},
        **{f"replans of {name}": store.replans(DeviceId(name)) for name in DEVICES},
        **{f"trials of {name}": store.trials(DeviceId(name)) for name in DEVICES},
        "graph operators": [len(store.graph(one.digest).operators) for one in store.models()],
        "costs": [repr(one) for one in store.operator_costs("cpu-test", PROFILED).values()],
    }
    return json.loads(msgspec.json.encode(found))  # type: ignore[no-any-return]


def tables_of(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, parents first."""
    metadata = MetaData()
    with database.engine.connect() as connection:
        metadata.reflect(connection)
        return {
            table.name: [_packed(row) for row in connection.execute(select(table)).mappings()]
            for table in metadata.sorted_tables
        }


def _packed(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): {"hex": value.hex()} if isinstance(value, bytes) else value for name, value in row.items()
    }


def unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it was in the database."""
    return {
        name: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for name, value in row.items()
    }


def _populate(folder: Path) -> Path:
    from stageloom.shared.messages import control
    from tests.e2e.networks import write_chain
    from tests.planner.fake_device import BOOT, FakeDevice
    from tests.planner.processes import PlannerProcess, ok

    home = folder / "home"
    planner = PlannerProcess(home)
    ok(home, "model", "add", str(write_chain(folder / "chain.onnx", 1)), "--name", "chain")
    ok(home, "plan", "create", "--model", "chain", "--name", "whole")
    ok(home, "plan", "create", "--model", "chain", "--name", "cut", "--partition", "base", "--replicas", "2")
    for at, name in enumerate(DEVICES):
        token = ok(home, "device", "token", name).strip().splitlines()[-1]
        with FakeDevice(token, name) as device:
            device.enrol()
            device.hello()
            for plan in ("whole", "cut")[: at + 1]:
                ok(home, "plan", "push", name, plan, "--now")
            device.report(control.Report(revision=at + 3, reason=f"{name} has seen nothing"))
            device.rows(0, _rows())
            if name == "orin":
                alarm = control.Alarm(
                    boot=BOOT,
                    number=1,
                    at_us=1_700_000_000_000_000,
                    cause="variance",
                    value=0.5,
                    threshold=0.0625,
                    plan=None,
                    loads=(),
                    samples=(),
                    environment="cpu-test",
                )
                device.send("control", control.TO_PLANNER, alarm)
                device.expect("control", control.TO_DEVICE, control.AlarmAck)
    ok(home, "device", "revoke", "gone")
    planner.stop()
    return home


def _rows() -> list[Any]:
    timings = [telemetry.OperatorTiming(at, 10.0 + at, 0.5, 9) for at in range(4)]
    return [
        telemetry.TaskCounters("chain", 1_000_000, 40, 39, 1, 0, 0, 0),
        telemetry.LatencyHistogram("chain", 39, 390_000, 20_000, ((30, 20), (31, 19))),
        telemetry.QueueSample("chain", 3, 900, 1200),
        telemetry.StepTimings("0123456789abcdef", 0, 1, 39, 390_000, 20_000),
        telemetry.Event("note", "Größe, 长度"),
        telemetry.Utilisation("cpu", 51.5, "%"),
        telemetry.ProfileResult(1, PROFILED, 1, "cpu-test", tuple(timings), True),
    ]


def main(target: Path) -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as scratch:
        home = _populate(Path(scratch))
        reading: Any = import_module("stageloom.planner.store.reading")  # where that version has it
        store = reading.ReadStore.open(home)
        artifacts = [store.blobs.path(one.digest).read_bytes().hex() for one in store.models()]
        kept = {"artifacts": artifacts, "tables": tables_of(store.database), "read": read_all(store)}
        store.close()
    target.write_bytes(gzip.compress(json.dumps(kept, sort_keys=True).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
