"""`scheduler check`: each rule is seen to be broken by a scheduler that breaks it."""

import json
import re
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.scheduler_check import check_scheduler
from stageloom.shared.errors import ExitCode, ExtensionError
from stageloom.shared.search.cases import cases
from stageloom.shared.search.conformance import RULES, compared_outcomes, try_case
from stageloom.shared.search.registry import schedulers
from tests.shared.strangers import install

START = """
import itertools, os
from stageloom.shared.schedule import Launch, Stage, StageSchedule, StreamSchedule, stage_schedule
from stageloom.shared.search.baselines import greedy, sequential

def plain(graph, costs, limits, budget):
    return sequential(graph, costs, limits, budget)

"""
BREAKS = {
    "answers": "def mine(*_): raise MemoryError('too large')",
    "complete": "def mine(graph, *rest): return StageSchedule(plain(graph, *rest).stages[:-1])",
    "legal": "def mine(graph, *rest): return StageSchedule(plain(graph, *rest).stages[::-1])",
    "limits": "def mine(graph, costs, limits, budget): return greedy(graph, costs, type(limits)(), budget)",
    "canonical": (
        "def mine(*call):\n"
        "    return StageSchedule(tuple(Stage(one.groups[::-1]) for one in greedy(*call).stages))"
    ),
    "repeatable": (
        "calls = itertools.count()\n"
        "def mine(*call): return greedy(*call) if next(calls) % 2 else sequential(*call)"
    ),
}


def check(folder: Path, source: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, int]:
    """Cases that broke each rule; the exit code says whether any did."""
    install(folder, "checked-one", "stageloom.schedulers", {"mine": "checked_one:mine"}, START + source)
    code = execute(["scheduler", "check", "mine", "--graphs", "8", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert code == (ExitCode.FAILED if any(rule["broken"] for rule in found["rules"]) else ExitCode.OK)
    return {rule["rule"]: rule["broken"] for rule in found["rules"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.promise("scheduler-check-finds-every-broken-rule")
@pytest.mark.parametrize("rule", BREAKS)
def test_a_scheduler_that_breaks_a_rule_is_found_and_the_rule_named(rule: str) -> None:
    scope: dict[str, object] = {}
    exec(START + BREAKS[rule], scope)
    outcomes = [try_case(scope["mine"], case) for case in cases(8, 0)]  # type: ignore[arg-type]
    assert {fault.rule for outcome in outcomes for fault in outcome.faults} == {rule}


def test_it_tells_how_far_it_is_and_takes_no_options_of_a_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["scheduler", "check", "sequential", "--graphs", "0"]) == ExitCode.OK
    assert re.match(r"\d+\.\d s, 1 of \d+ cases tried\n", capsys.readouterr().err)
    assert execute(["scheduler", "check", "--help"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "--json" in told and "--token-file" not in told


@pytest.mark.promise("scheduler-check-finds-every-broken-rule")
def test_what_differs_from_process_to_process_is_not_repeatable(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        f"try: first = os.mkdir({str(folder / 'first')!r}) is None\n"
        "except FileExistsError: first = False\n"
        "def mine(*call): return greedy(*call) if first else sequential(*call)"
    )
    broken = check(folder, source, capsys)
    assert broken.pop("repeatable") > 0 and not any(broken.values())


@pytest.mark.promise("scheduler-check-finds-every-broken-rule")
def test_a_scheduler_without_end_is_ended_and_one_that_ends_its_process_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = "def mine(*call):\n    while True: pass"
    assert check(folder, endless, capsys, "--limit", "50ms")["in time"] == 1
    (folder / "checked_one.py").write_text("import os\ndef mine(*call): os._exit(9)")
    assert execute(["scheduler", "check", "mine", "--json"]) == ExitCode.FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["tried"] == 1 and "ended with code 9" in found["rules"][0]["example"]


@pytest.mark.promise("scheduler-check-finds-every-broken-rule")
def test_each_call_is_timed_in_either_process() -> None:
    case = next(iter(cases(1, 0)))
    clock = iter((0.0, 1.0, 1.0, 4.0))
    slow = try_case(schedulers()["greedy"], case, 2.0, lambda: next(clock))
    assert [fault.rule for fault in slow.faults] == ["in time"] and "3 s, more than 2 s" in slow.faults[
        0
    ].detail
    quick = try_case(schedulers()["greedy"], case, 2.0, lambda: 0.0)
    assert quick.faults == ()
    assert compared_outcomes(case, quick, slow).faults == slow.faults
    assert compared_outcomes(case, slow, quick).faults == slow.faults


def test_an_import_without_end_is_ended(folder: Path) -> None:
    points = {"mine": "stuck_one:mine"}
    install(folder, "stuck-one", "stageloom.schedulers", points, "while True: pass")
    with pytest.raises(ExtensionError, match="the import of mine does not end within"):
        check_scheduler("mine", [], 1.0, lambda done: None, load_s=0.2)


def test_cases_are_the_same_for_the_same_seed_and_every_scheduler_of_ours_passes_a_few() -> None:
    assert [case.graph for case in cases(5, 3)] == [case.graph for case in cases(5, 3)]
    assert [case.graph for case in cases(5, 3)] != [case.graph for case in cases(5, 4)]
    for name, scheduler in schedulers().items():
        for case in list(cases(6, 1))[-6:]:
            assert try_case(scheduler, case).faults == (), name
    assert "in time" in RULES
