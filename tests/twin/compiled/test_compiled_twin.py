"""What the compiled twin refuses, its branches, and what it does not load."""

import ast
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.compiled import compile_ahead, compile_cache, engine
from stageloom.planner.twin.compiled.compile_cache import SCALES, cache_folder, is_compiled, sources
from stageloom.planner.twin.compiled.twin import CompiledTwin, compile_kernels
from stageloom.planner.twin.device_file import cpu_device, load_device
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.ids import OpId
from stageloom.shared.plan import ExecutorOptions, QueuePlan
from stageloom.shared.search.costs import CostTable
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
    kept = [array.tobytes() for array in vars(trunk.state).values()]
    windows = [branch.run(0.004) for branch in branches]
    assert windows[0] == windows[1]
    assert windows[0].completed > 5
    assert [array.tobytes() for array in vars(trunk.state).values()] == kept
    branches[0].deploy(chains(3, 2, lanes=2))
    branches[0].run(0.004)
    assert trunk.run(0.004) == windows[1]


def test_blocks_on_executors_of_their_own_take_what_they_take_in_the_reference_twin() -> None:
    chained = chains(3, 2)
    one, two = ExecutorOptions(intra_op_threads=1), ExecutorOptions(intra_op_threads=2)
    alone = tuple(replace(block, executor=block.members[0].model) for block in chained.plan.combined)
    plan = replace(chained.plan, combined=alone, executor=one, further_executors=(two,))
    bound = bind(plan, {model.graph_key: model.graph for model in chained.models})
    operators = [
        (model.graph_key, OpId(op)) for model in bound.models for op in range(len(model.graph.operators))
    ]
    quick, slow = (
        CostTable(measured_s=dict.fromkeys(operators, seconds), executor=executor)
        for seconds, executor in ((1e-5, one), (1e-4, two))
    )
    times = StepTimes(cpu_device(4), replace(quick, beside={two: slow}))
    windows = []
    for make in (Twin, PlainTwin):
        made = make(times, LOAD, seed=1)
        made.deploy(bound)
        windows.append(made.run(0.01))
    assert windows[0] == windows[1]
    overhead_s = times.device.step_s + times.device.item_s
    took_s = {(step.combined, step.sum_s / step.count) for step in windows[0].steps}
    assert dict(took_s) == pytest.approx(
        {at: seconds + overhead_s for at, seconds in enumerate([1e-5] * 3 + [1e-4] * 2)}
    )


@pytest.mark.parametrize("other", [ExecutorOptions(name="openvino"), ExecutorOptions(precision="fp16")])
def test_what_is_in_flight_goes_over_as_in_the_reference_twin_where_a_further_executor_comes(
    other: ExecutorOptions,
) -> None:
    """1. Of another name: neither model's. 2. Of another precision, for the second model: the first one's."""
    chained = chains(3, 2)
    alone = tuple(replace(block, executor=block.members[0].model) for block in chained.plan.combined)
    plan = replace(chained.plan, combined=alone, further_executors=(other,))
    further = bind(plan, {model.graph_key: model.graph for model in chained.models})
    operators = [
        (model.graph_key, OpId(op)) for model in chained.models for op in range(len(model.graph.operators))
    ]
    costs = CostTable(measured_s=dict.fromkeys(operators, 1e-4))
    times = StepTimes(cpu_device(4), replace(costs, beside={other: replace(costs, executor=other)}))
    twins = [make(times, LOAD, seed=1) for make in (Twin, PlainTwin)]
    for bound in (chained, further) * 3:
        for made in twins:
            made.deploy(bound)
        reference, compiled = (made.run(0.0053) for made in twins)
        assert reference == compiled and reference.completed > 0


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


@pytest.mark.parametrize("fields", [{"queue": QueuePlan(max_tasks=1 << 15)}, {"batch": 1024}])
def test_longer_queues_and_larger_batches_than_memory_is_described_for_are_refused(
    fields: dict[str, object],
) -> None:
    with pytest.raises(PlanError, match="too large for the compiled twin; give it shorter queues"):
        twin().deploy(chains(3, 2, fields=fields))


def test_machine_code_is_kept_apart_for_every_text_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_folder().is_relative_to(tmp_path / "user")


def test_machine_code_is_compiled_anew_when_a_constant_in_it_changes() -> None:
    """A kernel's constants are part of it, whatever module they are imported from."""
    kept = {file.resolve() for file in sources()}
    for file in kept:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stageloom."):
                imported = Path(str(import_module(str(node.module)).__file__)).resolve()
                assert imported in kept or imported.name == "compile_cache.py", f"{file.name}: {node.module}"


def test_machine_code_is_kept_elsewhere_for_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [tmp_path / file.name for file in sources()]
    for copy, file in zip(copies, sources(), strict=True):
        copy.write_bytes(file.read_bytes())
    monkeypatch.setattr(compile_cache, "sources", lambda: copies)
    folders = {cache_folder()}
    for copy in copies:
        copy.write_text(f"{copy.read_text(encoding='utf-8')}\nFURTHER = 1\n", encoding="utf-8")
        folders.add(cache_folder())
    assert len(folders) == 1 + len(copies)


@pytest.mark.promise("both-twins-judge-plan")
def test_what_is_compiled_ahead_is_what_a_twin_runs() -> None:
    """A size of memory once compiled, a twin that needs no more room meets no type that was not."""
    compile_kernels(1)
    before = list(engine.run.signatures)  # type: ignore[attr-defined]
    one = CompiledTwin(StepTimes(load_device("nano"), CostTable()), {"a": Poisson(rate_per_s=50.0)})
    one.deploy(chains(3))
    one.run(1.0)
    assert engine.run.signatures == before  # type: ignore[attr-defined]


def test_kernels_count_as_kept_once_all_sizes_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while they are being compiled: whoever asks then would wait for them."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiled = []

    def compiling(scale: int) -> None:
        assert not is_compiled()
        cache_folder().mkdir(parents=True, exist_ok=True)
        compiled.append(scale)

    monkeypatch.setattr("stageloom.planner.twin.compiled.twin.compile_kernels", compiling)
    monkeypatch.setattr("stageloom.planner.twin.compiled.come_after", lambda niceness: None)
    compile_ahead()
    assert is_compiled() and compiled == list(SCALES)


@pytest.mark.promise("planner-starts-without-compiler")
def test_the_planner_starts_without_the_compiler() -> None:
    program = (
        "import sys, stageloom.planner.cli, stageloom.planner.service\n"
        "import stageloom.planner.tournament.evaluator, stageloom.planner.twin.reference\n"
        "print('numba' in sys.modules or 'llvmlite' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
