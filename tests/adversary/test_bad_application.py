"""A bad application beside a good one on the same agent: only the bad one is harmed."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.ingest.messages import InputRef
from tests.adversary.applications import RawApplication
from tests.agent.models import ROW_SHAPE, write_tiny
from tests.agent.process import AgentProcess

PICKS = 4096
FAR = 1 << 40
"""An index whose address is in no mapping."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    folder = tmp_path_factory.mktemp("agent")
    models = (
        ModelFile(name="tiny", path=str(write_tiny(folder / "tiny.onnx"))),
        ModelFile(name="picks", path=str(_write_picks(folder / "picks.onnx"))),
    )
    with AgentProcess(folder / "home", models=models, executor="onnx") as agent:
        agent.until_ready()
        yield agent


def _write_picks(path: Path) -> Path:
    """`indices` (int64) of rows of a constant table."""
    table = np.arange(8, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "indices"], ["picked"])],
        "picks",
        [helper.make_tensor_value_info("indices", TensorProto.INT64, (1, PICKS))],
        [helper.make_tensor_value_info("picked", TensorProto.FLOAT, (1, PICKS))],
        [numpy_helper.from_array(table, "table")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _served(client: Client, tasks: int) -> None:
    """The good application's tasks: each is answered with what it should be."""
    given = np.ones(ROW_SHAPE, np.float32)
    wanted = client.run("tiny", {"input": given}, timeout_s=20)["output"]
    for _ in range(tasks):
        assert np.array_equal(client.run("tiny", {"input": given}, timeout_s=20)["output"], wanted)


@pytest.mark.promise("trace-goes-memory-file")
def test_a_trace_into_a_full_pipe_is_refused_at_once_and_the_good_one_is_served(
    agent: AgentProcess,
) -> None:
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    os.set_blocking(pipe, True)
    with RawApplication(agent.socket) as bad, Client(agent.socket) as good:
        bad.ask_for_trace(600.0, pipe)
        reason = bad.traced()
        assert "not a memory file" in reason and "memfd_create" in reason
        _served(good, 20)
    os.close(reader)
    os.close(pipe)


@pytest.mark.promise("trace-goes-memory-file")
def test_indices_that_are_rewritten_while_they_are_read_end_at_worst_their_own_task(
    agent: AgentProcess,
) -> None:
    """A backend checks indices, then reads them again to address memory."""
    engine = agent.now().engine.restarts
    with RawApplication(agent.socket) as bad, Client(agent.socket) as good:
        bad.declare("picks", InputRef("indices", 0, 0, "int64", (1, PICKS)), "picked", 4 * PICKS)
        indices = np.frombuffer(bad.memory, np.int64, PICKS)
        stop = threading.Event()

        def rewrite() -> None:
            while not stop.is_set():
                indices[...] = FAR
                indices[...] = 1

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            outcomes = {bad.run().outcome for _ in range(300)}
            _served(good, 20)
        finally:
            stop.set()
            writer.join()
        assert outcomes <= {"completed", "failed"}
        assert agent.now().engine.restarts == engine
