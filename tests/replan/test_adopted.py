"""A policy of another device class, or of other weights, taken over by an operator; never by itself."""

from dataclasses import replace
from typing import Any

import pytest

from stageloom.planner.replan.learned import LearnedPolicy, adopted
from stageloom.planner.replan.policy import How
from stageloom.shared.digest import digest_bytes, digest_of
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.decide import Blocks, Book, replanned
from stageloom.shared.policy.maddpg.space import ModelSpace, Space
from tests.replan.test_decide import GRAPHS, LEFT, RIGHT
from tests.replan.test_learned import CLASS, INCUMBENT, NETWORK, SPACE, observed, wanted

ELSEWHERE = "h100"
OTHER = {LEFT[0]: digest_of(["left, other weights"]), RIGHT[0]: digest_of(["right, other weights"])}


def book_of(plan: Plan) -> Book:
    """The schedules of a plan's combined blocks."""
    blocks = Blocks(INCUMBENT.models, GRAPHS)
    return {blocks.key(one.members): one.schedule for one in plan.combined}


def trained(space: Space = SPACE, **about: Any) -> MaddpgCheckpoint:
    """A policy, with the schedules of what it says."""
    return MaddpgCheckpoint(space, NETWORK, book_of(wanted({})), about)


def of_other_artifacts() -> MaddpgCheckpoint:
    """The same policy as it would have been trained with other weights of the models."""
    graphs = {OTHER[artifact]: graph for artifact, graph in GRAPHS.items()}
    models = tuple(replace(model, artifact=OTHER[model.artifact]) for model in INCUMBENT.models)
    space = replace(SPACE, device_class=ELSEWHERE, models=tuple(map(ModelSpace.of, models)))
    blocks = Blocks(models, graphs)
    book = {blocks.key(one.members): one.schedule for one in wanted({}).combined}
    about = {
        "models": {graph.name: artifact for artifact, graph in graphs.items()},
        "graphs": {artifact: graph.digest for artifact, graph in graphs.items()},
    }
    return MaddpgCheckpoint(space, NETWORK, book, about)


@pytest.mark.promise("policy-was-trained-elsewhere")
def test_a_policy_adopted_for_a_device_class_has_a_say_there_and_tells_where_it_is_from() -> None:
    foreign = trained(replace(SPACE, device_class=ELSEWHERE), seed=3)
    assert LearnedPolicy().remark(observed(encode(foreign))) != ""
    own = decode(encode(adopted(foreign, CLASS, GRAPHS)))
    assert "proposed" in LearnedPolicy().remark(observed(encode(own)))
    assert LearnedPolicy().at_once(observed(encode(own)))[-1].how is How.LEARNED
    assert own.book == foreign.book
    assert own.provenance == {
        "seed": 3,
        "models": {},
        "graphs": {artifact: graph.digest for artifact, graph in GRAPHS.items()},
        "adopted": {
            "policy": digest_bytes([encode(foreign)]),
            "device_class": ELSEWHERE,
            "artifacts": [LEFT[0], RIGHT[0]],
        },
    }


def test_nothing_changes_where_the_policy_is_for_the_class_already() -> None:
    assert adopted(mine := trained(), CLASS, GRAPHS) is mine


def test_a_policy_of_other_weights_is_taken_over_with_its_schedules() -> None:
    """It reads no weights: by the graphs it is for the same models, and says the same."""
    own = adopted(of_other_artifacts(), CLASS, GRAPHS)
    assert own.space == SPACE
    assert own.book == trained().book and own.book
    now = observed(b"")
    said = replanned(own.space, own.network, own.book, INCUMBENT, CLASS, GRAPHS, (), now.loads)
    mine = replanned(SPACE, NETWORK, trained().book, INCUMBENT, CLASS, GRAPHS, (), now.loads)
    assert said == mine


@pytest.mark.promise("policy-was-trained-elsewhere")
@pytest.mark.parametrize("here", [{}, {LEFT[0]: LEFT[1]}])
def test_without_the_models_here_it_is_refused_and_the_first_that_is_missing_named(
    here: dict[Digest, Any],
) -> None:
    with pytest.raises(InputError) as caught:
        adopted(of_other_artifacts(), CLASS, here)
    index, name = (1, LEFT[1].name) if not here else (2, RIGHT[1].name)
    assert f"model {index} of the policy ({name}) is not here" in str(caught.value)
    with pytest.raises(InputError, match="is not here"):
        adopted(replace(of_other_artifacts(), provenance={}), CLASS, GRAPHS)  # an older one, without graphs


def test_an_adopted_policy_can_be_adopted_again_where_neither_artifact_of_before_is_known() -> None:
    third = {digest_of([artifact, "third"]): graph for artifact, graph in GRAPHS.items()}
    once = decode(encode(adopted(of_other_artifacts(), CLASS, GRAPHS)))
    twice = adopted(once, "orin", third)
    assert [model.artifact for model in twice.space.models] == list(third)
    assert len(twice.book) == len(once.book)
    assert list(twice.provenance["models"].values()) == list(third)
    assert twice.provenance["adopted"]["policy"] == digest_bytes([encode(once)])
