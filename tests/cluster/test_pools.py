"""One contract for every pool of search workers; Ray starts once for this module."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import ClassVar

import pytest

from stageloom.planner.cluster import search_pool
from stageloom.planner.cluster.interface import SearchFuture, SearchPool, WorkersGone, search
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.planner.cluster.ray_pool import RayPool
from stageloom.planner.cluster.search_pool import AnytimePool
from stageloom.shared.errors import ExecutorError, PlanError, StageloomError, UnavailableError
from stageloom.shared.search.job import SearchJob
from tests.cluster.listening import (
    IPV4_LOOPBACK,
    IPV6_LOOPBACK,
    MAPPED_LOOPBACK,
    descendants,
    listening_addresses,
)
from tests.cluster.work import add, busy, die, refuse, threads_around_numpy
from tests.planner.processes import ROOT, until
from tests.search.test_compose import choices

START_S = 100.0


@pytest.fixture(scope="module")
def ray_pool() -> Iterator[RayPool]:
    """A local Ray, wherever the environment says that another one is."""
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        pool = RayPool(1)
        assert threading.active_count() == before + 1, "it starts in the background"
        assert pool.wait(START_S), pool.error
    yield pool
    pool.close()


@pytest.fixture(params=["processes", "ray"])
def pool(request: pytest.FixtureRequest) -> Iterator[SearchPool]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_pool")
    else:
        made = ProcessPool(2)
        yield made
        made.close()


@pytest.mark.timeout(180)
def test_results_and_errors_come_back_as_they_are(pool: SearchPool) -> None:
    futures = [pool.submit(add, n, 1) for n in range(4)]
    wait(futures, timeout=60)
    assert [future.result() for future in futures] == [1, 2, 3, 4]
    with pytest.raises(PlanError, match="no such plan; make another"):
        pool.submit(refuse).result(60)


def test_a_worker_that_dies_is_an_error_and_the_pool_goes_on(pool: SearchPool) -> None:
    with pytest.raises(UnavailableError):
        pool.submit(die).result(60)
    assert pool.submit(add, 1, 1).result(60) == 2


def test_cancelling_stops_a_function_that_runs_and_frees_its_worker(pool: SearchPool, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    future = pool.submit(busy, str(started), str(ended))
    until(lambda: started.exists() and started.read_text())
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(0)
    assert pool.submit(add, 20, 3).result(60) == 23, "with one worker, only after the first has stopped"
    assert not ended.exists()


@pytest.mark.promise("search-plan-wherever-runs")
def test_a_search_is_the_same_plan_wherever_it_runs(pool: SearchPool) -> None:
    job = SearchJob(models=tuple(choices()), scheduler="ios")
    assert pool.submit(search, pickle.loads(pickle.dumps(job))).result(60) == search(job)


@pytest.mark.promise("search-plan-wherever-runs")
@pytest.mark.more
def test_a_local_ray_listens_on_loopback_only(ray_pool: RayPool) -> None:
    ray_pool.submit(add, 1, 1).result(60)
    ours = descendants(os.getpid())
    assert len(ours) > 3, "Ray's processes are children of this one's"
    listening = {address for pid in ours for address in listening_addresses(pid)}
    assert listening and listening <= {IPV4_LOOPBACK, MAPPED_LOOPBACK, IPV6_LOOPBACK}


@pytest.mark.promise("search-process-goes-next")
def test_a_process_goes_on_with_the_next_function_and_ends_when_it_has_nothing_to_do() -> None:
    pool = ProcessPool(1, idle_s=0.5)
    first = pool.submit(os.getpid).result(60)
    assert pool.submit(os.getpid).result(60) == first
    until(lambda: not Path("/proc", str(first)).exists())
    assert pool.submit(os.getpid).result(60) != first
    pool.close()


def test_a_search_computes_on_the_one_core_that_it_is_given(pool: SearchPool) -> None:
    """Threads of numpy's on cores that other searches have only wait for each other."""
    before, after = pool.submit(threads_around_numpy).result(60)
    assert after == before


def test_a_closed_pool_refuses_and_leaves_no_process(tmp_path: Path) -> None:
    pool = ProcessPool(1)
    started = tmp_path / "started"
    running, waiting = pool.submit(busy, str(started), str(tmp_path / "ended")), pool.submit(add, 1, 1)
    until(lambda: started.exists() and started.read_text())
    pool.close()
    assert running.cancelled() and waiting.cancelled()
    assert not Path("/proc", started.read_text()).exists()
    with pytest.raises(UnavailableError):
        pool.submit(add, 1, 1).result(0)


def test_a_ray_that_cannot_be_reached_says_why_and_what_to_do() -> None:
    code = """
from stageloom.planner.cluster.interface import search
from stageloom.planner.cluster.ray_pool import RayPool
pool = RayPool(1, address="127.0.0.1:9", failed=print)
pool.wait(90)
pool.close()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, check=True)
    assert "the Ray cluster at 127.0.0.1:9 cannot be reached: " in done.stdout
    assert "; check --ray-address" in done.stdout


class StuckRay:
    """A Ray that is starting, for ever, until it is said to run or to have failed."""

    made: ClassVar[list["StuckRay"]] = []
    ready = False

    def __init__(self, workers: int, *, address: str = "", failed: Callable[[StageloomError], None]) -> None:
        self.address, self.failed = address, failed
        self.made.append(self)

    def submit(self, function: Callable[..., object], *arguments: object) -> SearchFuture[object]:
        """It runs on and on."""
        self.running: SearchFuture[object] = SearchFuture()
        return self.running

    def gone(self) -> None:
        """As when the cluster is shut down."""
        self.ready, error = False, WorkersGone("the process that owns Ray ended with code 1")
        self.running.fail(error)
        self.failed(error)

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[StuckRay]:
    """Every Ray that was started, none of which is one."""
    monkeypatch.setattr(search_pool, "RayPool", StuckRay)
    monkeypatch.setattr(StuckRay, "made", [])
    return StuckRay.made


def test_ray_starts_with_the_first_search_which_does_not_wait_for_it(
    stuck: list[StuckRay], caplog: pytest.LogCaptureFixture
) -> None:
    pool = AnytimePool(1)
    assert not stuck
    assert pool.submit(add, 2, 2).result(60) == 4
    (ray,) = stuck
    ray.failed(UnavailableError("a local Ray does not start: no memory", remedy="see its log"))
    assert "searches run in processes of this machine, since a local Ray does not start" in caplog.text
    assert pool.where == "processes"
    pool.close()


@pytest.mark.promise("ray-cluster-asks-token")
def test_a_search_starts_again_in_a_process_if_ray_goes_away_under_it(stuck: list[StuckRay]) -> None:
    pool = AnytimePool(1, ray_address="10.0.0.1:6379")
    (ray,) = stuck
    ray.ready = True
    future = pool.submit(add, 2, 3)
    assert pool.where == "ray"
    assert not future.done()
    ray.gone()
    assert future.result(60) == 5
    pool.close()


def test_a_search_that_was_cancelled_does_not_start_again(stuck: list[StuckRay], tmp_path: Path) -> None:
    pool = AnytimePool(1, ray_address="10.0.0.1:6379")
    (ray,) = stuck
    ray.ready = True
    future = pool.submit(busy, str(tmp_path / "started"), str(tmp_path / "ended"))
    assert future.cancel()
    assert ray.running.cancelled()
    ray.gone()
    assert pool.submit(add, 1, 1).result(60) == 2, "the one worker is free"
    assert not (tmp_path / "started").exists()
    pool.close()


def test_a_search_that_started_again_can_be_cancelled(stuck: list[StuckRay], tmp_path: Path) -> None:
    pool = AnytimePool(1, ray_address="10.0.0.1:6379")
    (ray,) = stuck
    ray.ready = True
    started = tmp_path / "started"
    future = pool.submit(busy, str(started), str(tmp_path / "ended"))
    ray.gone()
    until(lambda: started.exists() and started.read_text())
    assert future.cancel()
    assert pool.submit(add, 1, 1).result(60) == 2
    pool.close()


@pytest.mark.promise("ray-cluster-asks-token")
def test_ray_is_tried_again_by_a_search_that_comes_a_minute_after_it_went_away(stuck: list[StuckRay]) -> None:
    clock = [100.0]
    pool = AnytimePool(1, ray_address="10.0.0.1:6379", now_s=lambda: clock[0])
    stuck[0].failed(UnavailableError("the Ray cluster at 10.0.0.1:6379 cannot be reached"))
    for now_s, started in ((159.0, 1), (161.0, 2), (1000.0, 2)):
        clock[0] = now_s
        assert pool.submit(add, 1, 1).result(60) == 2
        assert len(stuck) == started, now_s
    stuck[1].failed(ExecutorError("ray cannot be imported", remedy="install it"))
    clock[0] = 2000.0
    assert pool.submit(add, 1, 1).result(60) == 2
    assert len(stuck) == 2, "it will not be installed meanwhile"
    pool.close()


def test_ray_is_joined_at_once_where_named_and_never_started_where_off(stuck: list[StuckRay]) -> None:
    AnytimePool(1, ray_address="10.0.0.1:6379").close()
    assert [one.address for one in stuck] == ["10.0.0.1:6379"]
    off = AnytimePool(1, use_ray=False)
    assert off.submit(add, 1, 2).result(60) == 3
    off.close()
    assert len(stuck) == 1
