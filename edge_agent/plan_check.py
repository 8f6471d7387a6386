"""Is a plan legal here, and are its artifacts whole? Slow (it hashes them), so it runs off the main loop."""

import logging
from dataclasses import dataclass

from edge_agent.ingest.signature import model_info
from edge_agent.link.events import RunnablePlan
from edge_agent.plan_facts import PlanFacts, frame_of, strict_intervals_s
from edge_agent.store import ArtifactStore
from shared.artifact import open_artifact
from shared.bound import bind
from shared.errors import StageloomError
from shared.graph import Graph
from shared.ids import Digest
from shared.plan import decode_plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanUnusable:
    """It cannot; `damaged` artifacts were removed, so that they are fetched again."""

    digest: Digest
    reason: str
    damaged: frozenset[Digest] = frozenset()


def check_plan(plan: RunnablePlan, store: ArtifactStore) -> PlanFacts | PlanUnusable:
    """Decode, open every artifact, check legality."""
    digest = plan.ref.digest
    damaged: set[Digest] = set()
    graphs: dict[Digest, Graph] = {}
    try:
        decoded = decode_plan(plan.wire, digest)
        for needed in dict.fromkeys(model.artifact for model in decoded.models):
            if (graph := _graph(needed, store)) is None:
                damaged.add(needed)
            else:
                graphs[needed] = graph
        if damaged:
            names = ", ".join(one[:12] for one in sorted(damaged))
            reason = f"missing or damaged artifacts: {names}; the planner sends them again"
            return PlanUnusable(digest, reason, frozenset(damaged))
        bind(decoded, graphs)
        models = {model.name: model_info(model.name, graphs[model.artifact]) for model in decoded.models}
    except StageloomError as error:
        return PlanUnusable(digest, str(error))
    except Exception as error:  # ours; without an answer the deployment would stand still for ever
        _log.exception("plan %s cannot be checked", digest[:12])
        return PlanUnusable(digest, f"it cannot be checked: {type(error).__name__}: {error}")
    members = tuple(
        tuple(decoded.models[member.model].name for member in combined.members)
        for combined in decoded.combined
    )
    return PlanFacts(
        digest=digest,
        models=models,
        artifacts={model.name: model.artifact for model in decoded.models},
        members=members,
        strict_s=strict_intervals_s(decoded),
        frame=frame_of(decoded),
    )


def _graph(digest: Digest, store: ArtifactStore) -> Graph | None:
    try:
        graph = open_artifact(store.path(digest), digest).graph
        store.make_durable(digest)
        return graph
    except (StageloomError, OSError) as error:
        _log.warning("artifact %s is missing or damaged: %s", digest[:12], error)
        store.remove(digest)
        return None
