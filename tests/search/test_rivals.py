"""Rival policies as plans: what each plan says, and that the engine's invariants hold under all of them."""

from dataclasses import replace
from random import Random

import pytest

from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import Action, PlanKey
from stageloom.shared.errors import SettingError
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, Plan, StepChoice, Wait
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.job import SearchJob, run_search
from stageloom.shared.search.rivals import DEFAULT_BATCH, policies, policy
from tests.engine.generate import Library
from tests.engine.simulator import Scenario
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[1])


def choice(found: tuple[Digest, object], **fields: object) -> ModelChoice:
    digest, graph = found
    return ModelChoice(name=graph.name, artifact=digest, graph=graph, **fields)  # type: ignore[attr-defined, arg-type]


def plan(name: str, *models: ModelChoice, **fields: object) -> Plan:
    found = policy(name)
    chosen = models or (choice(LEFT, partition="base"), choice(RIGHT, partition="base"))
    job = SearchJob(models=chosen, scheduler=found.scheduler, **fields)  # type: ignore[arg-type]
    return run_search(found.plan(job), lambda: 0.0)


def members(made: Plan) -> list[tuple[Member, ...]]:
    return [block.members for block in made.combined]


ALONE = [(Member(0, 0, b),) for b in range(3)] + [(Member(1, 0, b),) for b in range(2)]


@pytest.mark.parametrize(
    ("name", "choice_of_steps"),
    [
        ("sequential", StepChoice.RATIO),
        ("round_robin", StepChoice.ROUND_ROBIN),
        ("proportional", StepChoice.WEIGHTED),
    ],
)
def test_policies_that_differ_in_the_order_of_steps_have_sequential_blocks_and_one_instance(
    name: str, choice_of_steps: StepChoice
) -> None:
    made = plan(
        name,
        choice(LEFT, partition="base", replicas=3, weight=5),
        choice(RIGHT, partition="base", batch=2),
    )
    assert members(made) == ALONE
    assert (made.lanes, made.step_choice, made.wait) == (1, choice_of_steps, Wait.NONE)
    assert [(one.replicas, one.batch, one.weight) for one in made.models] == [(1, 1, 5), (1, 1, 1)]
    for block in made.combined:
        assert isinstance(block.schedule, StageSchedule)
        assert all(len(stage.operators) == 1 for stage in block.schedule.stages)


def test_every_instance_has_a_lane_of_its_own_as_far_as_there_are_lanes() -> None:
    made = plan("instances", choice(LEFT, replicas=3), choice(RIGHT))
    assert [one.replicas for one in made.models] == [3, 2]
    assert made.lanes == 5 == len(made.combined)
    assert plan("instances", choice(LEFT, replicas=40)).lanes == 16


def test_models_that_can_take_batches_and_only_those() -> None:
    digest, graph = RIGHT
    made = plan(
        "batching",
        choice(LEFT),
        choice(model("more", CHAIN), batch=4, batch_max_delay_us=7),
        choice((digest, replace(graph, batchable=False))),
    )
    assert [(one.batch, one.batch_max_delay_us) for one in made.models] == [
        (DEFAULT_BATCH, 2_000),
        (4, 7),
        (1, 0),
    ]
    assert (made.lanes, {one.replicas for one in made.models}) == (1, {1})


@pytest.mark.parametrize(("name", "wait"), [("synchronised", Wait.ALL), ("shared_input", Wait.NONE)])
def test_joint_graphs_hold_all_models_i_th_blocks(name: str, wait: Wait) -> None:
    made = plan(name)
    assert members(made) == [
        (Member(0, 0, 0), Member(1, 0, 0)),
        (Member(0, 0, 1), Member(1, 0, 1)),
        (Member(0, 0, 2),),
    ]
    assert (made.wait, made.lanes) == (wait, 1)


def test_self_acceleration_schedules_replicas_of_a_model_together() -> None:
    made = plan("self_acceleration", choice(LEFT, replicas=3), choice(RIGHT))
    assert members(made) == [
        tuple(Member(0, replica, 0) for replica in range(3)),
        tuple(Member(1, replica, 0) for replica in range(2)),
    ]


@pytest.mark.parametrize("name", ["synchronised", "shared_input", "self_acceleration"])
def test_policies_combine_no_more_than_a_combined_block_may_hold(name: str) -> None:
    models = tuple(choice(LEFT, replicas=64) for _ in range(64))
    assert policy(name).plan(SearchJob(models=models)).members_max == 62


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(SettingError, match="'pos'; choose one of batching, instances, proportional"):
        policy("pos")


class RivalScenario(Scenario):
    """The simulator with one policy's plans over its random models."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(seed)
        self._policy = policy(name)
        self.made: Plan | None = None

    def _load_plan(self) -> list[Action]:
        key = PlanKey(self._next_key)
        self._next_key += 1
        job = SearchJob(models=_choices(self.random, self.library), scheduler="greedy")
        self.made = run_search(self._policy.plan(job), lambda: 0.0)
        bound = bind(self.made, self.library.graphs)
        self.engine.device.load(key, bound)
        self._waiting_plan = key
        return self.core.load(key, bound, self.engine.now)


def _choices(random: Random, library: Library) -> tuple[ModelChoice, ...]:
    by_name = {name: digest for digest, name in library.names.items()}
    return tuple(
        ModelChoice(
            name=name,
            artifact=digest,
            graph=library.graphs[digest],
            partition=random.choice([(), library.graphs[digest].base_cuts]),
            replicas=random.choice([1, 2, 3]),
            weight=random.randint(1, 4),
        )
        for name, digest in by_name.items()
    )


@pytest.mark.promise("plans-rival-policies-keep")
@pytest.mark.parametrize("name", sorted(policies()))
def test_the_engines_invariants_hold_under_every_policy(name: str) -> None:
    """Each task ends in one way, blocks run in order, no slot is overwritten early, nothing is left."""
    ended = 0
    for seed in range(5):
        scenario = RivalScenario(name, seed)
        ended += sum(scenario.run(tasks=40, swaps=1).outcomes.values())
    assert ended == 5 * 40
