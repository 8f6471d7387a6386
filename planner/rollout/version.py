"""The plan of a device with another version of one of its models."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from stageloom.planner.plan_request import request_of
from stageloom.planner.plan_search import search_job
from stageloom.planner.schema.plan import PlanInfo
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.model_version import ModelReference
from stageloom.shared.plan import Plan, decode_plan
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

    Cuts that the version does not have are left out: it is one block then.

    Raises:
        InputError: the plan is of no scheduler that can search again, or a model of it is not here.
    """
    request = request_of(store, info)
    graph = store.graph(artifact)
    reference = str(ModelReference(model, version))
    others = {one.name: one.artifact for one in decode_plan(info.wire).models if one.name != model}
    names = _references(store, others)
    models = []
    for one in request.models:
        if one.model != model:
            models.append(msgspec.structs.replace(one, model=names[one.model]))
            continue
        cuts = one.cuts if set(one.cuts) <= set(graph.base_cuts) else ()
        known = {name for name, _ in graph.partitions}
        partition = one.partition if one.partition in known else "whole"
        per_block = cuts == one.cuts and partition == one.partition
        models.append(
            msgspec.structs.replace(
                one,
                model=reference,
                cuts=cuts,
                partition=partition,
                executors=one.executors if per_block else one.executors[:1],
                resources=one.resources if per_block else one.resources[:1],
            )
        )
    return search_job(store, msgspec.structs.replace(request, models=tuple(models)))


def _references(store: ReadStore, artifacts: dict[str, Digest]) -> dict[str, str]:
    """How a request names the versions of models that a plan has."""

    infos = store.read(model_infos, names=sorted(artifacts), limit=None)
    found = {
        info.model: str(ModelReference(info.model, info.version))
        for info in infos
        if info.digest == artifacts[info.model]
    }
    for name in artifacts.keys() - found.keys():
        raise InputError(f"the version of {name} that the plan has was removed", remedy="add it again")
    return found
