"""What the units' sandboxes take away is not needed."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import zoo
from stageloom.planner.admin.client import ask as real_ask
from stageloom.shared.messages import admin
from tests.planner.processes import PlannerProcess, ok


def test_model_is_handed_over_inside_the_data_directory_since_a_service_has_a_tmp_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(folder: Path, request: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(request, admin.ModelAddRequest):
            asked.append(request.path)
        return real_ask(folder, request, *rest, **options)

    monkeypatch.setattr("stageloom.planner.cli.model.ask", ask)
    home = tmp_path / "planner"
    file = tmp_path / "model.onnx"
    zoo.write("squeezenet", file, width=0.25, size=64)
    running = PlannerProcess(home)
    try:
        assert ok(home, "model", "add", str(file), "--name", "net") == "net\n"
    finally:
        running.stop()
    (handed_over,) = asked
    assert home in Path(handed_over).parents
    assert not Path(handed_over).exists()  # a copy lies in the store
