"""One agent for all tests of a module, and a client over each transport."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stageloom import Client
from tests.agent.process import AgentProcess
from tests.serving.served import Triton, serving_agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    with serving_agent(tmp_path_factory.mktemp("serving")) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def triton(agent: AgentProcess, request: pytest.FixtureRequest) -> Iterator[Triton]:
    serving = agent.now().serving
    assert serving is not None
    client = Triton(request.param, getattr(serving, request.param))
    yield client
    client.close()


@pytest.fixture(scope="module")
def native(agent: AgentProcess) -> Iterator[Client]:
    with Client(agent.socket) as client:
        yield client


@pytest.fixture
def shm_file() -> Iterator[Path]:
    """A name of a file of shared memory that is removed afterwards."""
    path = Path("/dev/shm") / f"stageloom-test-{np.random.default_rng().integers(2**60)}"
    yield path
    path.unlink(missing_ok=True)
