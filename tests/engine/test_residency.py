"""Valid memory nodes against a model with real copies, and predicted transfers by their formula."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.engine.residency import Bus, NodeId, Residency, exposed_transfer_s

HOST, GPU, OTHER = NodeId(0), NodeId(1), NodeId(2)
NODES = (HOST, GPU, OTHER)
BUS = Bus(latency_s=0.25, bytes_per_s=1000.0)

EVENTS = st.lists(
    st.tuples(st.sampled_from(["write", "copy", "release"]), st.sampled_from("ab"), st.sampled_from(NODES)),
    max_size=40,
)


@given(EVENTS)
def test_a_node_is_valid_exactly_if_it_holds_the_newest_version(
    events: list[tuple[str, str, NodeId]],
) -> None:
    residency: Residency[str] = Residency(BUS)
    newest: dict[str, int] = {}
    held: dict[tuple[str, NodeId], int] = {}
    for version, (event, slot, node) in enumerate(events):
        if event == "write":
            residency.write(slot, node, [version])
            newest[slot] = held[slot, node] = version
        elif event == "release":
            residency.release(slot)
            newest.pop(slot, None)
        elif slot in newest:
            residency.copy(slot, node)
            held[slot, node] = newest[slot]
        for any_slot, any_node in product("ab", NODES):
            wanted = any_slot in newest and held.get((any_slot, any_node)) == newest[any_slot]
            assert residency.valid(any_slot, any_node) == wanted
    assert len(residency) == len(newest)


def test_a_copy_adds_and_a_write_leaves_one() -> None:
    residency: Residency[str] = Residency()
    residency.write("a", GPU, [8])
    residency.copy("a", HOST)
    residency.copy("a", OTHER)
    assert [residency.valid("a", node) for node in NODES] == [True, True, True]
    residency.write("a", HOST, [8])
    assert [residency.valid("a", node) for node in NODES] == [True, False, False]


def test_a_transfer_is_latency_and_bytes_over_bandwidth_of_every_tensor_that_is_missing() -> None:
    residency: Residency[str] = Residency(BUS)
    residency.write("a", HOST, [100, 0, 400])
    residency.write("b", GPU, [50])
    residency.write("c", HOST, [])
    slots = ("a", "b", "c")
    assert residency.transfer_s(slots, GPU) == pytest.approx(2 * 0.25 + 0.5)
    assert residency.transfer_s(slots, HOST) == pytest.approx(0.25 + 0.05)
    assert residency.transfer_s(slots, OTHER) == pytest.approx(3 * 0.25 + 0.55)
    assert residency.missing(slots, GPU) == ("a", "c")
    residency.copy("a", GPU)
    assert residency.transfer_s(("a", "b"), GPU) == 0.0


def test_without_a_bus_a_copy_takes_no_time_and_is_still_needed() -> None:
    residency: Residency[str] = Residency()
    residency.write("a", HOST, [1 << 30])
    assert residency.transfer_s("a", GPU) == 0.0
    assert residency.missing("a", GPU) == ("a",)


@pytest.mark.parametrize("ask", ["copy", "missing", "transfer_s"])
def test_a_slot_that_holds_nothing_can_be_neither_copied_nor_read(ask: str) -> None:
    residency: Residency[str] = Residency()
    residency.write("a", HOST, [1])
    residency.release("a")
    residency.release("a")
    assert not residency.valid("a", HOST)
    with pytest.raises(KeyError):
        getattr(residency, ask)("a", GPU)


@given(*[st.floats(0, 100)] * 3)
def test_only_what_outlasts_the_queue_is_exposed(transfer_s: float, now: float, queued_s: float) -> None:
    exposed = exposed_transfer_s(transfer_s, now=now, expected_end_s=now + queued_s)
    assert 0.0 <= exposed <= transfer_s + 1e-9
    assert exposed == pytest.approx(max(0.0, transfer_s - queued_s), abs=1e-9)
    # The task begins when both are over: the queue, and the transfer.
    assert now + queued_s + exposed == pytest.approx(now + max(queued_s, transfer_s))
    assert math.isclose(exposed_transfer_s(transfer_s, now=now, expected_end_s=now), transfer_s, abs_tol=1e-9)
