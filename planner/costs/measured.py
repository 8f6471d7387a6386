"""Operator and stage times as devices measured them, in the form that `stageloom.shared.search` takes.

Both are kept by content, an artifact's operators and a combined block's stages, under a device class: what
one device measured for one model serves every device of its class, and every model that shares a block's
artifact. Measured stages also teach how groups slow each other down, which serves models that were never
measured in stages. `trained_policy` gives the gpg policy that a search uses beside these costs.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from stageloom.planner.costs.records import OperatorCost
from stageloom.planner.store.costs import operator_costs, stage_costs
from stageloom.planner.store.policies import newest_policy
from stageloom.planner.store.store import Reader
from stageloom.shared.errors import DecodeError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, MeasuredStage, fitted, samples
from stageloom.shared.search.interference import Interference, Sample

_log = logging.getLogger(__name__)

STALE_S: Final = 30 * 24 * 3600.0
"""What is older is measured again when it matters. Another driver, power mode or executor version is another
device class; this is for what such names do not tell, a clogged fan or a neighbour on the board."""

_CLASSES: Final = 16  # device classes whose models are kept


def device_costs(
    store: Reader,
    key: str,
    executor: ExecutorOptions,
    models: Sequence[tuple[Digest, int]],
    *,
    graph_of: Callable[[Digest], Graph],
    now_us: int = 0,
    taught_by: Sequence[str] = (),
) -> CostTable:
    """All that is kept of these (artifact, batch) under a device class, or a device's own key.

    Of an artifact that was not measured at its batch it is what one task at a time took. Stages of other
    models, and those of the classes in `taught_by`, are in it by what they taught. `now_us` 0: nothing is
    stale.
    """
    stages = tuple(store.read(stage_costs, key, executor))
    operators, measured_at = {}, {}
    for artifact, batch in models:
        found = store.read(operator_costs, key, artifact, batch, executor)
        measured_at[artifact] = batch if found else 1
        operators[artifact] = (
            found if found or batch == 1 else store.read(operator_costs, key, artifact, 1, executor)
        )
    table = cost_table(operators, measured_at)
    teachers = [(key, stages), *((one, store.read(stage_costs, one, executor)) for one in taught_by)]
    rates, learned = _learned(store, teachers, executor, table.rates, graph_of)
    return replace(
        table,
        executor=executor,
        rates=rates,
        interference=learned,
        stages=tuple(stage for stage in stages if all(member[0] in operators for member in stage.members)),
        fresh_since_us=max(now_us - round(STALE_S * 1e6), 0),
    )


def plan_costs(
    store: Reader,
    key: str,
    plan: Plan,
    *,
    graph_of: Callable[[Digest], Graph],
    now_us: int = 0,
    taught_by: Sequence[str] = (),
    others: Iterable[ExecutorOptions] = (),
) -> CostTable:
    """`costs_on` a plan's executors of its models; `others`: executors that it is compared on, too."""
    models = [(model.artifact, model.batch) for model in plan.models]
    executors = dict.fromkeys((*plan.executors, *others))
    return costs_on(
        store, key, tuple(executors), models, graph_of=graph_of, now_us=now_us, taught_by=taught_by
    )


def costs_on(
    store: Reader,
    key: str,
    executors: Sequence[ExecutorOptions],
    models: Sequence[tuple[Digest, int]],
    *,
    graph_of: Callable[[Digest], Graph],
    now_us: int = 0,
    taught_by: Sequence[str] = (),
) -> CostTable:
    """`device_costs` on the first of some executors, with those on the others beside."""
    first, *others = (
        device_costs(store, key, executor, models, graph_of=graph_of, now_us=now_us, taught_by=taught_by)
        for executor in executors
    )
    return replace(first, beside=dict(zip(executors[1:], others, strict=True)))


_Key = tuple[str, ExecutorOptions]
_models: dict[_Key, tuple[tuple[Sample, ...], DeviceRates, Interference]] = {}
"""The newest model per device class, with the samples it was fitted to: most re-plans find none new."""


def _learned(
    store: Reader,
    teachers: Sequence[tuple[str, Sequence[MeasuredStage]]],
    executor: ExecutorOptions,
    rates: DeviceRates,
    graph_of: Callable[[Digest], Graph],
) -> tuple[DeviceRates, Interference]:
    """The interference model fitted to these stages, and the rates with its figures for streams. The first
    teacher is the cache key."""
    taught: list[Sample] = []
    for device_class, stages in teachers:
        for batch in sorted({stage.batch for stage in stages}):
            of_batch = tuple(stage for stage in stages if stage.batch == batch)
            artifacts = dict.fromkeys(member[0] for stage in of_batch for member in stage.members)
            graphs = {one: graph for one in artifacts if (graph := _graph(graph_of, one)) is not None}
            operators = {
                one: store.read(operator_costs, device_class, one, batch, executor) for one in graphs
            }
            table = cost_table(operators, dict.fromkeys(graphs, batch))
            taught += samples(replace(table, rates=rates, stages=of_batch), graphs)
    if not taught:  # many executors have none, and are not to take the places of those that do
        return fitted((), rates)
    key = teachers[0][0], executor
    found = _models.get(key)
    if found is None or found[0] != tuple(taught):
        fresh_rates, learned = fitted(taught, rates)
        found = tuple(taught), fresh_rates, learned
        if len(_models) >= _CLASSES and key not in _models:
            _models.clear()
        _models[key] = found
    return found[1], found[2]


def _graph(graph_of: Callable[[Digest], Graph], artifact: Digest) -> Graph | None:
    """None: the model was removed; what its stages taught goes with it."""
    try:
        return graph_of(artifact)
    except StageloomError:
        return None


def cost_table(
    measured: Mapping[Digest, Mapping[int, OperatorCost]], measured_at: Mapping[Digest, int]
) -> CostTable:
    """The table over all artifacts, measured at these batches; what was not measured keeps its estimate.

    A time of zero is kept: an operator that only passes a tensor on costs nothing worth measuring.
    """
    kept = {
        (artifact, OpId(operator)): cost
        for artifact, costs in measured.items()
        for operator, cost in costs.items()
        if cost.median_us >= 0
    }
    return CostTable(
        measured_s={key: cost.median_us / 1e6 for key, cost in kept.items()},
        measured_at=measured_at,
    )


def trained_policy(store: Reader, device_class: str) -> bytes:
    """The bytes of gpg's newest policy; empty, for the packaged one, where there is none that can be used.

    A policy that another version trained on other features must not stop a search.
    """
    from stageloom.shared.policy.gpg.checkpoint import decode  # numpy, which no start needs

    found = store.read(newest_policy, "gpg", device_class)
    if found is None:
        return b""
    try:
        decode(found)
    except DecodeError as error:
        _log.warning("the packaged policy is used: %s", error)
        return b""
    return found
