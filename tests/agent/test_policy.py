"""The learned policy on the device: read, refused with a reason, asked for a plan when a trigger fires."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from stageloom.edge_agent.lifecycle.events import ArtifactGone, PlansMade
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.replan.alarms import Fired
from stageloom.edge_agent.replan.policy import LocalPlanner, PolicyRunner, differs, in_order
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.maddpg.actions import actions_of
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.policy.trigger import Cause, Firing
from stageloom.shared.search.compose import ModelChoice, compose
from tests.policy.maddpg.cases import saying
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[2])
GRAPHS: dict[Digest, Graph] = dict([LEFT, RIGHT])
PLAN = compose(
    [
        ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1], partition="base"),
        ModelChoice(name="right", artifact=RIGHT[0], graph=RIGHT[1], partition="base"),
    ]
)
SPACE = Space.of(PLAN, "toy")
TOGETHER = ((SPACE.members[0], SPACE.members[3]), (SPACE.members[1],), (SPACE.members[2], SPACE.members[4]))
POLICY = encode(MaddpgCheckpoint(SPACE, saying(SPACE, (0.5, 0.5, *actions_of(SPACE, TOGETHER)))))
RUNNING = RunnablePlan(PlanRef(PLAN.digest, Origin.PLANNER), PLAN.wire, ())


def fired(queued: int = 50) -> Fired:
    """The device tells of `right` first."""
    samples = (PolicySample(((0, 1), (1, 0, 0)), (-0.1, 0.1)),) * 10
    firing = Firing(cause=Cause.VARIANCE, value=1.0, threshold=0.1, at_s=1.0, samples=samples)
    loads = (
        Load(model="right", arrivals_per_s=100.0, service_s=0.001, queued=queued),
        Load(model="left", arrivals_per_s=10.0, service_s=0.004, queued=queued),
    )
    return Fired(firing=firing, loads=loads)


def desk(raw: bytes, folder: Path, device_class: str = "toy") -> PolicyRunner:
    (folder / "policy").write_bytes(raw)
    found = PolicyRunner(GRAPHS.get, lambda: device_class)
    status = found.load(folder / "policy")
    assert (status.digest, status.refused) == (digest_bytes([raw]), "")
    return found


def test_the_policys_plan_is_a_runnable_one_of_the_same_artifacts(tmp_path: Path) -> None:
    answer = desk(POLICY, tmp_path).plan(fired(), RUNNING)
    assert answer.plan is not None and not answer.refused
    made = decode_plan(answer.plan.wire, answer.plan.ref.digest)
    assert [block.members for block in made.combined] == list(TOGETHER)
    assert (answer.plan.ref.origin, answer.plan.artifacts) == (Origin.LOCAL, RUNNING.artifacts)


def test_samples_are_put_into_the_plans_order_before_the_policy_reads_them() -> None:
    seen = in_order(fired(), ["left", "right"])
    assert seen == (PolicySample(((1, 0, 0), (0, 1)), (0.1, -0.1)),) * 10
    assert in_order(fired(), ["left", "unseen"]) == ()


def test_a_plan_that_changes_no_interval_by_a_tenth_is_no_change() -> None:
    def paced(us: int) -> Plan:
        return replace(PLAN, models=tuple(replace(one, launch_interval_us=us) for one in PLAN.models))

    assert not differs(paced(1090), paced(1000)) and differs(paced(1110), paced(1000))
    assert differs(replace(paced(1000), lanes=2), paced(1000))


@pytest.mark.promise("hostile-bytes-policy-another")
def test_a_policy_of_another_device_class_is_refused_with_the_reason_and_the_plain_plan_stands(
    tmp_path: Path,
) -> None:
    answer = desk(POLICY, tmp_path, "nano").plan(fired(), RUNNING)
    assert answer.plan is None and "device class 'toy', not 'nano'" in answer.refused


def test_a_policy_whose_artifact_is_damaged_has_no_say(tmp_path: Path) -> None:
    (tmp_path / "policy").write_bytes(POLICY)
    empty = PolicyRunner(lambda digest: None, lambda: "toy")
    empty.load(tmp_path / "policy")
    assert empty.plan(fired(), RUNNING).refused


@pytest.mark.promise("hostile-bytes-policy-another")
def test_hostile_bytes_are_refused_and_never_raise(tmp_path: Path) -> None:
    """Cut short, and with bytes changed: refused, or a policy whose plan is legal or refused."""
    rng, path = Random(7), tmp_path / "policy"
    for trial in range(300):
        raw = bytearray(POLICY if trial % 3 else POLICY[: rng.randrange(len(POLICY))])
        for _ in range(rng.randrange(1, 4) if raw else 0):
            raw[rng.randrange(min(len(raw), 400))] = rng.randrange(256)
        path.write_bytes(raw)
        found = PolicyRunner(GRAPHS.get, lambda: "toy")
        if not found.load(path).refused:
            answer = found.plan(fired(), RUNNING)
            assert answer.refused or answer.plan is None or decode_plan(answer.plan.wire)


def test_a_file_that_is_missing_or_has_another_digest_is_refused(tmp_path: Path) -> None:
    found = PolicyRunner(GRAPHS.get, lambda: "toy")
    assert "cannot be read" in found.load(tmp_path / "absent").refused
    (tmp_path / "policy").write_bytes(POLICY)
    assert "another digest" in found.load(tmp_path / "policy", digest_bytes([b"other"])).refused
    assert found.plan(fired(), RUNNING).plan is None


class Immediate:
    """The background's work, done at once."""

    def run(self, work, then) -> None:  # type: ignore[no-untyped-def]
        then(work())


class Told:
    """A local planner, and what it said."""

    def __init__(self, path: Path | None, device_class: str = "toy") -> None:
        self.plans: list[PlansMade] = []
        self.gone: list[Digest] = []
        self.notes: list[tuple[str, str]] = []
        found = PolicyRunner(GRAPHS.get, lambda: device_class)
        note = lambda code, text: self.notes.append((code, text))  # noqa: E731
        self.planner = LocalPlanner(Immediate(), found, self._tell, note, path)  # type: ignore[arg-type]
        self.planner.start()

    def _tell(self, event: PlansMade | ArtifactGone) -> None:
        if isinstance(event, PlansMade):
            self.plans.append(event)
        else:
            self.gone.append(event.digest)


def test_the_policys_plan_is_offered_before_the_plain_one_and_said_to_be_its_when_it_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "policy").write_bytes(POLICY)
    told = Told(tmp_path / "policy")
    told.planner.fired(fired(), RUNNING)
    ((best, plain),) = (one.plans for one in told.plans)
    assert decode_plan(best.wire).structure != PLAN.structure == decode_plan(plain.wire).structure
    told.planner.activated(plain)
    assert told.notes == []
    told.planner.activated(best)
    assert [code for code, _ in told.notes] == ["policy_plan"]


@pytest.mark.parametrize("device_class", ["nano", None])
def test_without_a_policy_that_has_a_say_the_plain_plan_is_offered(
    tmp_path: Path, device_class: str | None
) -> None:
    (tmp_path / "policy").write_bytes(POLICY)
    told = Told(tmp_path / "policy", device_class) if device_class else Told(None)
    for _ in range(2):
        told.planner.fired(fired(), RUNNING)
    assert [len(one.plans) for one in told.plans] == [1, 1]
    assert [code for code, _ in told.notes] == ["policy_refused"] * bool(device_class), "said once"
    if device_class:
        assert told.planner.status is not None and "nano" in told.planner.status.refused


@pytest.mark.parametrize("first", ["policy", "plan"])
def test_a_policy_for_something_else_is_refused_before_a_trigger_fires(tmp_path: Path, first: str) -> None:
    store, digest = ArtifactStore(tmp_path), digest_bytes([POLICY])
    store.path(digest).write_bytes(POLICY)
    told = Told(None, "nano")
    if first == "plan":
        told.planner.activated(RUNNING)
    told.planner.use(digest, store)
    if first == "policy":
        told.planner.activated(RUNNING)
    assert told.planner.status is not None and "not 'nano'" in told.planner.status.refused
    assert [code for code, _ in told.notes] == ["policy_refused"]


def test_nothing_to_change_withdraws_what_was_offered() -> None:
    told = Told(None)
    told.planner.fired(fired(queued=0), None)
    assert told.plans == [PlansMade(())]


def test_the_planners_policy_goes_before_the_devices_own_which_comes_back_when_none_is_named(
    tmp_path: Path,
) -> None:
    store, digest = ArtifactStore(tmp_path), digest_bytes([POLICY])
    store.path(digest).write_bytes(POLICY)
    (tmp_path / "own").write_bytes(b"no policy")
    told = Told(tmp_path / "own")
    assert told.planner.status is not None and told.planner.status.refused
    told.planner.use(digest, store)
    assert told.planner.status.digest == digest and not told.planner.status.refused
    assert told.planner.needed() == {digest}
    told.planner.use(None, store)
    assert told.planner.status.digest == "" and told.planner.needed() == frozenset()


def test_a_policy_that_is_named_no_more_is_not_asked(tmp_path: Path) -> None:
    store, digest = ArtifactStore(tmp_path), digest_bytes([POLICY])
    store.path(digest).write_bytes(POLICY)
    told = Told(None)
    told.planner.use(digest, store)
    told.planner.use(None, store)
    told.planner.fired(fired(), RUNNING)
    assert told.planner.status is None and len(told.plans[-1].plans) == 1


def test_a_policy_that_was_damaged_on_disk_is_removed_so_that_it_is_fetched_again(tmp_path: Path) -> None:
    store, digest = ArtifactStore(tmp_path), digest_bytes([POLICY])
    store.path(digest).write_bytes(POLICY[:-1] + b"x")
    told = Told(None)
    told.planner.use(digest, store)
    assert told.gone == [digest] and not store.path(digest).exists()
