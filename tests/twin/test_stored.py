"""Step times of a device as the planner's store knows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.store.store import Store
from stageloom.planner.twin.device_file import Kind, load_device
from stageloom.planner.twin.stored import served_steps, stored_times
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import (
    KIND_OF,
    PLAN_CHARS,
    CoreRange,
    ExecutorFact,
    Ledger,
    MachineFacts,
    OperatorTiming,
    ProfileResult,
    Row,
    RowData,
    StepTimings,
    encode_row,
)
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, T0_US, add_model, enrol, row
from tests.store.migrated import new_store

OPERATORS = 4
ONE, TWO = ExecutorOptions(intra_op_threads=1), ExecutorOptions(intra_op_threads=2)
US = {ONE: 100.0, TWO: 1000.0}  # of an operator of either model


class Device:
    """Tells what its models' operators take on its executors."""

    def __init__(self, folder: Path, *, tells_executors: bool = True) -> None:
        self.store: Store = new_store(folder)
        self.rows = 0
        enrol(self.store)
        self.artifacts = {name: add_model(self.store, folder, name, OPERATORS) for name in ("left", "right")}
        if tells_executors:
            self.tells(MachineFacts((CoreRange(0, 1),), (ExecutorFact(ONE.name),), 1))

    def tells(self, data: RowData, at_us: int | None = None) -> None:
        """`at_us`: by its own clock."""
        told = row(self.rows, data, kind=KIND_OF[type(data)])
        if at_us is not None:
            told = replace(told, at_us=at_us, body=encode_row(Row(at_us, data)))
        written = TelemetryWrite(NANO, (told,), (Ledger(7, self.rows + 1, 0),))
        LinkStore(self.store).append_telemetry([written])
        self.rows += 1

    def measures(self, name: str, executor: ExecutorOptions | None) -> None:
        """None: on whatever its agent runs, which does not tell."""
        (request,), _ = self.store.write(request_profile, NANO, [name], executor=executor)
        times = tuple(OperatorTiming(op, US[executor or ONE], 1.0, 9) for op in range(OPERATORS))
        self.tells(ProfileResult(request, self.artifacts[name], 1, "", times, True))

    def plan(self, *executors: ExecutorOptions) -> BoundPlan:
        """Each model in a block of its own, on one of two executors where there are as many."""
        graphs = {digest: self.store.graph(Digest(digest)) for digest in self.artifacts.values()}
        choices = [
            ModelChoice(name=name, artifact=digest, graph=graphs[digest])
            for name, digest in self.artifacts.items()
        ]
        plan = compose(choices)
        first, *further = executors
        combined = tuple(
            replace(block, executor=at if further else 0) for at, block in enumerate(plan.combined)
        )
        return bind(
            replace(plan, combined=combined, executor=first, further_executors=tuple(further)), graphs
        )


@pytest.mark.parametrize("executors", [(ONE, TWO), (TWO, ONE)])
def test_each_block_of_a_plan_with_several_executors_takes_what_was_measured_on_its_own(
    tmp_path: Path, executors: tuple[ExecutorOptions, ExecutorOptions]
) -> None:
    device = Device(tmp_path)
    for name in device.artifacts:
        for executor in US:
            device.measures(name, executor)
    bound = device.plan(*executors)
    times, source = stored_times(device.store, NANO, bound)
    assert source.startswith("operators measured on")
    known, overhead_s = times.of_plan(bound), times.device.step_s + times.device.item_s
    for at, executor in enumerate(executors):
        expected_s = OPERATORS * US[executor] * 1e-6 + overhead_s
        assert known.step(at, 1, (1,)).seconds == pytest.approx(expected_s)
    device.store.close()


@pytest.mark.parametrize("kind", Kind)
def test_a_device_file_that_was_fitted_to_a_real_device_is_called_measured(
    tmp_path: Path, kind: Kind
) -> None:
    device = Device(tmp_path)
    base = replace(load_device("nano"), kind=kind)
    assert stored_times(device.store, NANO, device.plan(ONE), base)[1] == f"{kind.value} from nano"
    device.store.close()


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp16"])
def test_operators_that_were_measured_in_a_precision_need_no_published_figures_for_it(
    tmp_path: Path, precision: str
) -> None:
    device = Device(tmp_path, tells_executors=False)
    narrow = replace(ONE, precision=precision)
    with pytest.raises(InputError, match=f"no figures for {precision}"):
        stored_times(device.store, NANO, device.plan(narrow))
    for name in device.artifacts:
        device.measures(name, None)
    bound = device.plan(narrow)
    times, source = stored_times(device.store, NANO, bound)
    assert source.startswith("operators measured on")
    expected_s = OPERATORS * US[ONE] * 1e-6 + times.device.step_s + times.device.item_s
    assert times.of_plan(bound).step(0, 1, (1,)).seconds == pytest.approx(expected_s)
    device.store.close()


def test_a_fitted_twin_rates_each_executor_in_its_own_precision(tmp_path: Path) -> None:
    device, base = Device(tmp_path), load_device("nano")
    narrow = replace(TWO, precision="fp16")
    for name in device.artifacts:
        device.measures(name, ONE)
    bound = device.plan(ONE, narrow)
    device.store.write(add_plan, "served", bound.plan, "sequential")
    device.tells(StepTimings(bound.plan.digest[:PLAN_CHARS], 0, 1, 30, 30 * 300, 300))
    times, source = stored_times(device.store, NANO, bound, base)
    assert source.endswith("fitted to 1 programs that it served")
    known = times.costs
    assert known.under(ONE).rates.flop_per_s == base.fp32_flop_per_s
    assert known.under(narrow).rates.flop_per_s == base.fp16_flop_per_s
    device.store.close()


@pytest.mark.parametrize("since_us", [86_400_000_000, T0_US + 2 * 86_400_000_000])
def test_steps_that_were_served_after_a_moment_of_the_devices_clock_are_told_apart_whatever_it_says(
    tmp_path: Path, since_us: int
) -> None:
    """In 1970, and days ahead: neither is when the steps are filed."""
    device = Device(tmp_path)
    graphs = {digest: device.store.graph(digest) for digest in device.artifacts.values()}
    plan = compose(
        [
            ModelChoice(name=name, artifact=digest, graph=graphs[digest])
            for name, digest in device.artifacts.items()
        ]
    )
    device.store.write(add_plan, "served", plan, "sequential")
    for at_us, step_us in ((since_us, 900), (since_us + 1, 300)):
        device.tells(StepTimings(plan.digest[:PLAN_CHARS], 0, 1, 30, 30 * step_us, step_us), at_us)
    (sample,) = served_steps(device.store, NANO, bind(plan, graphs), since_us)
    assert sample.seconds == pytest.approx(300e-6)
    device.store.close()
