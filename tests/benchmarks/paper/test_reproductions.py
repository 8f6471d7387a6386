"""Every table and figure on tiny inputs, and what a few of them find where the answer is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.algorithms import graph_of
from benchmarks.eop.networks import FLOAT_BYTES
from benchmarks.paper import ios_schedules, ios_spaces, top_shapes
from benchmarks.paper.backlog_series import backlog_series
from benchmarks.paper.catalogue import CATALOGUE
from benchmarks.paper.code_digest import ROOT
from benchmarks.paper.contestants import (
    OVERLOAD,
    SMALL,
    choices,
    combined,
    in_one_step,
    judged,
    overload,
    problem_of,
    slenderness,
)
from benchmarks.paper.finding import Finding, Inputs, Reproduction, finding_of
from benchmarks.paper.kept_results import ios_figure_6_gpu
from benchmarks.paper.pages import PAPERS
from benchmarks.paper.pays_series import agent_series
from benchmarks.paper.schedules import CostedNetwork
from benchmarks.paper.t5 import t5
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph, graph_problem
from stageloom.shared.plan import Member
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.compose import compose
from tests.search.graphs import CHAIN, DIAMOND, model

RESULTS = ROOT / "docs" / "results"
FAN = [[], [0], [0], [0], [1, 2, 3], [4], [5], [5], [6, 7]]
_SLOW = {"eop-table-4", "eop-figure-8", "eop-figure-9", "eop-figure-10", "eop-figure-11"}
"""They have no smaller inputs."""


def fan(name: str) -> Graph:
    return model(name, FAN, cuts=[5])[1]


TINY = Inputs(fan, RESULTS, small=True)


def _marked(one: Reproduction) -> Any:
    return pytest.param(
        one, id=one.id, marks=[pytest.mark.full, pytest.mark.timeout(600)] if one.id in _SLOW else []
    )


@pytest.mark.more
@pytest.mark.parametrize("one", [_marked(one) for one in CATALOGUE])
def test_a_reproduction_finds_claims_with_reasons_and_what_to_draw(one: Reproduction) -> None:
    found = one.reproduce(TINY)
    assert found.claims
    assert all(claim.claim and claim.ours for claim in found.claims)
    assert all(claim.ours.startswith("not run: ") for claim in found.claims if claim.holds is None)
    assert all(line.points for panel in found.panels for line in panel.lines)
    assert finding_of(json.loads(json.dumps(found.plain))) == found
    assert (found.verdict == "not run") == all(claim.holds is None for claim in found.claims)


def test_ids_are_of_their_papers_and_no_two_are_the_same() -> None:
    ids = [one.id for one in CATALOGUE]
    assert len(set(ids)) == len(ids)
    assert all(one.paper in PAPERS and one.id.startswith(f"{one.paper}-") for one in CATALOGUE)


# Contestants


def test_the_overload_is_more_than_the_device_serves_in_turn() -> None:
    models = choices({"left": fan("left"), "right": model("right", CHAIN, cuts=[1])[1]})
    device = load_device("nano")
    problem = problem_of(device, models, overload(device, models), members_max=1, compiled=False)
    needed = sum(rate * one_s for rate, one_s in zip(problem.arrivals_per_s, problem.service_s, strict=True))
    assert needed == pytest.approx(OVERLOAD)


def test_the_best_combination_is_no_worse_than_every_block_alone() -> None:
    models = choices({"left": fan("left"), "right": model("right", DIAMOND, cuts=[1])[1]})
    device = load_device("a100")
    problem = problem_of(device, models, overload(device, models), members_max=2, compiled=False)
    best = combined(problem, SMALL)
    assert best.score.throughput_per_s >= judged(problem, problem.template, SMALL).throughput_per_s
    stages = [
        stage
        for block in best.plan.combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    ]
    assert slenderness(best.plan).stages == len(stages)
    assert slenderness(best.plan).groups_max == max(len(stage.groups) for stage in stages)


# Schedules and spaces


def test_the_schedule_of_a_device_is_the_cheapest_there() -> None:
    v100, k80 = (CostedNetwork(fan("net"), device) for device in (ios_schedules.V100, ios_schedules.K80))
    own, other = v100.searched("ios"), k80.searched("ios")
    assert own.predicted_s == pytest.approx(v100.seconds(own.schedules))
    assert v100.seconds(own.schedules) <= v100.seconds(other.schedules)
    assert k80.seconds(other.schedules) <= k80.seconds(own.schedules)


def test_the_space_of_two_chains_is_known() -> None:
    # IOS, figure 5: a before b, and c by itself. Six states, of which one has no operator left.
    row = ios_spaces.space_of(graph_of(((), (0,), ())))
    assert (row["n"], row["d"], row["bound over whole chains"]) == (3, 2, 18)
    assert row["pairs"] == 12
    assert row["schedules"] == 8


def test_schedules_in_one_step_are_the_same_stages_over_the_whole_model() -> None:
    models = choices({"net": fan("net")}, replicas=2)
    device = load_device("a100")
    problem = problem_of(device, models, overload(device, models), members_max=1, compiled=False)
    cut = compose(models, scheduler="ios", costs=problem.costs)
    whole = in_one_step(cut, problem.graphs)
    assert [block.members for block in whole.combined] == [(Member(0, replica, 0),) for replica in range(2)]
    assert slenderness(whole) == slenderness(cut)
    bound = bind(whole, problem.graphs)  # refuses what is not legal
    assert bound.combined[0].graph.size == len(FAN)
    assert judged(problem, whole, SMALL).throughput_per_s >= judged(problem, cut, SMALL).throughput_per_s


def test_throughput_saturates_before_the_first_batch_that_brings_little() -> None:
    rows = [{"batch": batch, "images/s": served} for batch, served in ((1, 10), (4, 30), (16, 31), (64, 60))]
    assert top_shapes.saturates_at(rows, "images/s") == 4
    assert top_shapes.saturates_at(rows[:2], "images/s") == 4


def test_t5_has_the_weights_of_t5_small_without_its_embeddings() -> None:
    graph = t5()
    assert graph_problem(graph) == ""
    weights = sum(one.weight_bytes for one in graph.operators) / FLOAT_BYTES
    assert weights / 1e6 == pytest.approx(44.06, rel=0.001)  # 60.5 million less 16.4 million of embeddings


# Kept results


def _with_greedy_at(us: float, folder: Path) -> Finding:
    """IOS's figure 6 by kept device times, its greedy schedule at so many microseconds."""
    ways = {"ours_sequential": 100.0, "ours_ios_greedy": us, "ours_ios_parallel_c=0.2": 99.0}
    figures = {
        f"device_us.fp16.{name}.{way}": taken
        for name in ("inception_v3", "resnet50", "squeezenet")
        for way, taken in ways.items()
    }
    (folder / "2026-11-27-gpu.json").write_text(json.dumps({"figures": figures}))
    return ios_figure_6_gpu(Inputs(fan, folder))


def test_a_kept_result_that_contradicts_the_paper_is_reported_so(tmp_path: Path) -> None:
    found = _with_greedy_at(120.0, tmp_path)
    assert [claim.holds for claim in found.claims] == [False, True, False]
    assert found.verdict == "in part (1 of 3)"


def test_the_greedy_schedule_is_none_of_ioss(tmp_path: Path) -> None:
    found = _with_greedy_at(90.0, tmp_path)
    assert {row["us"] for row in found.rows if row["schedule"] == "ios"} == {99.0}


def _series(replanning: bool, variances: list[float]) -> dict[str, Any]:
    about = {"part": "series", "mix": "ocr", "scenario": "turning_mix", "replanning": replanning, "seed": 1}
    return {**about, "at_s": [0.0, 2.0], "variance_s2": variances, "oldest_age_s": [0.0, 0.0]}


def _result(rows: list[dict[str, Any]]) -> str:
    return json.dumps({"machine": {"processor": "Tiny"}, "rows": rows})


def test_an_agents_series_are_drawn_phase_after_phase_and_compared(tmp_path: Path) -> None:
    rows = [_series(False, [1.0, 3.0]), _series(True, [1.0, 3.0]), _series(True, [0.5, 0.5])]
    (tmp_path / "2026-12-01-pays.json").write_text(_result(rows))
    found = agent_series(tmp_path)
    assert found.claim.holds is True
    assert found.claim.ours == "mean variance, agent on Tiny, ocr, turning mix (2026-12-01-pays): 0.62 times"
    fixed, again = found.panels[0].lines
    assert again.points == ((0.0, 1.0), (2.0, 3.0), (2.0, 0.5), (4.0, 0.5))
    assert fixed.label == "fixed plan"


def test_an_agent_whose_queues_diverge_with_replanning_refutes_the_claim(tmp_path: Path) -> None:
    rows = [_series(False, [1.0, 3.0]), _series(True, [4.0, 6.0])]
    (tmp_path / "2026-12-01-pays-ocr.json").write_text(_result(rows))
    (tmp_path / "2026-12-02-pays-zoo.json").write_text(_result([{"part": "phase"}]))
    assert agent_series(tmp_path).claim.holds is False


def test_two_runs_of_one_mix_stand_beside_each_other(tmp_path: Path) -> None:
    for name, ends in (("pays-ocr", 3.0), ("pays-ocr-again", 1.5)):
        rows = [_series(False, [2.0, 2.0]), _series(True, [ends, ends])]
        (tmp_path / f"2026-12-01-{name}.json").write_text(_result(rows))
    found = agent_series(tmp_path)
    assert "1.50 times" in found.claim.ours and "0.75 times" in found.claim.ours
    assert len({panel.title for panel in found.panels}) == 2


def test_without_series_of_an_agent_the_claim_says_that_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "2026-12-01-pays.json").write_text(_result([{"part": "phase"}]))
    found = agent_series(tmp_path)
    assert found.claim.holds is None
    assert found.panels == ()


def _backlog(plan: str, share: float, end: float) -> dict[str, Any]:
    about = {"part": "backlog", "plan": plan, "share": share, "variance_end": end}
    return {**about, "at_s": [0.0, 1.0], "variance_tasks2": [0.0, end]}


def test_every_contestant_is_drawn_on_the_agent_and_the_newest_result_counts(tmp_path: Path) -> None:
    """`auto` is no rival: what it keeps lower refutes nothing."""
    ends = {"sequential": 9.0, "top": 4.0, "auto": 1.0}
    rows = [_backlog(plan, 0.7, end) for plan, end in ends.items()]
    (tmp_path / "2026-12-01-backlog.json").write_text(json.dumps({"rows": [_backlog("top", 0.7, 1.0)]}))
    (tmp_path / "2026-12-02-backlog.json").write_text(_result(rows))
    found, seen = backlog_series(tmp_path, "variance")
    assert [line.label for line in found.panels[0].lines] == list(ends)
    assert found.panels[0].lines[0].points == ((0.0, 1.0), (1.0, 10.0))
    assert found.claim.ours == "at 0.7: sequential 9, top 4, auto 1" and found.claim.holds is True
    assert {row["plan"]: row["variance"] for row in seen} == ends
    rows = [*rows, _backlog("top", 1.5, 7.0), _backlog("ios", 1.5, 6.0)]
    (tmp_path / "2026-12-03-backlog.json").write_text(_result(rows))
    assert backlog_series(tmp_path, "variance")[0].claim.holds is False


def test_without_a_backlog_of_an_agent_the_claim_says_that_there_is_none(tmp_path: Path) -> None:
    found, seen = backlog_series(tmp_path, "variance")
    assert found.claim.holds is None and found.panels == () and seen == ()
