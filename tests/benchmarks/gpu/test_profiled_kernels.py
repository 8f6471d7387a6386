"""Kernel intervals and resource demands, from a trace in the form that torch's profiler writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.profiled_kernels import (
    Kernel,
    OperatorResources,
    Rates,
    busy_share,
    concurrency,
    kernels_by_operator,
    kernels_of,
    opara_profile,
    operator_resources,
    union_us,
)
from stageloom.edge_agent.executor.cuda.device import Multiprocessor
from stageloom.shared.blocks import combine, split
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import TensorId
from stageloom.shared.search.streams import OperatorProfile, launch_order

TRACE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data/profiler_trace.json").read_text(encoding="utf-8")
)


def kernel(begin_us: float, end_us: float, stream: int = 0) -> Kernel:
    return Kernel("k", begin_us, end_us, stream, 0)


def operator(*, flop: int, inputs: tuple[int, ...], output: int, unit: int) -> Operator:
    return Operator(
        kind="Conv",
        name=f"op{unit}",
        nodes=(unit,),
        inputs=tuple(map(TensorId, inputs)),
        outputs=(TensorId(output),),
        flop=flop,
        weight_bytes=400,
        fused_unit=unit,
    )


def two_operators() -> Graph:
    """Two readers of one input."""
    return Graph(
        name="two",
        tensors=tuple(Tensor(name, "float32", (100,)) for name in ("x", "a", "b")),
        operators=(
            operator(flop=1_000_000, inputs=(0,), output=1, unit=0),
            operator(flop=10, inputs=(0,), output=2, unit=1),
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(1), TensorId(2)),
    )


def test_kernels_are_read_with_what_their_launch_asked_for() -> None:
    found = kernels_of(TRACE)
    assert [one.name for one in found] == ["sm90_xmma_fprop", "pool", "relu", "outside"]
    first = found[0]
    assert (first.registers, first.shared_bytes, first.threads, first.blocks) == (168, 98304, 128, 66)
    assert (first.begin_us, first.end_us, first.stream) == (130.0, 150.0, 7)


def test_a_kernel_belongs_to_the_operator_in_whose_annotation_it_was_launched() -> None:
    found = kernels_by_operator(TRACE)
    assert {op: [one.name for one in own] for op, own in found.items()} == {
        0: ["sm90_xmma_fprop", "relu"],
        1: ["pool"],  # it ran beside operator 0, yet was launched for 1
    }


def test_concurrency_is_the_sum_over_the_union_of_intervals() -> None:
    overlapping = [kernel(0, 10), kernel(5, 15, 1), kernel(5, 8, 2), kernel(20, 30)]
    assert union_us(overlapping) == 25.0
    assert concurrency(overlapping) == pytest.approx(33 / 25)
    assert busy_share(overlapping) == pytest.approx(25 / 30)
    assert concurrency([kernel(0, 4), kernel(4, 9)]) == 1.0
    assert concurrency([]) is None and busy_share([]) is None


@pytest.mark.promise("load-cannot-read-unsupported")
def test_what_bounds_an_operator_is_measured_and_not_read_off_its_name() -> None:
    """Both are of kind Conv; one computes near the device's rate, the other moves bytes near its."""
    rates = Rates(flop_per_s=1e11, bytes_per_s=1e9)
    found = operator_resources(two_operators(), kernels_by_operator(TRACE), rates, runs=1, item_bytes=4)
    assert [one.bound for one in found] == ["compute", "memory"]
    assert [one.device_us for one in found] == [25.0, 15.0]
    assert found[0].flop_share == pytest.approx(1e6 / 25e-6 / 1e11)
    assert found[1].bytes_share == pytest.approx(1200 / 15e-6 / 1e9)
    assert (found[0].kernels, found[0].registers) == (2, 168), "of the kernel that took the longest"
    halved = operator_resources(two_operators(), kernels_by_operator(TRACE), rates, runs=1, item_bytes=2)
    assert halved[1].bytes_share == pytest.approx(found[1].bytes_share / 2)


def test_an_operator_without_a_kernel_has_no_bound_and_asks_for_nothing() -> None:
    rates = Rates(flop_per_s=1e12, bytes_per_s=1e9)
    found = operator_resources(two_operators(), {}, rates, runs=1, item_bytes=4)
    assert [one.bound for one in found] == ["launch", "launch"]
    assert opara_profile(found[0], Multiprocessor()) == OperatorProfile()


def test_demands_are_shares_of_a_multiprocessor() -> None:
    own = OperatorResources(
        1.0, 1, registers=128, shared_bytes=99 << 10, threads=256, flop_share=0.1, bytes_share=0.2
    )
    profile = opara_profile(own, Multiprocessor(registers=65_536, shared_bytes=200 << 10, threads=2048))
    assert profile == OperatorProfile(shared_memory=0.5, threads=0.125, registers=0.5, memory_intensive=True)


def test_opara_launches_what_asks_for_least_first_and_by_turns_of_what_bounds_it() -> None:
    graph = two_operators()
    combined = combine([(graph, split(graph, ())[0])] * 2)
    heavy = OperatorResources(9.0, 1, 255, 98304, 256, flop_share=0.9, bytes_share=0.1)
    light = OperatorResources(9.0, 1, 32, 0, 128, flop_share=0.9, bytes_share=0.1)
    moving = OperatorResources(9.0, 1, 32, 0, 128, flop_share=0.1, bytes_share=0.9)
    profiles = [opara_profile(one, Multiprocessor()) for one in (heavy, moving, light, moving)]
    assert launch_order(combined, profiles) == [2, 1, 0, 3]
