"""`stageloom plan explain`: schedules in words, sources of costs, what else was looked at, who decided."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from stageloom.planner.api import routes
from stageloom.planner.costs.measured import STALE_S
from stageloom.planner.explain.block import explain_block
from stageloom.planner.explain.plan import explain
from stageloom.planner.replan.predict import evaluation_of
from stageloom.planner.schema.explanation import CostSource, EvaluationVerdict, PlanExplainRequest
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.predictions import keep_considered
from stageloom.planner.store.replan_pushes import push_replan
from stageloom.planner.store.retention import Retention, tidy
from stageloom.planner.store.tables import OperatorCostRow, PlanRow
from stageloom.shared.bound import bind
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.messages.control import Alarm, ModelLoad, Origin
from stageloom.shared.messages.outputs import OutputsVerdict
from stageloom.shared.messages.telemetry import StageTiming, TrialEnded
from stageloom.shared.schedule import Stage, StageSchedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable, MeasuredStage
from stageloom.shared.search.interference import GroupTerms, Sample, fit, stage_terms
from tests.metrics.collector import collector
from tests.planner.api.context import answer_of, planner_context
from tests.planner.processes import ok, stageloom
from tests.planner.world import World, ended
from tests.shared.test_merge import same, siblings
from tests.store.helpers import NANO

DAY_S = 86_400.0
_PAIR = stage_terms([GroupTerms(1e-4, 0.0, 0.0, 0.0, 0.0, 1)] * 2, 2e-5)
TAUGHT = fit([Sample(_PAIR, took_s) for took_s in (1.1e-4, 1.2e-4, 1.3e-4)], launch_s=2e-5)
ALONE = OperatorCostRow(runs=5, spread_us=1.0, measured_on=NANO, measured_at_us=1)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.store.close()


def test_without_a_device_costs_are_estimates_and_nobody_decided(world: World) -> None:
    world.store.write(add_plan, "greedy", world.plan("greedy"), "greedy")
    said = world.explained("greedy")
    (block,) = said["blocks"]
    assert {line["source"] for line in block["lines"]} == {"analytic"}
    assert all(line["measured_at_us"] is None for line in block["lines"])
    assert said["decided"] is None and said["device"] == ""
    assert "no device was asked to run it" in ok(world.home, "plan", "explain", "greedy")


def test_a_plan_is_explained_by_the_costs_of_the_device_that_it_was_made_for(world: World) -> None:
    world.kept("greedy")
    world.profiled()
    said = world.explained("greedy")
    assert said["device"] == NANO and said["operators_measured"] == 4 and said["decided"] is None
    assert "nano was never asked to run it" in ok(world.home, "plan", "explain", "greedy")


def test_streams_are_told_one_by_one_and_predicted_together(world: World) -> None:
    """Two branches of 100 us hinder each other fully, so streams take what operators take, and one wait."""
    world.kept("nimble")
    world.profiled()
    (block,) = world.explained("nimble")["blocks"]
    assert block["streams"] == len(block["lines"]) == 2 and block["over_optimum"] is None
    assert sum(line["predicted_us"] for line in block["lines"]) == pytest.approx(400.0)
    assert block["predicted_us"] >= 400.0 and {line["source"] for line in block["lines"]} == {"operators"}


@pytest.mark.promise("plan-explain-says-how")
def test_a_stage_says_how_its_cost_is_known_and_how_often_it_was_measured(world: World) -> None:
    """Greedy's middle stage runs two operators side by side: measured as a whole it is quicker."""
    world.kept("greedy")
    world.profiled()
    before = world.explained("greedy", "--device", NANO)
    assert [line["source"] for line in before["blocks"][0]["lines"]] == ["operators"] * 3
    assert before["operators_measured"] == before["operators"] == 4
    assert before["predicted_ms"] == pytest.approx(0.4, rel=0.1)
    timings = tuple(StageTiming(at, us, 1.0, 5) for at, us in enumerate((100.0, 120.0, 100.0)))
    world.measured("greedy", timings, 333.0)
    (block,) = world.explained("greedy", "--device", NANO)["blocks"]
    middle = block["lines"][1]
    assert (middle["source"], middle["runs"], middle["measured_on"]) == ("measured", 5, NANO)
    assert middle["predicted_us"] == pytest.approx(120.0)
    assert block["predicted_us"] == pytest.approx(320.0) and block["step_us"] == 333.0
    assert "measured 333.0 us as a whole" in ok(world.home, "plan", "explain", "greedy", "--device", NANO)


def test_a_stage_whose_measurement_is_too_old_is_to_be_measured_again(world: World) -> None:
    world.kept("greedy")
    world.profiled()
    timings = tuple(StageTiming(at, us, 1.0, 5) for at, us in enumerate((100.0, 120.0, 100.0)))
    world.measured("greedy", timings, 333.0)
    api = planner_context(world.store, world.clock)
    for passed_s, sure in ((0.0, True), (STALE_S + 1.0, False)):
        world.clock.advance(passed_s)
        said = answer_of(api, routes.PLAN_EXPLAIN, PlanExplainRequest(plan="greedy", device=NANO))
        middle = said.blocks[0].lines[1]
        assert (middle.source, middle.sure) == (CostSource.MEASURED, sure)


def test_what_a_whole_step_took_is_shown_for_as_long_as_hours_of_telemetry_are_kept(world: World) -> None:
    world.kept("greedy")
    world.profiled()
    world.measured("greedy", tuple(StageTiming(at, 100.0, 1.0, 5) for at in range(3)), 333.0)
    world.clock.advance(30 * DAY_S)
    assert sum(tidy(world.store, Retention(2 * DAY_S, 14 * DAY_S, 400 * DAY_S))), "operators' times"
    (block,) = world.explained("greedy", "--device", NANO)["blocks"]
    assert block["step_us"] == 333.0


def test_a_prediction_says_its_doubt_and_a_measurement_has_none(world: World) -> None:
    """1. Nobody is sure after three stages, but they say by how much. 2. Of the stage measured, nothing."""
    artifact = world.digest
    bound = bind(world.plan("greedy"), {artifact: world.graph})
    table = CostTable(
        measured_s={(artifact, OpId(op)): 1e-4 for op in range(4)},
        interference=TAUGHT,
    )
    predicted = explain_block(bound, 0, table, operators=[ALONE] * 4).lines[1]
    assert predicted.source is CostSource.FITTED and not predicted.sure
    assert predicted.doubt is not None and 0.05 < predicted.doubt < 1.0
    seen = replace(table, stages=(MeasuredStage(((artifact, 0, 4),), 1, ((1,), (2,)), 1.2e-4),))
    measured = explain_block(bound, 0, seen, operators=[ALONE] * 4).lines[1]
    assert measured.source is CostSource.MEASURED and measured.doubt is None


def test_a_merge_that_was_not_measured_is_told_as_an_estimate_whatever_its_operators_are() -> None:
    """What stages taught says nothing of several operators in one launch."""
    graph, artifact = siblings(same((3, 3)), same((1, 1))), Digest("ab" * 32)
    plan = compose([ModelChoice(name="pair", artifact=artifact, graph=graph, partition=())])
    merged = Stage(((0,), (1,)), merge=True)
    block = replace(plan.combined[0], schedule=StageSchedule((merged,)))
    bound = bind(replace(plan, combined=(block,)), {artifact: graph})
    table = CostTable(
        measured_s={(artifact, OpId(op)): 1e-4 for op in range(2)},
        interference=TAUGHT,
    )
    (line,) = explain_block(bound, 0, table, operators=[ALONE] * 2).lines
    assert (line.source, line.sure, line.runs) == (CostSource.ANALYTIC, False, None)
    seen = MeasuredStage(((artifact, 0, 2),), 1, merged.groups, 1.2e-4, merge=True)
    (line,) = explain_block(bound, 0, replace(table, stages=(seen,)), operators=[ALONE] * 2).lines
    assert (line.source, line.sure) == (CostSource.MEASURED, True)


@pytest.mark.promise("plan-explain-says-how")
def test_gaps_are_to_the_bound_and_to_the_cheapest_stages(world: World) -> None:
    """Measured side by side in 120 us, the middle stage makes greedy the optimum; sequential is above."""
    world.kept("greedy")
    world.kept("sequential")
    world.profiled()
    timings = tuple(StageTiming(at, us, 1.0, 5) for at, us in enumerate((100.0, 120.0, 100.0)))
    world.measured("greedy", timings, 333.0)
    (block,) = world.explained("sequential", "--device", NANO)["blocks"]
    assert block["predicted_us"] == pytest.approx(400.0)
    assert block["over_optimum"] == pytest.approx(400.0 / 320.0 - 1.0)
    assert block["over_bound"] >= block["over_optimum"]
    beside = {one["scheduler"]: one for one in block["beside"]}
    assert beside["sequential"]["same"] and not beside["greedy"]["same"]
    assert beside["greedy"]["over_this"] == pytest.approx(320.0 / 400.0 - 1.0)
    assert beside["greedy"]["found_at_us"] is not None
    (best,) = world.explained("greedy", "--device", NANO)["blocks"]
    assert best["over_optimum"] == 0.0


@pytest.mark.promise("plan-explain-says-how")
def test_plans_over_the_same_models_are_listed_once_with_prediction_measurement_and_trial(
    world: World,
) -> None:
    """1. Two plans are searched, one of them twice. 2. The device measures one. 3. A trial rejects it."""
    first, wide = world.kept("sequential"), world.kept("greedy")
    world.kept("greedy")
    world.profiled()
    world.store.write(push, Push(device=NANO, plan="sequential", decided_by="operator"))
    desired = world.store.write(push, Push(device=NANO, plan="greedy", decided_by="operator"))
    timings = tuple(StageTiming(at, 100.0, 1.0, 5) for at in range(3))
    world.measured("greedy", timings, 350.0)
    world.tells(
        TrialEnded(
            epoch=desired.epoch,
            generation=desired.generation,
            origin=Origin.PLANNER,
            how="trial",
            verdict="reject",
            candidate=wide.digest,
            control=first.digest,
            ratio=0.9,
            ratio_low=0.85,
            ratio_high=0.95,
            pairs=9,
            began_us=1,
            decided_us=2,
            reason="slower",
        ),
    )
    said = world.explained(NANO)  # a device: what it should run
    assert said["plan"] == "greedy" and said["decided"]["trial"]["verdict"] == "reject"
    others = {one["name"]: one for one in said["others"]}
    assert others["greedy"]["this"] and others["greedy"]["times"] == 2
    assert others["greedy"]["steps_ms"] == pytest.approx(0.35)
    assert others["sequential"]["now_ms"] == pytest.approx(0.4, rel=0.1)
    assert others["sequential"]["trial"] is None and others["sequential"]["steps_ms"] is None
    text = ok(world.home, "plan", "explain", NANO)
    assert "why: an operator decided that nano should run it" in text
    assert "reject, 0.900 (0.850 to 0.950) as good over 9 pairs (slower)" in text


@pytest.mark.promise("plan-explain-says-how")
def test_a_replan_says_what_it_looked_at_and_left(world: World) -> None:
    """A plan that was not kept is listed all the same, with what was predicted of it then."""
    world.store.write(
        push,
        Push(
            device=NANO,
            plan=world.store.write(add_plan, "first", world.plan("sequential"), "sequential").plan,
            decided_by="operator",
        ),
    )
    loads = (ModelLoad("diamond", 10.0, 400.0, 3, 1),)
    replan = LinkStore(world.store).record_alarm(
        NANO,
        Alarm(
            boot=7,
            number=1,
            at_us=1,
            cause="variance",
            value=0.5,
            threshold=0.1,
            plan=None,
            loads=loads,
            samples=(),
        ),
    )
    assert replan is not None
    taken, left = world.plan("greedy"), replace(world.plan("greedy"), lanes=2)

    desired = world.store.write(
        push_replan,
        NANO,
        replan,
        taken,
        scheduler="ios",
        above=(1, 1),
        how="search",
        predicted=0.8,
        remark="it was trained for others",
    )
    assert desired is not None
    rows = [
        evaluation_of(taken, EvaluationVerdict.TAKEN, scheduler="ios", how="search", predicted=0.8),
        evaluation_of(left, EvaluationVerdict.WORSE, scheduler="ios", how="search", predicted=1.1),
    ]
    world.store.write(keep_considered, rows, device_class="cpu-2-core", device=NANO, replan=replan)
    said = world.explained(NANO)
    assert said["decided"]["replan"]["predicted"] == 0.8 and said["decided"]["left"] == 1
    others = {Digest(one["digest"]): one for one in said["others"]}
    assert others[left.digest]["name"] == "" and others[left.digest]["now_ms"] is None
    assert others[left.digest]["last"]["verdict"] == "worse"
    text = ok(world.home, "plan", "explain", NANO)
    assert f"re-plan {replan} (variance 0.5, threshold 0.1) pushed it to nano" in text
    assert "noted then: it was trained for others" in text
    assert "it was trained for others" in ok(world.home, "replan", "list", NANO)
    assert "it looked at 1 other plan, too" in text and "1.100 of the incumbent" in text


def test_what_a_device_tried_by_itself_is_told_of_that_plan_and_of_the_generation_that_adopts_it(
    world: World,
) -> None:
    """1. A plan is pushed, the first. 2. Under its generation the device tries two of its own, one unknown to
    the planner; the other wins and is adopted. 3. The first is pushed again, and the other loses to it."""
    first, own = world.kept("sequential"), world.kept("greedy")
    local: dict[str, Any] = {"origin": Origin.LOCAL}
    pushed = world.store.write(push, Push(device=NANO, plan="sequential", decided_by="operator"))
    world.tells(
        ended(pushed, first, "commit", how="first"),
        ended(pushed, own, "commit", decided_us=3, **local),
        ended(pushed, replace(own, lanes=2), "reject", decided_us=4, **local),
    )
    world.store.write(push, Push(device=NANO, plan="greedy", decided_by="local"))
    again = world.store.write(push, Push(device=NANO, plan="sequential", decided_by="operator"))
    world.tells(ended(again, own, "reject", **local))

    found = [world.explained(plan, "--device", NANO)["decided"] for plan in ("sequential", "greedy")]
    told = [(one["generation"]["generation"], one["trial"]["how"], one["trial"]["verdict"]) for one in found]
    assert told == [(3, "first", "commit"), (2, "trial", "commit")]
    for generation, plan in (("1", first), ("2", own)):
        compared = json.loads(ok(world.home, "plan", "compare", NANO, "--generation", generation, "--json"))
        assert (compared["trial"]["candidate"], compared["trial"]["verdict"]) == (plan.digest, "commit")
    with collector() as (url, spans):
        ok(world.home, "plan", "trace", NANO, "--otlp", url)
    about = [{one.key: one.value.string_value for one in span.attributes} for span in spans]
    generations = {
        span.trace_id: of["stageloom.generation"]
        for span, of in zip(spans, about, strict=True)
        if span.name == "plan"
    }
    tried = {
        generations[span.trace_id]: of["stageloom.verdict"]
        for span, of in zip(spans, about, strict=True)
        if span.name == "trial"
    }
    assert tried == {f"{pushed.epoch}.1": "commit", f"{pushed.epoch}.2": "commit"}


@pytest.mark.parametrize(
    ("how", "outputs", "why"),
    [
        ("guard", None, "no trial: it ran guarded; commit (it was idle)"),
        ("outputs", OutputsVerdict(1e-3, 8, True), "outputs compared on 8 inputs; commit (it was idle)"),
    ],
)
def test_what_decided_without_a_trial_is_told_as_it_was(
    world: World, how: str, outputs: OutputsVerdict | None, why: str
) -> None:
    """A guarded plan differs in launch intervals or came to an idle device: the reason says which."""
    plan = world.kept("greedy")
    pushed = world.store.write(push, Push(device=NANO, plan="greedy", decided_by="operator"))
    world.tells(ended(pushed, plan, "commit", how=how, outputs=outputs, reason="it was idle"))
    assert f"why: {why}\n" in ok(world.home, "plan", "explain", NANO)


def test_of_many_other_plans_the_cheapest_and_the_one_in_question_are_listed_and_all_on_request(
    world: World,
) -> None:
    """The plan itself is among them, however dear; a contest leaves two dozen others."""
    world.kept("greedy", EvaluationVerdict.WORSE)
    plan = world.plan("greedy")
    many = [
        evaluation_of(replace(plan, lanes=n), EvaluationVerdict.WORSE, scheduler="ios", how="contest")
        for n in range(2, 22)
    ]
    world.store.write(keep_considered, many, device_class="cpu-2-core", device=NANO)
    text = ok(world.home, "plan", "explain", "greedy")
    rows = text[text.index("plan\thow\t") :].splitlines()[1:]
    assert 8 <= len(rows) <= 9 and sum("(this)" in row for row in rows) == 1
    done = stageloom(world.home, "plan", "explain", "greedy")
    assert f"and {21 - len(rows)} other plans; --all lists every one" in done.stderr
    assert len(world.explained("greedy")["others"]) == 21
    everything = stageloom(world.home, "plan", "explain", "greedy", "--all")
    assert len(everything.stdout.splitlines()) == len(text.splitlines()) - len(rows) + 21
    assert "--all" not in everything.stderr


def test_a_plan_that_this_version_cannot_read_hides_no_explanation_of_another(world: World) -> None:
    world.kept("greedy")
    unread = world.kept("sequential")
    world.store.write(
        lambda session: session.execute(update(PlanRow).filter_by(name="sequential").values(wire=b""))
    )
    others = {one.digest: one for one in explain(world.store, "greedy", None).others}
    assert others[unread.digest].now_ms is None and others[unread.digest].name == "sequential"


def test_a_name_that_is_neither_plan_nor_device_is_refused_in_one_line(world: World) -> None:
    done = stageloom(world.home, "plan", "explain", "nothing")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
