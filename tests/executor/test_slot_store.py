"""The store of tensors between blocks: by reference on one memory node, copied to another once."""

import numpy as np
import pytest

from stageloom.edge_agent.executor.slot_store import HOST, SlotStore
from stageloom.shared.engine.steps import InstanceId
from stageloom.shared.ids import TensorId

ONE, A, B = InstanceId(1), TensorId(0), TensorId(1)


def counted() -> tuple[SlotStore, list[int]]:
    sizes: list[int] = []

    def transfer(array: np.ndarray) -> np.ndarray:
        sizes.append(array.nbytes)
        return array.copy()

    return SlotStore(transfer), sizes


def test_tensors_pass_by_reference_on_one_node() -> None:
    store, copies = counted()
    array = np.ones(3, np.float32)
    store.put(ONE, HOST, {A: array})
    assert store.read(ONE, HOST, [A])[A] is array and not copies


def test_another_node_has_a_copy_that_is_made_once() -> None:
    store, copies = counted()
    array = np.ones(3, np.float32)
    store.put(ONE, HOST, {A: array, B: np.zeros(1, np.float32)})
    there = store.read(ONE, 1, [A])[A]
    assert there is not array and np.array_equal(there, array) and copies == [12]
    assert store.read(ONE, 1, [A])[A] is there and copies == [12]
    assert store.read(ONE, HOST, [A])[A] is array, "a copy takes nothing away"


def test_what_is_not_kept_is_forgotten_on_every_node() -> None:
    store, _ = counted()
    store.put(ONE, HOST, {A: np.ones(3), B: np.ones(3)})
    store.read(ONE, 1, [A, B])
    store.keep(ONE, [B])
    assert set(store.peek(ONE, [B])) == {B}
    for node in (HOST, 1):
        with pytest.raises(KeyError):
            store.read(ONE, node, [A])


def test_a_dropped_instance_has_nothing_and_an_unknown_one_may_be_dropped() -> None:
    store, _ = counted()
    store.put(ONE, HOST, {A: np.ones(3)})
    store.drop(ONE)
    store.drop(ONE)
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.read(ONE, HOST, [A])


def test_a_lost_copy_is_an_error_and_no_empty_tensor() -> None:
    store, _ = counted()
    store.put(ONE, HOST, {A: np.ones(3)})
    with pytest.raises(KeyError):
        store.read(ONE, 1, [B])
