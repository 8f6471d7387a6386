"""The process that owns Ray, with a Ray that is none."""

import multiprocessing
import signal
from types import SimpleNamespace

import pytest

from stageloom.planner.cluster import ray_pool


def test_the_planner_hears_that_ray_is_about_to_shut_down_and_does_not_wait_for_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. The planner closes the pool; 2. Ray's shutting down may hang: the pipe has ended before."""
    here, there = multiprocessing.Pipe()
    ended: list[bool] = []

    def shutdown() -> None:
        assert here.recv() is None, "Ray runs"
        assert here.poll(0)
        with pytest.raises(EOFError):
            here.recv()
        ended.append(True)

    def nothing(*_: object) -> None:
        """What is this process's own."""

    monkeypatch.setattr(ray_pool, "os", SimpleNamespace(setsid=nothing, dup2=nothing))
    monkeypatch.setattr(ray_pool, "come_after", nothing)
    monkeypatch.setattr(ray_pool, "signal", SimpleNamespace(**{**vars(signal), "signal": nothing}))
    monkeypatch.setattr(ray_pool, "_start", lambda *_: SimpleNamespace(shutdown=shutdown))
    here.send(None)
    ray_pool.host(there, 1, "")
    assert ended == [True]
    here.close()
