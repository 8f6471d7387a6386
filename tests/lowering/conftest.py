"""One thread computes: on a busy machine the threads of small kernels wait for each other."""

from collections.abc import Iterator

import pytest
import torch

from stageloom.edge_agent.lowering.dtypes import allows_tf32, use_tf32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    """The process has the setting once."""
    before = allows_tf32()
    yield
    use_tf32(before)
