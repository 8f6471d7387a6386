"""Tasks of models with open dimensions or several shapes between client and agent, with a played engine."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.worker.arena_tasks import write_at_start
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import DecodeError, RefusedError, TaskRefused
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
        with pytest.raises(TaskRefused, match="given to 'echo'"):
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
