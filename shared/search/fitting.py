"""From measured stages to the model of their device class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.shared.blocks import Block
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, MeasuredStage, Members, StageCosts
from stageloom.shared.search.interference import Interference, Sample, fit


def samples(table: CostTable, graphs: Mapping[Digest, Graph]) -> list[Sample]:
    """What the measured stages teach: those that are no merge, of graphs given and measured operators."""
    found: list[Sample] = []
    known: dict[tuple[Members, int], StageCosts | None] = {}
    reading = replace(table, stages=(), interference=fit(()))
    for stage in table.stages:
        key = stage.members, stage.batch
        if key not in known:
            known[key] = _readable(reading, stage, graphs)
        costs = known[key]
        if costs is not None and not stage.merge:
            networks = tuple(sorted({artifact for artifact, _, _ in stage.members}))
            found.append(Sample(costs.terms(stage.groups), stage.seconds, networks))
    return found


def _readable(table: CostTable, stage: MeasuredStage, graphs: Mapping[Digest, Graph]) -> StageCosts | None:
    members = []
    for artifact, start, stop in stage.members:
        if artifact not in graphs or any(
            (artifact, OpId(op)) not in table.measured_s for op in range(start, stop)
        ):
            return None
        members.append((artifact, graphs[artifact], Block(0, start, stop, (), (), (), ())))
    return table.for_members(members, batches=[stage.batch] * len(members))


LEAST_STAGES_TO_FIT: Final = 3
"""Fewer say more about themselves than about others: the formula stays."""


def fitted(taught: Sequence[Sample], rates: DeviceRates) -> tuple[DeviceRates, Interference]:
    """The model of a device class, and its rates with what the model says of streams.

    Streams have no stages to predict: their simulation gets the model's contention and barrier.
    """
    learned = fit(
        taught if len(taught) >= LEAST_STAGES_TO_FIT else (),
        contention=rates.contention,
        barrier_s=rates.barrier_s,
        launch_s=rates.launch_s,
    )
    if not learned.samples:
        return rates, learned
    return replace(
        rates,
        contention=max(learned.of("rest"), 0.0),
        barrier_s=max(learned.of("meet"), 0.0) * rates.launch_s,
    ), learned
