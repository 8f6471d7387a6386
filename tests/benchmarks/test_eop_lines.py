"""What runs of split models are judged by: planted winners and losers, and a plan that is its own rival."""

import argparse
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.eop import __main__ as eop
from benchmarks.eop import measured
from benchmarks.eop.lines import (
    AGAIN,
    aa_spread,
    around,
    auto_lines,
    bound_s,
    boundary_line,
    line,
    model_lines,
    rival_lines,
    take_turns,
)
from benchmarks.runner import Report
from stageloom.shared.errors import ModelError
from stageloom.shared.partition import Axis
from stageloom.shared.search.eop import splitters
from stageloom.shared.search.patterns import Pattern
from stageloom.shared.search.split_problem import (
    AxisTimes,
    ConstantJoins,
    Halves,
    SplitChoice,
    SplitProblem,
    SplittableOperator,
    Whole,
)

ROWS = AxisTimes(Axis.ROWS, 16, (Pattern(0.0, 1.0), Pattern(0.0, 3.0)))
PROBLEM = SplitProblem(
    operators=[SplittableOperator((16.0, 48.0), (ROWS,))] * 2, joins=ConstantJoins(0.0), chains=[range(2)]
)


def windows(noise: float = 0.01, **seconds: float) -> dict[str, list[float]]:
    random = Random(7)
    known = {
        "eop": 25.0,
        AGAIN: 25.0,
        "fast": 32.0,
        "slow": 96.0,
        "eop_paper": 26.0,
        "equal": 48.0,
        "fixed": 27.0,
    }
    return {
        name: [one * random.uniform(1 - noise, 1 + noise) for _ in range(30)]
        for name, one in {**known, **seconds}.items()
    }


def met(rows: list[dict[str, object]]) -> list[object]:
    return [row["met"] for row in rows]


def test_every_plan_runs_once_a_round_and_the_best_is_its_own_rival() -> None:
    plans = {name: one.choose(PROBLEM) for name, one in splitters().items()}
    ran: list[SplitChoice] = []

    def run(choice: SplitChoice) -> float:
        ran.append(choice)
        return choice.seconds

    found = take_turns(run, plans, 4)
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys([*plans, AGAIN], 4)
    assert len(ran) == 5 * (len(plans) + 1)
    assert found["eop"] == found[AGAIN] == [plans["eop"].seconds] * 4


def test_the_bound_is_both_resources_at_once_for_key_operators() -> None:
    assert bound_s(PROBLEM) == 2 * 16.0 * 48.0 / 64.0


def test_a_faster_plan_meets_its_lines() -> None:
    found = model_lines("it", windows(), PROBLEM)
    assert met(found) == [True, True, True]
    assert found[2]["measured"] == pytest.approx(24.0 / 25.0, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"fast": 24.0}, [False, True, False]),
        ({"slow": 24.0}, [False, True, True]),
        ({"eop_paper": 24.0}, [True, False, True]),
        ({"eop": 29.0, AGAIN: 29.0, "eop_paper": 29.0}, [True, True, False]),
    ],
)
def test_a_planted_loser_is_found(seconds: dict[str, float], expected: list[bool]) -> None:
    assert met(model_lines("it", windows(**seconds), PROBLEM)) == expected


@pytest.mark.parametrize(
    ("wide", "auto", "expected"),
    [
        (20.0, "wide", [True, True]),
        (20.0, "eop", [False, False]),
        (24.98, "eop", [True]),
        (24.98, "wide", [True]),
        (30.0, "wide", [False]),
    ],
)
def test_where_two_threads_win_auto_must_have_chosen_them(
    wide: float, auto: str, expected: list[bool]
) -> None:
    assert met(auto_lines("it", windows(wide=wide), auto, "wide")) == expected


def test_models_before_an_interruption_are_told_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(subject: Any, *_: object) -> Any:
        if subject.label == "gru":
            raise KeyboardInterrupt
        row = {"part": "models", "model": subject.label}
        return SimpleNamespace(row=row, lines=[line("it", "is fast", "yes", 1.0, True)])

    patched = {"judged_model": judged, "_all": lambda: [("lstm", 1), ("gru", 1)]}
    patched |= {"load": lambda name, *_: SimpleNamespace(label=name), "find_spec": lambda _: None}
    patched |= {"made": lambda *_: None, "layers": lambda _: None}
    patched |= {"measured_joins": lambda *_: SimpleNamespace(handover_s=1e-3, bytes_per_s=1e9)}
    for name, function in patched.items():
        monkeypatch.setattr(measured, name, function)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    report = Report("eop")
    options = argparse.Namespace(only=["models"], quick=False, minutes=1.0, cache=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        eop.measure(report, options)
    assert [row["part"] for row in report.rows] == ["joins", "models", "lines"]
    assert report.figures == {"lines": 1, "lines_met": 1}


def test_what_a_plan_differs_from_itself_is_no_difference() -> None:
    noisy = windows(0.2, eop_paper=24.8)
    assert aa_spread(noisy) > aa_spread(windows(0.01)) > 0.0
    assert met(model_lines("it", noisy, PROBLEM))[1] is True


def test_a_rival_that_wins_on_one_model_in_two_is_not_beaten_with_95_percent() -> None:
    better = rival_lines({"a": windows(), "b": windows()})
    assert met(better) == [True, True]
    mixed = rival_lines({"a": windows(), "b": windows(fixed=20.0)})
    assert met(mixed) == [True, False]
    assert mixed[1]["at_least"] < 1.0


def test_a_boundary_is_compared_with_two_on_each_side() -> None:
    assert around(ROWS, 12) == (10, 11, 12, 13, 14)
    assert around(ROWS, 1) == (1, 2, 3) and around(ROWS, 15) == (13, 14, 15)
    measured = {end: [max(end, 3.0 * (16 - end))] * 5 for end in around(ROWS, 12)}
    assert boundary_line("it", Halves(Axis.ROWS, 12), measured)["met"]
    wrong = boundary_line("it", Halves(Axis.ROWS, 10), measured)
    assert not wrong["met"] and wrong["measured"] == pytest.approx(0.5)


def test_resources_alone_are_plans_like_others() -> None:
    alone = SplitChoice(states=(Whole(1), Whole(1)), splits=(), seconds=96.0)
    assert take_turns(lambda choice: choice.seconds, {"slow": alone}, 2) == {"slow": [96.0, 96.0]}


class WrongRig:
    """What it runs does not compute what the operator does."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def choice(self, choice: SplitChoice) -> Any:
        raise ArithmeticError("output: 0.5 away")

    def close(self) -> None:
        self.closed = True


def test_an_operator_whose_halves_are_wrong_is_a_line_that_is_not_met_and_one_left_out_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = SimpleNamespace(subject=SimpleNamespace(name="m", batch=16, label="m x16"), problem=PROBLEM)
    drawn = [(one, op, Halves(Axis.ROWS, 12)) for op in (0, 1)]
    rig = WrongRig()

    def alone(subject: object, op: int, folder: Path) -> None:
        if op == 1:
            raise ModelError("no such operator")

    monkeypatch.setattr(measured, "drawn_operators", lambda *_: drawn)
    monkeypatch.setattr(measured, "operator_alone", alone)
    monkeypatch.setattr(measured, "Rig", lambda *_: rig)
    wrong, left_out = measured.measure_boundaries([], None, tmp_path, 2, 1)  # type: ignore[arg-type]
    assert wrong["part"] == "lines" and wrong["met"] is False and "operator 0" in wrong["model"]
    assert left_out["part"] == "left out" and "operator 1" in left_out["why"]
    assert rig.closed
