"""How the suite is spread over processes: `make test` runs it under pytest-xdist, a file in one process."""

import gc
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: what fails fails for a change. `make test-full` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)  # how long an example takes is no promise
settings.load_profile("same")

# Hundreds of tests start processes of their own, and each would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONGEST_FIRST = (
    "adversary/test_extremes.py",
    "executor/test_contract.py",
    "adversary/test_power_cut.py",
    "planner/test_planner_process.py",
    "verify/test_heads.py",
    "twin/compiled/test_step_by_step.py",
    "learning/test_worker.py",
    "store/test_retention.py",
    "engine/test_simulated.py",
    "learning/test_train_maddpg_command.py",
    "rollout/test_service.py",
    "bench/test_contestants.py",
    "test_bad_input.py",
    "e2e/test_planner_lives.py",
    "benchmarks/test_attribution.py",
    "executor/test_splits.py",
    "agent/test_cli.py",
    "cluster/test_pools.py",
    "sim/test_worlds.py",
    "benchmarks/paper/test_reproductions.py",
    "store/test_schema.py",
    "planner/test_replanning.py",
    "bench/test_own_models.py",
    "e2e/test_auto_plan.py",
    "verify/test_defects.py",
    "e2e/test_serving.py",
    "importer/test_hostile.py",
    "executor/test_shared_plans.py",
    "executor/openvino/test_plans.py",
    "engine/test_trial_simulated.py",
    "sim/test_mutations.py",
    "benchmarks/test_eop.py",
    "planner/api/test_page.py",
    "verify/test_models.py",
)
"""Files that take longest: one begun last would run alone, with every other processor idle."""

_HERE = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process more than there are processors: many tests wait for processes of their own."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed out in the order in which they were collected, not by their number of tests."""
    gc.disable()  # until all is collected: what is imported stays
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """The processes of a whole run import a share of the tests each, which the others then find compiled.

    Each needs all of them, and pytest's own compiling takes longer than all else that collecting does.
    """
    ours: dict[str, object] = getattr(session.config, "workerinput", {})
    if not ours or [Path(one).resolve() for one in session.config.args] != [_HERE]:
        return
    number, workers = int(str(ours["workerid"]).removeprefix("gw")), int(str(ours["workercount"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in sorted(_HERE.rglob("test_*.py"))[number::workers]:
            with suppress(Exception, pytest.skip.Exception):  # told when it is collected, if it is
                import_module(".".join(path.relative_to(_HERE.parent).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of several, the longest files first."""
    if hasattr(config, "workerinput"):
        place = {_HERE / name: index for index, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
