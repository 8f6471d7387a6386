"""A Ray cluster that is there already, on nodes without Stageloom: joined with its token, or not used."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.planner.cluster.ray_pool import cluster_token
from tests.planner.processes import ROOT, until

_SMALL = ("--num-cpus=1", "--include-dashboard=false", "--object-store-memory=83886080")
_TOKEN = "a-token-of-at-least-some-length-0123456789"
_SEARCH = """
import sys
from stageloom.planner.cluster.ray_pool import RayPool
from stageloom.planner.cluster.interface import search
from stageloom.shared.search.job import SearchJob
if __name__ == "__main__":
    from tests.search.test_compose import choices
    sys.path.remove({root!r})  # Ray would tell its workers of it
    pool = RayPool(1, address={address!r})
    if pool.wait(90.0):
        job = SearchJob(models=tuple(choices()), scheduler="ios")
        print(pool.submit(search, job).result(60) == search(job))
    print(pool.error)
    pool.close()
"""
_RAY = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"


def node_python(folder: Path) -> Path:
    """An interpreter with what is installed here but Stageloom, whose editable install is not inherited."""
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    packages.joinpath("others.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin/python"


@contextlib.contextmanager
def cluster(python: Path) -> Iterator[str]:
    """A head with one processor that asks for a token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state = tempfile.mkdtemp(prefix="ray")  # of pytest's, paths are too long for a socket
    head = subprocess.Popen(
        [python, "-c", _RAY, "start", "--head", "--block", f"--port={port}", f"--temp-dir={state}", *_SMALL],
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN, "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=state,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        until(listens, timeout_s=60.0)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(30)
        shutil.rmtree(state, ignore_errors=True)


def searched(folder: Path, address: str, token: str) -> str:
    """What a planner that joins says: a script of its own, as Ray's workers import from where pytest does."""
    script = folder / "join.py"
    script.write_text(_SEARCH.format(root=str(ROOT), address=address))
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": token},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout


@pytest.mark.promise("ray-cluster-asks-token")
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_cluster_that_has_never_heard_of_stageloom_gets_its_token_and_searches(tmp_path: Path) -> None:
    with cluster(node_python(tmp_path / "node")) as address:
        assert searched(tmp_path, address, _TOKEN) == "True\nNone\n"
        assert "if it has a token, that RAY_AUTH_TOKEN" in searched(tmp_path, address, "another")


@pytest.mark.promise("ray-cluster-asks-token")
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_cluster_whose_nodes_lack_a_package_is_not_used_and_the_package_is_named(tmp_path: Path) -> None:
    python = node_python(tmp_path / "node")
    missing = next(tmp_path.glob("node/lib/python*/site-packages")) / "msgspec.py"
    missing.write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\")\n")
    with cluster(python) as address:
        said = searched(tmp_path, address, _TOKEN)
    assert re.search(
        r"its node [0-9.]+ cannot search: No module named 'msgspec'; see that this machine", said
    )


@pytest.mark.parametrize(
    ("environment", "file", "shown"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"RAY_AUTH_TOKEN": _TOKEN}, False, True),
        ({"RAY_AUTH_TOKEN_PATH": "/run/token"}, False, True),
        ({"RAY_AUTH_TOKEN": ""}, False, False),
    ],
)
def test_a_token_is_shown_to_the_cluster_where_there_is_one(
    environment: dict[str, str], file: bool, shown: bool, tmp_path: Path
) -> None:
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text(_TOKEN)
    assert cluster_token(environment, tmp_path) == ({"RAY_AUTH_MODE": "token"} if shown else {})
