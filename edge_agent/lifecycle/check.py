"""Is a plan legal here, and are its artifacts whole? Slow (it hashes them), so it runs off the main loop."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stageloom.edge_agent.ingest.signature import model_info
from stageloom.edge_agent.lifecycle.facts import PlanFacts, strict_intervals_s
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.artifact import file_digest, open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.plan import Plan, decode_plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanUnusable:
    """It cannot; `damaged` artifacts were removed, so that they are fetched again."""

    digest: Digest
    reason: str
    damaged: frozenset[Digest] = frozenset()
    may_pass: bool = False  # by itself: a file that could not be read may be read later


_FileState: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, times of the last change of content and of the inode in nanoseconds."""


class PlanChecker:
    """Checks plans, on one thread.

    A file that was found whole is read again only if it was touched since: between a trigger and the plan
    that answers it no device should hash weights that it runs. Every start hashes them.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._whole: dict[Digest, tuple[_FileState, Graph]] = {}

    def check(self, plan: RunnablePlan) -> PlanFacts | PlanUnusable:
        """Decode, open every artifact, check legality."""
        digest = plan.ref.digest
        damaged: set[Digest] = set()
        graphs: dict[Digest, Graph] = {}
        try:
            decoded = decode_plan(plan.wire, digest)
            for needed in dict.fromkeys(model.artifact for model in decoded.models):
                if (graph := self._read(needed)) is None:
                    damaged.add(needed)
                else:
                    graphs[needed] = graph
            self._forget_removed()
            if damaged:
                names = ", ".join(one[:12] for one in sorted(damaged))
                reason = f"missing or damaged artifacts: {names}; the planner sends them again"
                return PlanUnusable(digest, reason, frozenset(damaged))
            bind(decoded, graphs)
            return _facts(decoded, graphs, plan.artifacts)
        except StageloomError as error:
            return PlanUnusable(digest, str(error))
        except OSError as error:
            reason = f"an artifact cannot be read: {error}; mend the disk, or free memory and open files"
            return PlanUnusable(digest, reason, may_pass=True)
        except Exception as error:  # ours; without an answer the deployment would stand still for ever
            _log.exception("plan %s cannot be checked", digest[:12])
            return PlanUnusable(digest, f"it cannot be checked: {type(error).__name__}: {error}")

    def graph(self, digest: Digest) -> Graph | None:
        """A whole artifact's; None where it is missing, damaged (then it is removed) or cannot be read."""
        try:
            return self._read(digest)
        except (StageloomError, OSError) as error:
            _log.warning("artifact %s cannot be used: %s", digest[:12], error)
            return None

    def _read(self, digest: Digest) -> Graph | None:
        """None: it is missing, or was damaged and removed.

        Raises:
            OSError: it cannot be read now. That says nothing about the file, so it stays.
            StageloomError: it has its digest and is no artifact all the same; the next one would be equal.
        """
        store = self._store
        path = store.path(digest)
        try:
            before = _file_state(path)
            if (known := self._whole.get(digest)) is not None and known[0] == before:
                return known[1]
            graph = open_artifact(path, digest).graph
        except (StageloomError, FileNotFoundError) as error:
            if isinstance(error, StageloomError) and file_digest(path) == digest:
                raise
            _log.warning("artifact %s is missing or damaged: %s", digest[:12], error)
            store.remove(digest)
            return None
        store.make_durable(digest)
        self._whole[digest] = (before, graph)
        return graph

    def _forget_removed(self) -> None:
        """Files of plans that nobody holds any more are removed elsewhere."""
        self._whole = {one: whole for one, whole in self._whole.items() if self._store.path(one).exists()}


def _file_state(path: Path) -> _FileState:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _facts(decoded: Plan, graphs: Mapping[Digest, Graph], needs: Sequence[ArtifactNeed]) -> PlanFacts:
    versions = {(need.model, need.digest): need.version for need in needs}
    members = tuple(
        tuple(decoded.models[member.model].name for member in combined.members)
        for combined in decoded.combined
    )
    return PlanFacts(
        digest=decoded.digest,
        models={
            model.name: model_info(
                model.name, graphs[model.artifact], versions.get((model.name, model.artifact), 1)
            )
            for model in decoded.models
        },
        artifacts={model.name: model.artifact for model in decoded.models},
        members=members,
        strict_s=strict_intervals_s(decoded),
        structure=decoded.structure,
        lanes=decoded.lanes,
    )
