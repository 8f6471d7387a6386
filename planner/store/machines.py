"""What devices can run plans with, and what whole models take on their executors.

Both are what a device tells of itself, and count for that device alone.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from stageloom.planner.store.database import now_us
from stageloom.planner.store.rows import known_device
from stageloom.planner.store.tables import ArtifactRow, ExecutorTimeRow, MachineRow
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.telemetry import ExecutorTime, MachineFacts
from stageloom.shared.plan import MAX_CORES, ExecutorOptions

TRIED: Final = ("onnx", "openvino")
"""Executors that an agent tries by itself: one that was not measured is worth it."""

CHOSEN: Final = (*TRIED, "torch_cpu")
"""Executors that run on cores and hand tensors to each other, so that a plan may mix them."""

NULL: Final = "null"
"""Computes nothing, in no time: nobody may choose it but who runs it already."""

MOST_TIMES: Final = 4096
"""That are kept of a device: more than it can have models and executors."""

_NAME: Final = re.compile("[a-z][a-z0-9_]{0,63}")
_MOST_THREADS: Final = 256  # what a request may name

_LEAST_US: Final = 1e-3
_MOST_US: Final = 3600e6


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device can run plans with. `problems`: per executor why it cannot be used; empty where it can.

    The first executor that can be used is the one that it measures with where nothing is said.
    """

    cores: tuple[int, ...]
    problems: dict[str, str]
    intra_op_threads: int

    @property
    def executors(self) -> tuple[str, ...]:
        """Those that can be used."""
        return tuple(name for name, problem in self.problems.items() if not problem)

    def require(self, executor: str, device: DeviceId) -> None:
        """Refuse what cannot be used there.

        Raises:
            InputError: the device does not have this executor, or cannot use it.
        """
        if executor in self.executors:
            return
        problem = self.problems.get(executor, "its version does not know it")
        raise InputError(
            f"{device} cannot use the executor {executor}: {problem}",
            remedy=f"choose one of {', '.join(self.executors) or 'those that it has'}, or install it there",
        )


def store_machine(session: Session, device: DeviceId, facts: MachineFacts) -> None:
    """Keep what a device told of itself, as far as requests can name it; the newest counts."""
    cores = sorted(
        {core for span in facts.cores for core in range(span.first, min(span.last, MAX_CORES - 1) + 1)}
    )
    session.merge(
        MachineRow(
            device=device,
            cores=cores,
            executors=[[one.name, one.problem] for one in facts.executors if _NAME.fullmatch(one.name)],
            intra_op_threads=min(max(facts.intra_op_threads, 1), _MOST_THREADS),
            told_at_us=now_us(session),
        )
    )


def machine_of(session: Session, device: DeviceId) -> Machine | None:
    """What a device told of itself; None where its agent is too old to tell.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    row = session.get(MachineRow, device)
    if row is None:
        return None
    return Machine(tuple(row.cores), {name: why for name, why in row.executors}, row.intra_op_threads)


def store_executor_time(session: Session, device: DeviceId, told: ExecutorTime) -> str:
    """Keep what a model takes on an executor; returns why not, empty where it is kept."""
    key = (device, told.artifact, told.executor, told.intra_op_threads, told.batch)
    if session.get(ArtifactRow, told.artifact) is None:
        return f"it timed an artifact {told.artifact[:12]} that is not here"
    if told.time_us is not None and not _LEAST_US <= told.time_us <= _MOST_US:
        return f"a run of {told.time_us:g} us is outside {_LEAST_US:g} to {_MOST_US:g}"
    if session.get(ExecutorTimeRow, key) is None:
        machine = session.get(MachineRow, device)
        if machine is None or told.executor not in [name for name, _ in machine.executors]:
            return f"it timed an executor {told.executor!r} that it did not tell of"
        _make_room(session, device)
    session.merge(
        ExecutorTimeRow(
            device=device,
            artifact=told.artifact,
            executor=told.executor,
            intra_op_threads=told.intra_op_threads,
            batch=told.batch,
            environment=told.environment,
            time_us=told.time_us,
            runs=told.runs,
            reason=told.reason,
            measured_at_us=now_us(session),
        )
    )
    return ""


def _make_room(session: Session, device: DeviceId) -> None:
    """The time that was measured longest ago gives way: versions of models come and go."""
    of_it = ExecutorTimeRow.device == device
    if (session.scalar(select(func.count()).select_from(ExecutorTimeRow).where(of_it)) or 0) >= MOST_TIMES:
        oldest = select(ExecutorTimeRow).where(of_it).order_by(ExecutorTimeRow.measured_at_us).limit(1)
        session.delete(session.scalars(oldest).one())
        session.flush()


def whole_times(
    session: Session, device: DeviceId, artifacts: Collection[Digest]
) -> dict[Digest, dict[tuple[ExecutorOptions, int], float]]:
    """Per artifact, executor with its threads, and batch: seconds of one run, infinity where it cannot run.

    Only what the device measured as what it is now: another power mode or runtime makes it void.

    Raises:
        InputError: there is no such device.
    """
    environment = known_device(session, device).device_class
    rows = session.scalars(
        select(ExecutorTimeRow).where(
            ExecutorTimeRow.device == device,
            ExecutorTimeRow.artifact.in_(artifacts),
            ExecutorTimeRow.environment == environment,
        )
    )
    found: dict[Digest, dict[tuple[ExecutorOptions, int], float]] = {}
    for row in rows:
        options = ExecutorOptions(name=row.executor, intra_op_threads=row.intra_op_threads)
        seconds = math.inf if row.time_us is None else row.time_us / 1e6
        found.setdefault(Digest(row.artifact), {})[options, row.batch] = seconds
    return found


def usual_executor(machine: Machine | None) -> ExecutorOptions | None:
    """What a device measures with where nothing is said; None where it does not tell."""
    if machine is None or not machine.executors:
        return None
    return ExecutorOptions(name=machine.executors[0], intra_op_threads=machine.intra_op_threads)
