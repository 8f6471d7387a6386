"""Tasks of models with open dimensions or several shapes between client and agent, with a played engine."""

import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.ingest.client_memory import ArenaPool, LayoutPool, kind_of
from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.worker.arena_tasks import ArenaTasks, _ArenaTask, _Layout, write_at_start
from stageloom.edge_agent.worker.messages import AddLayout, RunTask, TaskDone
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import DecodeError, RefusedError, TaskRefused
from stageloom.shared.graph import Tensor
from stageloom.shared.ids import TaskId
from tests.agent.conftest import Hosted, eventually

OPEN = ModelSignature(
    "open",
    (TensorInfo("x", "float32", (4, 8), (1, 2)),),
    (TensorInfo("y", "float32", (4, 8), (1, 2)), TensorInfo("z", "int64", (3,), (3,))),
)


def _pinned(name: str, *shape: int) -> ModelSignature:
    tensor = TensorInfo("x", "float32", shape)
    return ModelSignature(name, (tensor,), (TensorInfo("y", "float32", shape),))


@dataclass
class _Engine:
    """Answers tasks of a played backend, with shapes of its own."""

    hosted: Hosted

    def end(self, number: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        """The task completed; the shapes are those of its outputs, whose places hold 0, 1, 2..."""
        backend, now = self.hosted.backend, time.monotonic()
        eventually(lambda: len(backend.accepted) > number, "the task arrives")
        task = backend.accepted[number]
        _, arena, offset = backend.layouts[task.layout].outputs[0]
        backend.arenas[arena][offset : offset + 128] = np.arange(32, dtype=np.float32).tobytes()
        done = TaskDone(task.task, Outcome.COMPLETED, "", "", now, now, now, shapes=shapes)
        self.hosted.call(lambda: self.hosted.endpoint.task_done(done))


@pytest.mark.promise("open-dimensions")
def test_a_result_has_the_shape_that_the_end_of_its_task_tells(hosted: Hosted) -> None:
    hosted.backend.infos["open"] = OPEN
    engine = _Engine(hosted)
    with Client(hosted.path) as client:
        for number, shape in enumerate([(1, 2), (4, 8), (3, 5), (3, 5)]):
            future = client.submit("open", {"x": np.ones(shape, np.float32)})
            engine.end(number, (shape, (3,)))
            made = future.result(20)
            assert np.array_equal(made["y"], np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
            assert made["z"].shape == (3,)
        command = hosted.backend.layouts[hosted.backend.accepted[2].layout]
        assert command.shapes == ((3, 5),)
        assert len(hosted.backend.layouts) == 3, "equal shapes take turns in one layout"


@pytest.mark.promise("open-dimensions")
def test_an_end_without_shapes_is_no_result(hosted: Hosted) -> None:
    hosted.backend.infos["open"] = OPEN
    with Client(hosted.path) as client:
        future = client.submit("open", {"x": np.ones((2, 2), np.float32)})
        _Engine(hosted).end(0, ())
        with pytest.raises(DecodeError, match="has not said what shapes"):
            future.result(20)


@pytest.mark.promise("open-dimensions")
def test_a_shape_outside_the_ranges_is_refused_with_them(hosted: Hosted) -> None:
    hosted.backend.infos["open"] = OPEN
    with Client(hosted.path) as client:
        for shape in ((5, 8), (1, 1), (2, 2, 2)):
            with pytest.raises(TaskRefused, match=r"input 'x' of 'open' is 1\.\.4x2\.\.8, not") as refused:
                client.run("open", {"x": np.ones(shape, np.float32)}, timeout_s=20)
            assert refused.value.code == "wrong_shape"


@pytest.mark.promise("shape-sets")
def test_a_task_goes_to_the_model_of_its_shape(hosted: Hosted) -> None:
    for name, shape in (("net--1x2", (1, 2)), ("net--1x4", (1, 4))):
        hosted.backend.infos[name] = _pinned(name, *shape)
    engine = _Engine(hosted)
    with Client(hosted.path) as client:
        for number, shape in enumerate([(1, 4), (1, 2)]):
            future = client.submit("net", {"x": np.ones(shape, np.float32)})
            engine.end(number, ())
            assert future.result(20)["y"].shape == shape
            layout = hosted.backend.layouts[hosted.backend.accepted[number].layout]
            assert layout.models == (f"net--1x{shape[1]}",)
        both = client.submit(["net", "echo"], {"x": np.ones((1, 2), np.float32)})
        with pytest.raises(TaskRefused, match="'echo' has no input"):
            both.result(20)
        with pytest.raises(TaskRefused, match=r"'net' does not take x 1x3; it takes .*1x2 or it takes .*1x4"):
            client.submit("net", {"x": np.ones((1, 3), np.float32)})


@pytest.mark.promise("open-dimensions")
def test_an_output_that_is_larger_than_at_import_is_refused_and_nothing_is_written() -> None:
    place = np.zeros((2, 4), np.float32)
    write_at_start(place, np.ones((3, 2), np.float32), "y")
    assert place.reshape(-1).tolist() == [1] * 6 + [0] * 2
    for made in (np.full((9,), 2, np.float32), np.full((2,), 2, np.float64)):
        with pytest.raises(RefusedError, match="output 'y' is"):
            write_at_start(place, made, "y")
    assert 2 not in place


@pytest.mark.promise("open-dimensions")
def test_a_model_that_a_new_plan_pins_or_opens_costs_a_client_at_most_one_result(hosted: Hosted) -> None:
    """The largest shape of an open model is the only one of a pinned model: one layout fits both."""
    pinned = ModelSignature(
        "open",
        (TensorInfo("x", "float32", (4, 8)),),
        (TensorInfo("y", "float32", (4, 8)), TensorInfo("z", "int64", (3,))),
    )
    hosted.backend.infos["open"] = OPEN
    engine, given = _Engine(hosted), {"x": np.ones((4, 8), np.float32)}
    with Client(hosted.path) as client:
        first = client.submit("open", given)
        engine.end(0, ((4, 8), (3,)))
        first.result(20)
        hosted.backend.infos = {"open": pinned}
        stale = client.submit("open", given)
        engine.end(1, ())
        with pytest.raises(DecodeError, match="submit again"):
            stale.result(20)
        for number in (2, 3):
            again = client.submit("open", given)
            engine.end(number, ())
            assert again.result(20)["y"].shape == (4, 8)
        hosted.backend.infos = {"open": OPEN}
        opened = client.submit("open", given)
        engine.end(4, ((2, 5), (3,)))
        assert opened.result(20)["y"].tolist() == np.arange(10.0).reshape(2, 5).tolist()
        small = client.submit("open", {"x": np.ones((1, 2), np.float32)})
        engine.end(5, ((1, 2), (3,)))
        assert small.result(20)["y"].shape == (1, 2)


@pytest.mark.promise("open-dimensions")
def test_what_is_kept_of_shapes_is_bounded_by_idle_layouts() -> None:
    pool = LayoutPool(ArenaPool(1 << 20, 1), lambda message, descriptor: None)
    for rows in range(1, 5):
        for columns in range(2, 9):
            kind = kind_of(("open",), {"x": np.ones((rows, columns), np.float32)})
            pool.give_back(pool.make(kind, (OPEN,)))
            layout = pool.take(kind)
            assert layout is not None and pool.take(kind) is None
            pool.give_back(layout)
    assert len(pool._idle) == 28
    pool.invalidate()
    assert not pool._idle
    pool.close()


class _Arenas:
    """What a task asks of its owner."""

    def __init__(self) -> None:
        self.tasks_in: dict[int, set[TaskId]] = {0: set()}
        self.applications: dict[int, Any] = {}
        self.ends: list[TaskDone] = []

    def report_end(self, done: TaskDone, application: Any, packet: bytes) -> None:
        self.ends.append(done)


@pytest.mark.promise("open-dimensions")
def test_a_running_task_ends_as_its_plan_has_the_model_whatever_plan_its_layout_is_located_for() -> None:
    owner: Any = _Arenas()
    layout = _Layout(AddLayout(1, ("open",), (("x", 0, 0),), (("y", 0, 0),)))
    layout.inputs, layout.outputs, layout.arenas = {"open": {}}, {"open": {"y": np.zeros((4, 8))}}, (0,)
    now = time.monotonic()
    for is_open, made, told in ((True, (2, 3), ((2, 3),)), (False, (4, 8), ())):
        layout.open_models = frozenset(["open"] if is_open else [])
        task = _ArenaTask(owner, layout, RunTask(TaskId(7), 1, 0, None))
        layout.open_models = frozenset([] if is_open else ["open"])
        task.deliver("open", {"y": np.ones(made)})
        task.answer(TaskDone(TaskId(7), Outcome.COMPLETED, "", "", now, now, now))
        assert owner.ends[-1].shapes == told


def test_a_task_that_has_ended_keeps_no_memory_of_its_application_mapped() -> None:
    """The engine's queues may remember the task until others end."""
    owner: Any = _Arenas()
    layout = _Layout(AddLayout(1, ("net",), (("x", 0, 0),), (("y", 0, 0),)))
    layout.inputs, layout.outputs = {"net": {"x": np.zeros(4)}}, {"net": {"y": np.zeros(4)}}
    mapped = [weakref.ref(layout.inputs["net"]["x"]), weakref.ref(layout.outputs["net"]["y"])]
    task = _ArenaTask(owner, layout, RunTask(TaskId(7), 1, 0, None))
    del layout
    running = task.inputs("net")
    task.answer(TaskDone(TaskId(7), Outcome.CANCELLED, "", "", 0.0, None, 0.0))
    assert [one() is None for one in mapped] == [False, True], "a step that was issued goes on reading"
    del running
    assert [one() is None for one in mapped] == [True, True]


@pytest.mark.promise("open-dimensions")
def test_a_layout_that_does_not_fit_a_plan_stays_as_it_was() -> None:
    tasks = ArenaTasks(lambda report: None, lambda *end: None, lambda: None)
    layout = _Layout(AddLayout(1, ("net",), (), ()))
    before = layout.inputs, layout.outputs
    graph = SimpleNamespace(inputs=(0,), outputs=(), tensors=(Tensor("x", "float32", (1,)),), ranges=None)
    model = SimpleNamespace(graph=graph, plan=SimpleNamespace(name="net"), input_bytes=4)
    bound: Any = SimpleNamespace(models=[model], model_index={"net": 0})
    with pytest.raises(RefusedError, match="needs the input 'x'"):
        tasks._locate(layout, bound)
    assert (layout.inputs, layout.outputs) == before and layout.bound is None
    assert layout.inputs is before[0] and layout.outputs is before[1]
