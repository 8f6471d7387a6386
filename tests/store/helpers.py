"""Small real values for store tests, and child processes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from stageloom.planner.dispatch.ports import EnrolAttempt, StoredRow, TelemetryWrite
from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.planner.schema.policy import PolicyVerdict
from stageloom.planner.store.costs import schedules_of
from stageloom.planner.store.devices import add_token, enrol_device
from stageloom.planner.store.models import named_models
from stageloom.planner.store.store import Store
from stageloom.planner.store.telemetry_history import telemetry_history
from stageloom.planner.telemetry import TelemetryEntry, Width
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.clock import ManualClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import DeviceId, Digest, TensorId
from stageloom.shared.messages.telemetry import Ledger, QueueSample, Row, RowData, RowKind, encode_row
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose

NANO = DeviceId("nano")
T0_US = ManualClock().wall_us()
SECRET = b"0123456789abcdef"


def chain(name: str, operators: int) -> Graph:
    """A model of `operators` Relus one after another, cut in the middle."""
    return Graph(
        name=name,
        tensors=tuple(Tensor(f"t{i}", "float32", (1, 4)) for i in range(operators + 1)),
        operators=tuple(
            Operator("Relu", f"relu{i}", (i,), (TensorId(i),), (TensorId(i + 1),), 4, 0, i)
            for i in range(operators)
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(operators),),
        base_cuts=(operators // 2,),
        partitions=(("whole", ()), ("base", (operators // 2,))),
    )


def key(number: int) -> str:
    """A distinct 40-character key."""
    return f"{number:040d}"


def enrol(store: Store, device: DeviceId = NANO, number: int = 1) -> DeviceId:
    """Enrol a device with a token of its own."""
    secret = digest_bytes([SECRET + device.encode() + bytes([number])])
    store.write(add_token, secret, None, 3600.0)
    return store.write(enrol_device, EnrolAttempt(secret, key(number), device, "0.1.0", "cpu-2-core"))


def add_model(store: Store, folder: Path, name: str = "relu", operators: int = 4) -> Digest:
    """Put a small artifact in and return its digest."""
    digest, blob = pack_artifact(chain(name, operators), name.encode())
    path = folder / f"{name}.artifact"
    path.write_bytes(blob)
    store.add_model(name, path, digest)
    return digest


def small_plan(store: Store, name: str = "relu") -> Plan:
    """A sequential plan of one model of the store."""
    info = store.read(named_models, [name])[0]
    graph = store.load_artifact(info.digest).graph
    return compose([ModelChoice(name=name, artifact=info.digest, graph=graph)])


def looked_at(text: str, **changes: Any) -> PlanEvaluation:
    """A plan that a re-plan looked at, of the models that `text` stands for."""
    made = PlanEvaluation(
        plan=digest_bytes([text.encode(), b"plan"]),
        serves=digest_bytes([text.encode()]),
        scheduler="ios r=3",
        how="search",
        verdict=EvaluationVerdict.WORSE,
        blocks=4,
        members_max=2,
        busy=0.25,
        predicted=1.125,
        measured=True,
        search_s=None,
    )
    return structs.replace(made, **changes)


def verdict_on(body: bytes, reason: str = "") -> PolicyVerdict:
    """What the check of a policy of these bytes said; one that gives a reason did not pass."""
    return PolicyVerdict(
        policy=digest_bytes([body]),
        passed=not reason,
        reason=reason,
        criteria=(),
        loads=(),
        twin="derived from nano",
        arrivals="loads made of relu 30/s",
    )


def row(sequence: int, data: RowData | None = None, boot: int = 7, kind: RowKind | None = None) -> StoredRow:
    """A telemetry row as dispatch hands it over."""
    data = data or QueueSample("relu", sequence, 10, 20)
    body = encode_row(Row(T0_US + sequence, data))
    return StoredRow(boot, sequence, T0_US + sequence, kind or RowKind.QUEUE_SAMPLE, body, data)


def write_of(first: int, last: int, boot: int = 7, *, device: DeviceId = NANO) -> TelemetryWrite:
    """Rows first..last and a ledger that knows of them."""
    rows = tuple(row(sequence, boot=boot) for sequence in range(first, last + 1))
    return TelemetryWrite(device, rows, (Ledger(boot, last + 1, 0),))


def history(
    store: Store, kinds: Sequence[RowKind], *, by: Width | None = None, limit: int = 10_000
) -> list[TelemetryEntry]:
    """The newest telemetry of the device, oldest first."""
    entries, _ = store.read(telemetry_history, NANO, kinds, by=by, limit=limit)
    return entries[::-1]


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A child Python that runs `code`; its lines on stdout are the test's."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def finish(child: "subprocess.Popen[str]", timeout_s: float = 60.0) -> str:
    """Wait for a child that must succeed, and return what it printed."""
    out, err = child.communicate(timeout=timeout_s)
    assert child.returncode == 0, err
    return out


def kept_schedule(
    store: Store, device_class: str, batch: int, combined_block: Digest, scheduler: str
) -> str | None:
    """The stage string that a scheduler once found for a combined block on a device class."""
    kept = store.read(schedules_of, device_class, combined_block, batch)
    return next((one.stage_string for one in kept if one.scheduler == scheduler), None)
