"""The plan of a device with another version of one of its models."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from stageloom.planner.plan_request import nearest_request
from stageloom.planner.plan_search import search_job
from stageloom.planner.schema.plan import ModelOptions, PlanInfo
from stageloom.planner.store.store import ReadStore
from stageloom.shared.bound import bind
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.model_version import ModelReference, model_reference
from stageloom.shared.plan import ModelPlan, Plan, decode_plan
from stageloom.shared.search.arrangements import even_cuts
from stageloom.shared.search.job import SearchJob


def with_version(
    plan: Plan, model: str, artifact: Digest, graph_of: Callable[[Digest], Graph]
) -> Plan | None:
    """The plan with another artifact of a model and all else as it is; None where that is not legal.

    Versions that differ in weights alone have the same operators and cuts, so that schedules go on to hold.
    """
    models = tuple(replace(one, artifact=artifact) if one.name == model else one for one in plan.models)
    made = replace(plan, models=models)
    try:
        bind(made, {one.artifact: graph_of(one.artifact) for one in models})
    except PlanError:
        return None
    return made


def search_with_version(
    store: ReadStore, info: PlanInfo, model: str, version: int, artifact: Digest
) -> SearchJob:
    """The search for a plan by the rules of this one, with another version of a model that does not fit it.

    The version is cut evenly into as many blocks where it does not have the plan's cuts. Rules that no
    request can say are left out (`nearest_request`).

    Raises:
        InputError: a model of the plan is not here.
    """
    request = nearest_request(store, info)
    (before,) = (one for one in decode_plan(info.wire).models if one.name == model)
    graph = store.graph(artifact)
    reference = str(ModelReference(model, version))
    models = tuple(
        _as_version(one, before, reference, graph) if model_reference(one.model).name == model else one
        for one in request.models
    )
    return search_job(store, msgspec.structs.replace(request, models=models))


def _as_version(options: ModelOptions, before: ModelPlan, reference: str, graph: Graph) -> ModelOptions:
    """The options for another version, cut where the one before was, or into as many blocks."""
    offered = dict(graph.partitions)
    partition, cuts = options.partition, options.cuts
    if not set(cuts) <= set(graph.base_cuts) or (not cuts and partition not in offered):
        partition, cuts = "whole", even_cuts(graph, before.num_blocks)
    as_many = len(cuts or offered.get(partition, ())) == len(before.cuts)
    return msgspec.structs.replace(
        options,
        model=reference,
        partition=partition,
        cuts=cuts,
        executors=options.executors if as_many else options.executors[:1],
        resources=options.resources if as_many else options.resources[:1],
    )
