"""Executors for tests that run wherever the agent does, also where a backend's packages are not installed."""

import pytest

from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.shared.errors import ExecutorError


def installed(name: str) -> Executor:
    """A new executor; the test is skipped, with the cause, where its packages are not installed."""
    try:
        return make_executor(name)
    except ExecutorError as error:
        pytest.skip(str(error))
