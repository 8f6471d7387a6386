"""`benchmarks.runner`: statistics on numbers known beforehand, and a benchmark that fails."""

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demos
from benchmarks.runner import Report, rank_correlation, resident_mib, run


def fails_late(report: Report, options: argparse.Namespace) -> None:
    """Measure one thing, and fail at the next one."""
    report.add({"first_s": 1.5}, [{"part": "first"}])
    raise SystemExit(7)


def ended_late(report: Report, options: argparse.Namespace) -> None:
    """Measure one thing, and be told to end, as `timeout` does, at the next one."""
    report.add({"first_s": 1.5}, [{"part": "first"}])
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process at once"
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("measure", "code"), [(fails_late, 7), (ended_late, 128 + signal.SIGTERM)])
def test_what_was_measured_before_a_benchmark_fails_is_printed(
    measure: Callable[[Report, argparse.Namespace], None], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(measure, argv=["--json"])
    assert ended.value.code == code
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] == {"first_s": 1.5} and found["rows"] == [{"part": "first"}]
    assert found["machine"]["ended_by"] == "SystemExit"


def not_numbers(report: Report, options: argparse.Namespace) -> None:
    """Measure nothing that is a number."""
    report.add(
        {"ratio": math.nan, "p99_ms": math.inf, "kept": 1.0}, [{"low": math.nan, "series": [math.inf, 2.0]}]
    )


def test_what_is_no_number_is_no_figure_and_null_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run(not_numbers, argv=["--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["figures"] == {"kept": 1.0} and found["rows"] == [{"low": None, "series": [None, 2.0]}]
    run(not_numbers, argv=[])
    assert "nan" not in capsys.readouterr().out


def test_runs_of_the_demo_before_the_last_one_failed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(seed: int, *options: str) -> dict[str, Any]:
        if seed == 3:
            raise KeyboardInterrupt
        return {"seed": seed, "exit": seed - 1, "replans": [{"outcome": "committed"}] * (2 - seed)}

    monkeypatch.setattr(demos, "demo", once)
    report = Report("demos")
    with pytest.raises(KeyboardInterrupt):
        demos.measure(report, argparse.Namespace(runs=10, quick=False))
    assert [row["seed"] for row in report.rows] == [1, 2]
    assert report.figures == {"runs": 2, "committed": 1, "failed": 1}


def test_rank_correlation_sees_order_alone_and_shares_the_ranks_of_equals() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 11.0, 1000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 over sqrt(4.5 * 5).
    assert rank_correlation([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx((4.5 / 5.0) ** 0.5)


_HOLDS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(len(held[::4096]), flush=True)
input()
"""


def test_a_page_of_a_file_counts_once_for_several_processes_and_whole_beside_others(tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(bytes(32 << 20))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _HOLDS, str(tmp_path / "held")]
    holders = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(3)]
    try:
        assert all(one.stdout is not None and one.stdout.readline() for one in holders)
        first, second, _ = (one.pid for one in holders)
        alone = resident_mib([first])
        assert alone > 32
        assert alone <= resident_mib([first, second]) < alone + resident_mib([second]) - 32
    finally:
        for one in holders:
            one.communicate(b"\n")
