"""When the artifacts of a plan are read again, and when what was found of them before holds."""

import errno
import os
from pathlib import Path

import pytest

from stageloom.edge_agent.lifecycle import check
from stageloom.edge_agent.lifecycle.check import PlanChecker, PlanUnusable
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.artifact import Artifact, open_artifact, pack_artifact
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ArtifactNeed, Origin
from stageloom.shared.search.compose import ModelChoice, compose
from tests.search.graphs import CHAIN, model

_, GRAPH = model("m", CHAIN)


class Rig:
    """A store with one artifact, a plan over it, and the number of times that the artifact was hashed."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.digest, self.blob = pack_artifact(GRAPH, b"weights")
        self.store = ArtifactStore(home)
        self.file = self.store.path(self.digest)
        self.file.write_bytes(self.blob)
        plan = compose([ModelChoice(name="m", artifact=self.digest, graph=GRAPH)])
        need = ArtifactNeed("m", self.digest, len(self.blob))
        self.plan = RunnablePlan(PlanRef(plan.digest, Origin.PLANNER), plan.wire, (need,))
        self.hashed = 0
        patch.setattr(check, "open_artifact", self._open)

    def _open(self, path: Path, expected: Digest) -> Artifact:
        self.hashed += 1
        return open_artifact(path, expected)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def test_an_artifact_is_hashed_once_in_the_life_of_a_process(rig: Rig) -> None:
    checker = PlanChecker(rig.store)
    first = checker.check(rig.plan)
    assert isinstance(first, PlanFacts) and checker.check(rig.plan) == first
    assert rig.hashed == 1
    PlanChecker(rig.store).check(rig.plan)
    assert rig.hashed == 2, "a start trusts no file"


@pytest.mark.promise("last-known-good-whose")
def test_a_file_that_was_touched_is_hashed_again_though_it_looks_the_same(rig: Rig) -> None:
    checker = PlanChecker(rig.store)
    checker.check(rig.plan)
    before = rig.file.stat()
    rig.file.write_bytes(rig.blob[:-1] + b"X")
    os.utime(rig.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = checker.check(rig.plan)
    assert isinstance(found, PlanUnusable) and found.damaged == {rig.digest}
    assert not rig.file.exists(), "it is fetched again"


def test_an_artifact_that_was_removed_and_came_back_is_hashed_again(rig: Rig) -> None:
    checker = PlanChecker(rig.store)
    checker.check(rig.plan)
    rig.store.remove(rig.digest)
    assert isinstance(checker.check(rig.plan), PlanUnusable)
    rig.file.write_bytes(rig.blob)
    assert isinstance(checker.check(rig.plan), PlanFacts)
    assert rig.hashed == 2


@pytest.mark.promise("last-known-good-whose")
def test_an_artifact_that_cannot_be_read_now_stays_and_is_read_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk, or too many open files, says nothing about what the file holds."""

    def fail(path: Path, expected: Digest) -> Artifact:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    checker = PlanChecker(rig.store)
    with monkeypatch.context() as patched:
        patched.setattr(check, "open_artifact", fail)
        found = checker.check(rig.plan)
        assert checker.graph(rig.digest) is None
    assert isinstance(found, PlanUnusable) and found.may_pass and not found.damaged
    assert rig.file.exists()
    assert isinstance(checker.check(rig.plan), PlanFacts)


def test_an_artifact_with_its_digest_that_is_none_is_the_plans_fault(tmp_path: Path) -> None:
    """Fetched again it would be the same, for ever."""
    digest = digest_bytes([b"no artifact"])
    store = ArtifactStore(tmp_path)
    store.path(digest).write_bytes(b"no artifact")
    plan = compose([ModelChoice(name="m", artifact=digest, graph=GRAPH)])
    need = ArtifactNeed("m", digest, 11)
    found = PlanChecker(store).check(RunnablePlan(PlanRef(plan.digest, Origin.PLANNER), plan.wire, (need,)))
    assert isinstance(found, PlanUnusable) and not found.damaged and not found.may_pass
    assert store.path(digest).exists()
