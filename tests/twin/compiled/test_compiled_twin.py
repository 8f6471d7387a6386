"""What the compiled twin refuses, its branches, and what it does not load."""

import subprocess
import sys
from pathlib import Path

import pytest

from planner.twin.arrivals import Poisson
from planner.twin.compiled.jit import cache_folder
from planner.twin.device_file import load_device
from planner.twin.times import StepTimes
from shared.errors import InputError, PlanError
from tests.engine.plans import chains
from tests.twin.compiled.plain import PlainTwin

LOAD = {"a": Poisson(rate_per_s=3000.0), "b": Poisson(rate_per_s=5000.0)}


def twin(**options: object) -> PlainTwin:
    return PlainTwin(StepTimes.derived(load_device("nano")), LOAD, **options)  # type: ignore[arg-type]


def test_a_branch_goes_on_from_where_it_was_made_and_changes_nothing_there() -> None:
    bound = chains(3, 2)
    trunk = twin(seed=1)
    trunk.deploy(bound)
    trunk.run(0.004)
    branches = [trunk.copy() for _ in range(2)]
    kept = [array.tobytes() for array in trunk.state]
    windows = [branch.run(0.004) for branch in branches]
    assert windows[0] == windows[1]
    assert windows[0].completed > 5
    assert [array.tobytes() for array in trunk.state] == kept
    branches[0].deploy(chains(3, 2, lanes=2))
    branches[0].run(0.004)
    assert trunk.run(0.004) == windows[1]


def test_other_models_than_at_first_are_refused() -> None:
    one = twin()
    one.deploy(chains(3, 2))
    with pytest.raises(PlanError, match="other models"):
        one.deploy(chains(3, 2, 1))


def test_tasks_for_a_model_that_the_plan_lacks_are_refused() -> None:
    with pytest.raises(InputError, match="'b'"):
        twin().deploy(chains(3))


def test_running_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="deploy"):
        twin().run(1.0)


def test_more_steps_in_flight_than_a_mask_holds_are_refused() -> None:
    with pytest.raises(PlanError, match="lanes"):
        twin().deploy(chains(3, 2, lanes=8, run_ahead=8))


def test_machine_code_is_kept_apart_for_every_text_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_folder().is_relative_to(tmp_path / "user")


def test_the_planner_starts_without_the_compiler() -> None:
    program = (
        "import sys, planner.cli, planner.service, planner.twin.reference, planner.twin.compiled;"
        "print('numba' in sys.modules or 'llvmlite' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
