"""What the units' sandboxes take away is not needed."""

from pathlib import Path

from benchmarks import zoo
from tests.planner.processes import PlannerProcess, ok


def test_a_model_is_handed_over_without_a_folder_that_both_see_since_a_service_has_a_tmp_of_its_own(
    tmp_path: Path,
) -> None:
    """1. The planner's uploads are files of its data directory; 2. once a model is taken none is left."""
    home = tmp_path / "planner"
    file = tmp_path / "model.onnx"
    zoo.write("squeezenet", file, width=0.25, size=64)
    running = PlannerProcess(home)
    try:
        assert ok(home, "model", "add", str(file), "--name", "net") == "net\n"
    finally:
        running.stop()
    assert list(home.glob(".upload-*")) == []
