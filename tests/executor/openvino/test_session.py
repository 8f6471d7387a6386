"""One model in OpenVINO: on which thread it runs, what it takes, and what it refuses."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.openvino.executor import ELEMENT_TYPES, _core, open_session, reason
from stageloom.edge_agent.executor.openvino.model import read_model, share_weights
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.values import DTYPES
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.openvino.small import artifact_from, both, one_node, opened, whole

SHAPE = (1, 2, 3)


def native_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def values_of(artifact: Artifact, seed: int = 1) -> Values:
    inputs = random_inputs(artifact.graph, seed)
    return {t: inputs[artifact.graph.tensors[t].name] for t in artifact.graph.inputs}


@pytest.mark.promise("openvino-computes-on-the-lane")
def test_it_computes_on_the_calling_thread_and_starts_none() -> None:
    """So who pins a lane's thread pins the computation."""
    model = artifact_of("squeezenet", width=1.0)
    opened(model)  # whatever the plugin keeps for the process
    spent: list[tuple[float, float]] = []
    started: list[set[str]] = []

    def lane() -> None:
        before = native_threads()
        session = opened(model)
        values = values_of(model)
        session.run(values)
        process_s, thread_s = time.process_time(), time.thread_time()
        for _ in range(10):
            session.run(values)
        spent.append((time.process_time() - process_s, time.thread_time() - thread_s))
        started.append(native_threads() - before)

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    ((process_s, thread_s),) = spent
    assert thread_s > 0.9 * process_s, "other threads computed"
    assert started == [set()], "a session has threads of its own"


def test_more_threads_are_openvinos_own() -> None:
    model = artifact_of("squeezenet")
    key = whole(model)
    values = values_of(model)
    wide = type(key)(key.artifact, key.ops, key.batch, 2)
    open_session(wide, ModelParts(model)).run(values)
    wanted = reference(model, random_inputs(model.graph, 1), ["logits"])["logits"]
    assert difference(values[model.graph.outputs[0]], wanted) < 1e-4


def test_results_are_the_callers_own_and_inputs_stay_as_they_are() -> None:
    model = artifact_of("squeezenet")
    session, (output,) = opened(model), model.graph.outputs
    first, second = values_of(model, 1), values_of(model, 2)
    given = {tensor: array.copy() for tensor, array in first.items()}
    session.run(first)
    kept = first[output].copy()
    session.run(second)
    assert np.array_equal(first[output], kept) and not np.array_equal(second[output], kept)
    assert all(np.array_equal(first[tensor], array) for tensor, array in given.items())


@pytest.mark.promise("openvino-computes-on-the-lane")
def test_callers_take_turns_and_bits_are_equal_on_every_thread() -> None:
    model = artifact_of("googlenet")
    session, (output,) = opened(model), model.graph.outputs
    made: dict[tuple[int, int], bytes] = {}

    def lane(number: int) -> None:
        for repeat in range(8):
            values = values_of(model, repeat % 2)
            session.run(values)
            made[number, repeat] = values[output].tobytes()

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {made[number, 0] for number in range(3)} == {made[0, repeat] for repeat in (0, 2, 4, 6)}
    assert len(set(made.values())) == 2


def layouts() -> dict[str, np.ndarray]:
    """The same numbers, as arrays of every kind."""
    plain = np.arange(6, dtype=np.float32).reshape(SHAPE) - 2.5
    wide = np.zeros((1, 2, 6), np.float32)
    wide[:, :, ::2] = plain
    odd = np.zeros(25, np.uint8)
    odd[1:] = np.frombuffer(plain.tobytes(), np.uint8)
    locked = plain.copy()
    locked.flags.writeable = False
    return {
        "plain": plain,
        "strided": wide[:, :, ::2],
        "column order": np.asfortranarray(plain),
        "read-only": locked,
        "unaligned": odd[1:].view(np.float32).reshape(SHAPE),
        "broadcast": np.broadcast_to(np.float32(1.5), SHAPE),
        "reversed": plain[:, ::-1],
    }


@pytest.mark.parametrize("kind", layouts())
def test_arrays_of_every_layout_are_read(kind: str, tmp_path: Path) -> None:
    array = layouts()[kind]
    model = artifact_from(one_node("Relu", {"x": ("float32", SHAPE)}, ("float32", SHAPE)), tmp_path)
    (found,), (wanted,) = both(model, {"x": array})
    assert np.array_equal(found, wanted) and np.array_equal(wanted, np.maximum(array, 0))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 2, 1, 2, 1)])
@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()) - {"bfloat16"}))  # numpy has none
def test_every_element_type_passes_unchanged_or_is_refused(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    array = np.asarray(np.random.default_rng(1).integers(0, 2, shape) * 100, dtype)
    model = artifact_from(one_node("Identity", {"x": (dtype, shape)}, (dtype, shape)), tmp_path)
    if dtype in ELEMENT_TYPES:
        (found,), _ = both(model, {"x": array})
        assert found.dtype == array.dtype and found.shape == shape and np.array_equal(found, array)
        return
    with pytest.raises(ExecutorError, match=rf"is {dtype}, in which openvino does not compute; use .* onnx"):
        opened(model)


def test_types_that_it_computes_with_fewer_bits_are_not_among_those_it_takes() -> None:
    assert set(DTYPES.values()) - ELEMENT_TYPES == {"float64", "bfloat16", "uint32", "uint64"}


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40 + 1])
def test_an_integer_beyond_32_bits_fails_the_step_and_is_not_cut_off(number: int, tmp_path: Path) -> None:
    model = artifact_from(one_node("Neg", {"x": ("int64", (3,))}, ("int64", (3,))), tmp_path)
    (found,), (wanted,) = both(model, {"x": np.array([1, 2**31 - 1, 1 - 2**31])})
    assert found.dtype == np.int64 and np.array_equal(found, wanted)
    with pytest.raises(ExecutorError, match="'x' holds integers beyond 32 bits"):
        opened(model).run({model.graph.inputs[0]: np.array([1, 2, number])})


def test_an_array_of_another_shape_or_type_is_refused_by_name(tmp_path: Path) -> None:
    model = artifact_from(one_node("Relu", {"x": ("float32", SHAPE)}, ("float32", SHAPE)), tmp_path)
    (x,) = model.graph.inputs
    for wrong in (np.zeros((1, 2, 4), np.float32), np.zeros(SHAPE, np.float64)):
        with pytest.raises(ExecutorError, match=r"'x' is .*, not float32 \[1, 2, 3\]"):
            opened(model).run({x: wrong})


def test_an_operator_that_it_does_not_have_is_named_in_one_line() -> None:
    error = RuntimeError(
        "Exception from src/core.cpp:10:\nCheck 'false' failed at src/report.cpp:11:\nFrontEnd API failed\n"
        "Summary:\n-- No conversion rule found for operations: my.dom.Foo\nTo go on, refer\n"
    )
    assert reason(error) == "No conversion rule found for operations: my.dom.Foo"
    other = RuntimeError("Exception from src/x.cpp:1:\nCheck 'a' failed at src/y.cpp:2:\nit is odd")
    assert reason(other).split() == ["RuntimeError:", "it", "is", "odd"]


@pytest.mark.promise("openvino-weights-once")
def test_weights_are_views_of_the_artifact_and_are_in_memory_once() -> None:
    model = artifact_of("googlenet", width=1.0)
    weights = sum(operator.weight_bytes for operator in model.graph.operators)
    source = ModelParts(model)
    read = read_model(_core(), source, whole(model))
    large = [
        node
        for node in read.get_ops()
        if node.get_type_name() == "Constant" and node.get_byte_size() >= 1 << 14
    ]
    assert sum(node.get_byte_size() for node in large) > 0.95 * weights
    for node in large:
        view = source.weight(node.friendly_name, node.data.dtype, tuple(node.data.shape))
        assert view is not None and node.data.ctypes.data == view.ctypes.data
    assert share_weights(read, source) > 0.95 * weights, "again the same"


def test_a_weight_that_the_file_does_not_hold_as_an_array_has_no_view() -> None:
    source = ModelParts(artifact_of("squeezenet"))
    assert source.weight("no such", np.dtype(np.float32), (1,)) is None
    assert source.array("no such") is None
    name = next(iter(source._weights))
    array = source.array(name)
    assert array is not None and source.weight(name, array.dtype, (*array.shape, 2)) is None
