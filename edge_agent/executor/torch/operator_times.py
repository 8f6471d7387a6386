"""Measures every operator of a model alone, on real intermediate tensors, for the planner's costs."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stageloom.edge_agent.executor.base import NOT_TIMED, OperatorTime, TimingRequest
from stageloom.edge_agent.executor.timing import IdleTime, summary
from stageloom.edge_agent.lowering.dtypes import arithmetic
from stageloom.edge_agent.lowering.model import LoweredModel, ModelLowering
from stageloom.edge_agent.lowering.unit import Unit
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TensorId

Lap = Callable[[Callable[[], object], bool], float]
"""Runs a launch, which can be captured or not, and returns the seconds that it took on the device."""

_SEED = 7


def time_units(
    lowering: ModelLowering, request: TimingRequest, idle: Callable[[], bool], lap: Lap
) -> tuple[OperatorTime, ...]:
    """Time per operator on what the ones before it made; NOT_TIMED where the time was up. [num_operators]

    It asks for an idle moment before every run, and keeps no run during which a task came.

    Raises:
        ExecutorError: an operator cannot run alone.
    """
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    times: list[OperatorTime] = []
    lowered = lowering.at_batch(request.batch)
    graph = lowering.artifact.graph
    with torch.inference_mode(), arithmetic(lowering.precision):
        values = _inputs(lowered, graph.inputs)
        for op, unit in enumerate(lowered.units):
            if not moments.wait():
                break
            reads = [values[t] for t in unit.inputs]
            makes = [lowered.allocate(t) for t in unit.outputs]
            values.update(zip(unit.outputs, makes, strict=True))
            try:
                times.append(_time_one(unit, reads, makes, request.repeats, moments, lap))
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:300]
                raise ExecutorError(f"operator {op} of {graph.name!r} cannot run: {reason}") from error
            for tensor in [t for t in values if all(reader <= op for reader in graph.consumers[t])]:
                del values[tensor]
    return (*times, *[NOT_TIMED] * (len(lowered.units) - len(times)))


def _time_one(
    unit: Unit, reads: list[Tensor], makes: list[Tensor], repeats: int, moments: IdleTime, lap: Lap
) -> OperatorTime:
    def launch() -> None:
        unit.run_into(reads, makes)

    capturable = not unit.foreign
    taken_s: list[float] = []
    with moments.spend():
        lap(launch, capturable)  # warms caches and makes what later operators read
    while len(taken_s) < repeats and moments.wait():
        with moments.spend():
            took_s = lap(launch, capturable)
        if moments.undisturbed:
            taken_s.append(took_s)
    return summary(taken_s) if taken_s else NOT_TIMED


def _inputs(lowered: LoweredModel, inputs: tuple[TensorId, ...]) -> dict[TensorId, Tensor]:
    """Seeded inputs of the graph's types."""
    rng = np.random.default_rng(_SEED)
    values = {}
    for tensor in inputs:
        buffer = lowered.allocate(tensor)
        if buffer.dtype.is_floating_point:
            drawn = torch.from_numpy(rng.standard_normal(buffer.shape))
        else:
            drawn = torch.from_numpy(rng.integers(0, 2, buffer.shape))
        values[tensor] = buffer.copy_(drawn)
    return values
