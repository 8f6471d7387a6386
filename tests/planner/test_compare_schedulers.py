"""`stageloom scheduler compare`: every scheduler on models of the store, gaps, trials, measurements."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stageloom.planner.cli.comparison_plot import save
from stageloom.planner.plan_search import search_job
from stageloom.planner.replan.predict import predict
from stageloom.planner.scheduler_comparison import compared as compared_rows
from stageloom.planner.scheduler_comparison import optimum_of, outline, runs_of, searched
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.schema.scheduler import SchedulerCompareReply, SchedulerCompareRequest
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import request_stage_profile
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import Origin
from stageloom.shared.messages.telemetry import StageProfileResult, StageTiming, TrialEnded
from stageloom.shared.search.comparison import Measured, Standing
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.job import run_search
from stageloom.shared.search.registry import schedulers
from tests.planner.processes import ok
from tests.planner.world import World
from tests.store.helpers import NANO, chain

MEASURED = "measured, % over sequential"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.store.close()


def compared(world: World, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `--json` says, by scheduler."""
    said = json.loads(ok(world.home, "scheduler", "compare", "--model", "diamond", *arguments, "--json"))
    return {one["scheduler"]: one for one in said}


def side_by_side(world: World) -> None:
    """Operators take 100 us; greedy's two branches were measured at 120 us side by side."""
    world.profiled()
    world.kept("greedy")
    timings = tuple(StageTiming(at, us, 1.0, 5) for at, us in enumerate((100.0, 120.0, 100.0)))
    world.measured("greedy", timings, 333.0)


@pytest.mark.promise("scheduler-compared-gaps-measured")
def test_every_scheduler_is_compared_and_no_planner_need_run(world: World) -> None:
    found = compared(world)
    assert found.keys() == set(schedulers())
    assert all(one["over_bound"] >= 0.0 and one["measured_ms"] is None for one in found.values())
    assert found["ios"]["over_optimum"] == 0.0


@pytest.mark.promise("scheduler-compared-gaps-measured")
def test_a_devices_costs_decide_the_order_and_its_measurements_and_trials_stand_beside(world: World) -> None:
    side_by_side(world)
    plan = world.plan("greedy")
    world.tells(
        TrialEnded(
            epoch=1,
            generation=1,
            origin=Origin.PLANNER,
            how="trial",
            verdict="commit",
            candidate=plan.digest,
            control=None,
            ratio=1.2,
            ratio_low=1.1,
            ratio_high=1.3,
            pairs=9,
            began_us=1,
            decided_us=2,
            reason="",
        )
    )
    chosen = ("--scheduler", "greedy", "--scheduler", "sequential", "--scheduler", "nimble")
    found = compared(world, "--device", NANO, *chosen)
    assert next(iter(found)) == "greedy", "the cheapest comes first"
    assert found["greedy"]["plan"] == plan.digest
    assert found["greedy"]["predicted_ms"] == pytest.approx(0.32)
    assert found["greedy"]["measured_ms"] == pytest.approx(0.333)
    assert found["greedy"]["trial"]["verdict"] == "commit"
    assert found["sequential"]["over_optimum"] == pytest.approx(0.25)
    assert (found["sequential"]["measured_ms"], found["sequential"]["trial"]) == (None, None)
    assert found["nimble"]["streams_max"] == 2 and found["nimble"]["stages"] is None
    table = ok(world.home, "scheduler", "compare", "--model", "diamond", "--device", NANO, *chosen)
    assert "commit 1.200 (1.100 to 1.300)" in table.splitlines()[1]


def test_what_was_measured_as_another_device_class_stands_beside_no_prediction(world: World) -> None:
    """Its power mode changed as it was measured."""
    side_by_side(world)
    world.measured("greedy", (), 999.0, "another power mode")
    found = compared(world, "--device", NANO, "--scheduler", "greedy")
    assert found["greedy"]["measured_ms"] == pytest.approx(0.333)
    (block,) = world.explained("greedy", "--device", NANO)["blocks"]
    assert block["step_us"] == 333.0
    world.measured("greedy", (), 444.0, "cpu-2-core")
    found = compared(world, "--device", NANO, "--scheduler", "greedy")
    assert found["greedy"]["measured_ms"] == pytest.approx(0.444)


@pytest.mark.parametrize("replicas", [1, 4])
def test_milliseconds_are_of_one_task_however_many_replicas_take_turns(world: World, replicas: int) -> None:
    """1. Operators take 100 us. 2. The device measures 300 us a block of the plan, of each replica."""
    world.profiled()
    request = PlanCreateRequest(
        models=(ModelOptions(model="diamond", replicas=replicas),), scheduler="greedy", device=NANO
    )
    job = search_job(world.store, request)
    plan = run_search(job, lambda: 0.0)
    world.store.write(add_plan, "replicas", plan, "greedy")
    number, _ = world.store.write(request_stage_profile, NANO, "replicas")
    for index in range(replicas):
        world.tells(StageProfileResult(number, plan.digest, index, "", (), 300.0, index + 1 == replicas))
    found = searched(job, "greedy", optimum_of(job), b"")
    (row,) = compared_rows(world.store, outline(job), [found], NANO)
    busy_s = predict(plan, {world.digest: world.graph}, job.costs, ()).busy
    assert row.predicted_ms == pytest.approx(1e3 * busy_s)
    assert row.plan == plan.digest and row.bound_ms <= 0.4 + 1e-9
    assert row.optimum_ms == pytest.approx(0.4)
    assert row.measured_ms == pytest.approx(0.3)


def test_a_batch_and_replicas_count_by_the_member_that_runs_most_often() -> None:
    graphs = [chain(name, 4) for name in "ab"]
    choices = [
        ModelChoice(
            name=graph.name, artifact=digest_bytes([graph.name.encode()]), graph=graph, replicas=number
        )
        for graph, number in zip(graphs, (2, 1), strict=True)
    ]
    plan = compose(choices, combination=Combination.ALIGNED)
    assert [len(block.members) for block in plan.combined] == [2, 1]
    assert runs_of(plan) == (1.0, 0.5)
    batched = replace(plan, models=tuple(replace(one, batch=4) for one in plan.models))
    assert runs_of(batched) == (0.25, 0.125)


@pytest.mark.promise("scheduler-compared-gaps-measured")
def test_the_picture_names_every_scheduler_and_equal_values_give_equal_bytes(tmp_path: Path) -> None:
    drawn = [
        (standing_of("net", "ios", 1.0), Measured(median_s=2.0, quartiles_s=(1.5, 2.5))),
        (standing_of("net", "sequential", 1.5), Measured(median_s=3.0)),
        (standing_of("net+other", "ios", 3.0), None),
    ]
    pictures = []
    for name in ("a.svg", "b.svg"):
        save(drawn, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    texts = {one.text for one in ElementTree.fromstring(pictures[0]).iter() if one.tag.endswith("text")}
    assert {"ios", "sequential", "net", "+ other", MEASURED} <= texts
    save([(one, None) for one, _ in drawn], tmp_path / "estimates.svg")
    assert MEASURED not in (tmp_path / "estimates.svg").read_text()


@pytest.mark.promise("scheduler-compared-gaps-measured")
def test_the_clients_picture_is_of_what_the_planner_answered(world: World, tmp_path: Path) -> None:
    few = tmp_path / "few.toml"
    few.write_text("r = 1\ns = 2\n")
    chosen = ("--scheduler", "ios", "--scheduler", "greedy", "--from", str(few))
    found = compared(world, *chosen, "--plot", str(tmp_path / "picture.svg"))
    assert found["ios"]["groups_max"] <= 2
    texts = {
        text.text for text in ElementTree.parse(tmp_path / "picture.svg").iter() if text.tag.endswith("text")
    }
    assert {"ios", "greedy", "diamond"} <= texts


def standing_of(subject: str, scheduler: str, seconds: float) -> Standing:
    """A scheduler that takes some seconds where one is the least there is."""
    return Standing(
        subject=subject,
        scheduler=scheduler,
        schedules=(),
        predicted_s=seconds,
        bound_s=1.0,
        optimum_s=None,
        search_s=0.1,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "compare"), "Missing argument 'DEVICE'"),
        (("scheduler", "compare"), "no model is named; name it with --model, or in a --from file"),
        (
            ("scheduler", "compare", "nano", "--model", "diamond"),
            "(nano); see `stageloom scheduler compare --help`",
        ),
        (("scheduler", "compare", "--model", "diamond", "--measure", "1"), "--measure needs a device"),
        (
            ("scheduler", "compare", "--model", "diamond", "--scheduler", "best"),
            "there is no scheduler 'best'",
        ),
        (("scheduler", "compare", "--model", "diamond", "--plot", "a.doc"), "names no format"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    world: World, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from stageloom.planner.cli.app import execute

    assert execute([*arguments, "--data-dir", str(world.home)]) == 2
    assert said in capsys.readouterr().err


def test_the_device_that_measures_may_be_named_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stageloom.planner.cli import scheduler
    from stageloom.planner.cli.app import execute

    asked: list[SchedulerCompareRequest] = []

    def run_job(route: object, request: SchedulerCompareRequest) -> SchedulerCompareReply:
        asked.append(request)
        return SchedulerCompareReply(compared=())

    monkeypatch.setattr(scheduler, "run_job", run_job)
    file = tmp_path / "compared.toml"
    file.write_text('device = "nano"\n')
    command = ["scheduler", "compare", "--model", "diamond", "--data-dir", str(tmp_path)]
    assert execute([*command, "--from", str(file), "--measure", "5"]) == 0
    assert [(request.device, request.measure_s) for request in asked] == [("nano", 5.0)]
    file.write_text("measure_s = 5.0\n")
    assert execute([*command, "--from", str(file)]) == 2
    assert len(asked) == 1


def test_the_models_to_compare_on_may_be_named_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stageloom.planner.cli import scheduler
    from stageloom.planner.cli.app import execute

    asked: list[SchedulerCompareRequest] = []

    def run_job(route: object, request: SchedulerCompareRequest) -> SchedulerCompareReply:
        asked.append(request)
        return SchedulerCompareReply(compared=())

    monkeypatch.setattr(scheduler, "run_job", run_job)
    file = tmp_path / "compared.toml"
    file.write_text('models = [{model = "diamond"}]\n')
    assert execute(["scheduler", "compare", "--from", str(file)]) == 0
    assert [model.model for model in asked[0].models] == ["diamond"]
