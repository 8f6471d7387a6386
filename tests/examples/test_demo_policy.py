"""The demo's trained policies are for the demo's models, as these are written and imported now."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks import zoo
from examples.demo.policies import STATES, answers, random_state
from examples.demo.story import FIRST, MODELS, POLICIES
from stageloom.planner.replan.learned import adopted
from stageloom.shared.artifact import open_artifact
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.search.compose import ModelChoice, compose

MAX_BYTES = 300_000
FILES = sorted(POLICIES.glob("*.checkpoint"))
PARTITION = FIRST[FIRST.index("--partition") + 1]


def imported(width: float, folder: Path) -> dict[Digest, Graph]:
    """The demo's models as the planner would have them, in the demo's order."""
    found = {}
    for name in MODELS:
        zoo.write(name, folder / f"{name}.onnx", width=width)
        report = import_model(folder / f"{name}.onnx", shapes={}, out_dir=folder)
        found[report.digest] = open_artifact(artifact_path(folder, report.digest)).graph
    return found


def require_fit(policy: MaddpgCheckpoint, width: float, folder: Path) -> None:
    """It would have its say in the demo's first plan, on any machine."""
    here = imported(width, folder)
    choices = [
        ModelChoice(name=name, artifact=artifact, graph=graph, partition=PARTITION)
        for name, (artifact, graph) in zip(MODELS, here.items(), strict=True)
    ]
    own = adopted(policy, "this machine", here)
    assert own.space.refusal(compose(choices), "this machine") == ""
    assert len(own.book) == len(policy.book)


@pytest.mark.promise("policies-come-demo-models")
def test_the_policy_of_the_quick_demo_is_for_its_models(tmp_path: Path) -> None:
    require_fit(decode((POLICIES / "width-0.25.checkpoint").read_bytes()), 0.25, tmp_path)


@pytest.mark.promise("policies-come-demo-models")
@pytest.mark.full
def test_the_policy_of_the_demo_is_for_its_models(tmp_path: Path) -> None:
    require_fit(decode((POLICIES / "width-1.checkpoint").read_bytes()), 1.0, tmp_path)


@pytest.mark.promise("policies-come-demo-models")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_kept_policy_is_small_and_says_where_it_comes_from(file: Path) -> None:
    body = file.read_bytes()
    assert len(body) <= MAX_BYTES
    about = decode(body).provenance
    assert {"settings", "seed", "models", "graphs", "arrivals_per_s", "transitions", "versions"} <= set(about)
    assert "adopted" not in about and tuple(about["models"]) and set(about["models"]) == set(MODELS)
    readme = (POLICIES / "README.md").read_text()
    assert f"`{file.name}`" in readme and digest_bytes([body]) in readme


@pytest.mark.promise("policies-come-demo-models")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_says_how_few_answers_a_kept_policy_gives(file: Path) -> None:
    found = answers(decode(file.read_bytes()))
    row = f"| `{file.name}` | {found.combinations} | {found.commonest} |"
    assert (
        row in (POLICIES / "README.md").read_text()
        and f"{STATES:,} seeded" in (POLICIES / "README.md").read_text()
    )


def test_answers_are_counted_over_states_that_differ() -> None:
    policy = decode(FILES[0].read_bytes())
    space = policy.space
    random = Random(0)
    drawn = [random_state(space, random) for _ in range(50)]
    assert len(set(drawn)) == 50
    draw = np.random.default_rng(0).normal
    arrays = {name: draw(size=kept.shape).astype(np.float32) for name, kept in policy.network.arrays.items()}
    attentive = MaddpgCheckpoint(space, MaddpgNetwork(arrays, space.agents))
    found = answers(attentive, states=200)
    assert found.combinations > 2 and found.commonest < 200
