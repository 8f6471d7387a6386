"""`benchmarks.contract`: what a file keeps of a comparison that was cut off, and that disagreement shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contract import __main__ as contract
from benchmarks.contract.__main__ import Record
from stageloom.shared.errors import ExecutorError

SETTINGS = {"executor": "onnx", "repeats": 100, "quick": False}
ARGUMENTS = ("--quick", "--repeats", "1", "--json", "--part", "squeezenet")


def test_a_record_has_what_was_added_and_nothing_of_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, other = Record(path, SETTINGS), Record(path, {**SETTINGS, "executor": "torch_cpu"})
    first.add({"plan": "one", "agrees": True})
    other.add({"plan": "two", "agrees": True})
    other.complete("part")
    again = Record(path, SETTINGS)
    assert again.has("one") and not again.has("two") and not again.is_complete("part")
    assert again.rows == [{"plan": "one", "agrees": True}]


def test_a_line_that_was_torn_off_is_compared_again_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = Record(path, SETTINGS)
    for plan in ("one", "two"):
        record.add({"plan": plan, "agrees": True})
    path.write_bytes(path.read_bytes()[:-5])
    again = Record(path, SETTINGS)
    assert again.has("one") and not again.has("two")
    again.add({"plan": "two", "agrees": True})
    assert [row["plan"] for row in Record(path, SETTINGS).rows] == ["one", "two"]


@pytest.mark.promise("contract-s-comparison-can")
def test_a_plan_that_disagreed_is_compared_again_and_its_newest_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = Record(path, SETTINGS)
    record.add({"plan": "one", "agrees": False})
    assert not Record(path, SETTINGS).has("one")
    record.add({"plan": "one", "agrees": True})
    again = Record(path, SETTINGS)
    assert again.has("one") and again.rows == [{"plan": "one", "agrees": True}]


@pytest.fixture
def two_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SCHEDULES", ("sequential", "merged"))


@pytest.mark.promise("contract-s-comparison-can")
@pytest.mark.usefixtures("two_schedules")
def test_what_a_file_has_is_not_compared_again_and_gives_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The run is cut off after its first plan. 2. The next compares the rest. 3. The third nothing."""
    path = tmp_path / "rows.jsonl"

    def run() -> tuple[int, dict[str, Any], list[str]]:
        code = contract.main([*ARGUMENTS, "--rows", str(path)])
        out, err = capsys.readouterr()
        return code, json.loads(out), err.splitlines()

    code, whole, compared = run()
    assert code == 0 and whole["figures"]["agreed"] == len(compared) == len(whole["rows"]) > 2
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    code, found, rest = run()
    assert code == 0 and rest == compared[1:]
    assert [row["plan"] for row in found["rows"]] == compared
    assert found["figures"] == whole["figures"]
    monkeypatch.setattr(contract, "_subject", None)  # not even made
    code, again, nothing = run()
    assert (code, nothing, again["rows"]) == (0, [], found["rows"])


@pytest.mark.usefixtures("two_schedules")
def test_a_plan_that_fails_is_a_row_and_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ExecutorError("no such kernel")

    monkeypatch.setattr("benchmarks.contract.cases.compare", fails)
    assert contract.main(ARGUMENTS) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["agreed"] == 0.0
    assert {row["failed"] for row in found["rows"]} == {"no such kernel"}
