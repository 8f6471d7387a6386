"""What the StarONNX benchmark works out of its runs, by hand."""

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import Report
from benchmarks.staronnx import __main__ as staronnx
from benchmarks.staronnx import batches, hand_loop, lines
from benchmarks.staronnx.lines import Line, Pair, Rate
from benchmarks.staronnx.rig import FAST, SHARES, SLOW, TRIES, RanStep, Run, highest_share


def ran(*steps: tuple[int, int, int, float, float], arrivals_s: list[float], ends_s: list[float]) -> Run:
    latencies_s = [end_s - at_s for end_s, at_s in zip(ends_s, arrivals_s, strict=True)]
    return Run(arrivals_s, latencies_s, [RanStep(*step) for step in steps])


def test_batches_wait_between_their_steps_and_before_the_first() -> None:
    """Batch 1 comes while 0 runs; at 2.0 both wait: 0 for its tail, 1 for its head."""
    run = ran(
        (0, 0, FAST, 0.0, 2.0),
        (0, 1, SLOW, 2.5, 4.0),
        (1, 0, FAST, 2.2, 3.0),
        (1, 1, FAST, 3.0, 3.5),
        arrivals_s=[0.0, 1.0],
        ends_s=[4.0, 3.5],
    )
    assert run.most_waiting == 2
    assert run.away() == 0.5 and run.away(1) == 0.0
    assert run.seconds(1, SLOW) == [1.5]


def test_a_batch_that_begins_when_it_comes_never_waits() -> None:
    run = ran((0, 0, FAST, 0.0, 1.0), arrivals_s=[0.0], ends_s=[1.0])
    assert run.most_waiting == 0


class Carrying:
    """A rig that carries a share of ten batches a second; it never waits below, and ever longer above."""

    lanes = 2

    def __init__(self, share: float) -> None:
        self._per_s = 10 * share
        self.tried: list[float] = []

    def closed_loop(self, at_once: int, batches: int) -> Run:
        ends_s = [batch / 10 for batch in range(batches)]
        return Run([0.0] * batches, ends_s)

    def open_loop(self, arrivals_s: list[float], *, most: float) -> Run:
        per_s = 1 / arrivals_s[1]
        self.tried.append(per_s / 10)
        growth_s = 1 / self._per_s - 1 / per_s if per_s > self._per_s else 0.0
        return Run(arrivals_s, [0.1 + growth_s * batch for batch in range(len(arrivals_s))])


@pytest.mark.parametrize("share", SHARES)
def test_the_highest_rate_that_keeps_up_is_found_by_halving(share: float) -> None:
    rig = Carrying(share + 0.001)
    found, run = highest_share(rig, 300)  # type: ignore[arg-type]
    assert found == share and run.keeps_up
    tries = [rig.tried.count(one) for one in set(rig.tried)]
    assert len(tries) <= 4 and set(tries) <= {1, TRIES}


def test_a_fit_that_is_exact_is_within_5_percent_at_every_rate() -> None:
    """T(b) = 1 + b / 10: one item alone carries 10 / 11 a second, and 32 of them 7.6."""
    found = batches.judged({batch: 1.0 + 0.1 * batch for batch in range(1, batches.LARGEST + 1)})
    assert found["close"] == 1.0
    assert found["per_s"] == pytest.approx(32 / 4.2)
    assert found["larger"] == pytest.approx(1 - (10 / 11) / (32 / 4.2), abs=1 / batches.RATES)


def test_a_batch_that_is_chosen_by_a_wrong_fit_counts_against_it() -> None:
    """Every size but the fitted ones takes a hundredth of what the fit expects."""
    times_s = {b: (1.0 if b in batches.FITTED else 0.01) * b for b in range(1, batches.LARGEST + 1)}
    assert batches.judged(times_s)["close"] < 0.5


class BesidePair(Pair):
    """Its plans need no machine: every rig is one that carries 15 batches a second in a closed loop."""

    def __init__(self) -> None:
        self._model, self._batches, self._slow = SimpleNamespace(name="m", choice=None), 20, 3.0  # type: ignore[assignment]
        self._machine, self._parts = SimpleNamespace(fast_and_slow=None), None  # type: ignore[assignment]
        self.rows = []

    @contextmanager
    def _rig(self, plan: Any, **how: Any) -> Iterator[Any]:
        run = SimpleNamespace(away=lambda: 1.0)
        yield SimpleNamespace(closed_loop=lambda *_: run)


def test_an_unpaced_plan_in_a_closed_loop_is_compared_with_the_fast_ones_closed_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fast one carries 10 a second in a closed loop and 8.5 of batches that come evenly spaced."""
    monkeypatch.setattr(lines, "replace", lambda where, **_: where)
    monkeypatch.setattr(lines, "placed_rival", lambda _: SimpleNamespace(plan=lambda *_: None))
    monkeypatch.setattr(lines, "saturated_per_s", lambda *_: 15.0)
    pair = BesidePair()
    pair.fast = Rate(plan=None, per_s=8.5, closed_per_s=10.0, parts=None)  # type: ignore[arg-type]
    pair.beside("openvino")
    (row,) = pair.rows
    assert row["closed_over_fast_only"] == pytest.approx(1.5)


class SlowerPair(BesidePair):
    """Heads take 3 s, tails 1 s and away 9 s; `busy` of five go away in a closed loop, `away` at the rate."""

    def __init__(self, away: float, busy: int = 2) -> None:
        super().__init__()
        self._away, self._busy = away, busy
        self.rates: list[float] = []

    @contextmanager
    def _rig(self, plan: Any, **how: Any) -> Iterator[Any]:
        def busy(at_once: int, count: int, slow_down: Any) -> Run:
            steps = []
            for batch in range(count):
                tail = (SLOW, 3.0, 12.0) if batch % 5 < self._busy else (FAST, 3.0, 4.0)
                steps += [(batch, 0, FAST, 0.0, 3.0), (batch, 1, *tail)]
            return ran(*steps, arrivals_s=[0.0] * count, ends_s=[12.0] * count)

        def near(arrivals_s: list[float], slow_down: Any) -> Any:
            self.rates.append(1 / arrivals_s[1])
            return SimpleNamespace(most_waiting=2, away=lambda first: self._away)

        yield SimpleNamespace(closed_loop=busy, open_loop=near)


@pytest.mark.parametrize(("away", "met"), [(0.0, False), (0.1, False), (0.2, True)])
def test_near_the_highest_rate_with_a_slower_slow_resource_tails_must_go_away(away: float, met: bool) -> None:
    """The fast one alone carries a batch in 4 s, the highest rate is one in 3.6 s."""
    pair = SlowerPair(away)
    *_, line = pair._slower(Rate(plan=None, per_s=0.0, closed_per_s=0.0, parts=None))  # type: ignore[arg-type]
    assert pair.rates == [pytest.approx(0.97 / 3.6)] and pair.rates[0] > 1 / 4
    assert line.met is met and line.beside == {"away": away}


def test_tails_that_all_stay_on_the_fast_resource_are_too_few_away_and_end_no_run() -> None:
    """Away they would take nine times as long, so that 0.4 of them should go."""
    pair = SlowerPair(0.2, busy=0)
    line, _ = pair._slower(Rate(plan=None, per_s=0.0, closed_per_s=0.0, parts=None))  # type: ignore[arg-type]
    assert (line.asked, line.measured, line.met) == ("within 10 % of 0.400", 0.0, False)


class TwoLines:
    """A pair of which two lines are measured; of the detector's only one, then it fails."""

    def __init__(self, model: str, *_: object) -> None:
        self._model = model
        self.rows = [{"part": "rates", "model": model}]

    def lines(self) -> Iterator[Line]:
        yield Line(self._model, 3.0, "a line", ">= 1", 2.0, True)
        if self._model == "detector":
            raise RuntimeError("the engine does not answer")
        yield Line(self._model, 3.0, "another", ">= 1", 0.5, False)

    def beside(self, executor: str) -> None:
        """Nothing."""


def reported(monkeypatch: pytest.MonkeyPatch, cache: Path, *models: str) -> tuple[Report, int | str]:
    """What is reported of these models, and how it ended; no registry has MiniLM."""

    def load(name: str, *_: object) -> str:
        if name == "minilm":
            raise NoRegistryError("it is away")
        return name

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(staronnx, "load", load)
    monkeypatch.setattr(staronnx, "Parts", lambda *_: None)
    monkeypatch.setattr(staronnx, "Pair", TwoLines)
    report = Report("staronnx")
    options = argparse.Namespace(model=models, slow=[3.0], only=["pairs"], quick=False, cache=cache)
    try:
        return report, staronnx.measure(report, options)
    except RuntimeError as error:
        return report, str(error)


def test_a_model_that_cannot_be_fetched_leaves_the_lines_of_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = reported(monkeypatch, tmp_path, "minilm", "inception_v3")
    assert ended == staronnx.NO_REGISTRY
    assert report.figures == {"lines": 2, "lines_met": 1}
    assert [row["part"] for row in report.rows] == ["absent", "lines", "lines", "rates"]


def test_a_pair_that_fails_leaves_the_lines_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = reported(monkeypatch, tmp_path, "inception_v3", "detector")
    assert ended == "the engine does not answer"
    assert report.figures == {"lines": 3, "lines_met": 2}
    assert [row["model"] for row in report.rows].count("detector") == 2


def test_the_loop_by_hand_runs_without_collections_as_the_engine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collects: list[bool] = []
    session = SimpleNamespace(run=lambda values: collects.append(gc.isenabled()))
    monkeypatch.setattr(hand_loop, "_session", lambda *_: session)
    monkeypatch.setattr(hand_loop, "split", lambda *_: (None, SimpleNamespace(live_in=())))
    model = SimpleNamespace(artifact=SimpleNamespace(graph=SimpleNamespace(inputs=(), operators=())))
    machine = SimpleNamespace(cores=(min(os.sched_getaffinity(0)),) * 2)
    hand_loop.by_hand_per_s(model, machine, 0, 1.0, 2, 20)  # type: ignore[arg-type]
    assert collects == [False] * 40 and gc.isenabled()
