"""The process that owns Ray, with a Ray that is none."""

import multiprocessing
import os
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


def _aborts(*_: object) -> None:
    """As Ray does where the sockets of its node are out of sight."""
    os._exit(134)


@pytest.mark.parametrize(("address", "told"), [("10.0.0.7:6379", True), ("", False)])
def test_a_ray_that_aborts_while_joining_a_cluster_tells_what_the_planners_node_needs(
    monkeypatch: pytest.MonkeyPatch, address: str, told: bool
) -> None:
    monkeypatch.setattr(ray_pool, "host", _aborts)
    pool = ray_pool.RayPool(address=address)
    assert not pool.wait(60.0)
    said = str(pool.error)
    assert "ended with code 134" in said
    assert (f"ray start --address {address} " in said and "--temp-dir=/var/lib/stageloom/ray" in said) is told
    pool.close()
