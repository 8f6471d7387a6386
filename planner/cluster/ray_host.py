"""The process that owns Ray. Only here is Ray imported.

It is a process of its own since a Ray driver whose cluster goes away ends its process, whatever that serves
beside. Its main thread starts Ray, since Ray's own processes die with the thread that started them (Linux,
PR_SET_PDEATHSIG). When the planner goes, however it goes, the pipe ends, and so do Ray and this process.

A local Ray listens on the loopback interface only: Ray binds to the address of its node, and asks the network
for that address unless `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` says that nobody else is to reach it. Its token is
made here; by itself Ray would write one into the home directory, which a service may not have.

A cluster is sent this code, so that its nodes need what it imports, but not Stageloom. This machine must be
one of them: a Ray driver talks to the cluster through its own node.
"""

import importlib
import logging
import os
import pickle
import secrets
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from stageloom import shared
from stageloom.planner.cluster.interface import WorkersGone
from stageloom.shared.errors import ExecutorError, StageloomError, UnavailableError

OBJECT_STORE_BYTES: Final = 80 << 20  # Ray takes no less than 75 MiB; a search job is a few hundred KiB
_REACH_S: Final = 5.0
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TQDM_PATCH_PRINT": "0",
}
_LOOPBACK: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray waits for a cluster that went away before it ends its process; meanwhile searches wait, too.
_PATIENCE: Final = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
_ABLE_S: Final = 60.0  # for the first import of this code on a node
_TOKEN_VARIABLES: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a pickled (function, arguments)."""

    task: int
    work: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a task."""

    task: int


@dataclass(frozen=True, slots=True)
class Running:
    """Ray runs."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Ray does not run."""

    error: StageloomError


@dataclass(frozen=True, slots=True)
class Ended:
    """A task ended: with its result, or the exception that it raised."""

    task: int
    ok: bool
    value: Any


class _Unreachable(UnavailableError):
    """Nothing listens at the cluster's address."""


def host(pipe: Connection, workers: int, address: str) -> None:
    """Start Ray, say so, and run tasks until None comes or the pipe ends."""
    os.setsid()  # Ctrl-C at the planner's terminal is the planner's; SIGINT is how Ray cancels a task
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(5)  # serving comes first
    os.dup2(2, 1)  # Ray says what it says on stdout, which is for the planner's data
    try:
        ray = _start(workers, address)
    except (ExecutorError, _Unreachable) as error:
        pipe.send(Broken(error))
        return
    except Exception as error:
        pipe.send(Broken(_no_cluster(address, error) if address else _no_local(error)))
        return
    pipe.send(Running())
    _Tasks(ray, pipe).serve()
    pipe.close()  # the planner waits for this process from here on, and not for ever
    ray.shutdown()


def _no_local(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"a local Ray does not start: {_line(error)}", remedy="see /tmp/ray/session_latest/logs"
    )


def _no_cluster(address: str, error: Exception) -> UnavailableError:
    remedy = (
        f"see that this machine is a node of it (`ray start --address {address} --num-cpus 0`), that Ray and "
        "Python are the same there, and, if it has a token, that RAY_AUTH_TOKEN or ~/.ray/auth_token has it"
    )
    return UnavailableError(f"the Ray cluster at {address} cannot be used: {_line(error)}", remedy=remedy)


def _start(workers: int, address: str) -> Any:
    ours = _PATIENCE | cluster_token(os.environ, Path.home()) if address else _LOOPBACK
    for name, value in (_ENVIRONMENT | ours).items():
        os.environ.setdefault(name, value)
    if not address:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    else:
        _require_reachable(address)  # Ray itself tries for minutes, then ends the process
    ray = _imported()
    logging.getLogger("ray").setLevel(logging.WARNING)
    common: dict[str, Any] = {"log_to_driver": False, "namespace": "stageloom", "configure_logging": False}
    if address:
        ray.init(address=address, runtime_env={"py_modules": _our_code()}, **common)
        _require_able(ray)
    else:
        ray.init(
            num_cpus=workers,
            num_gpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **common,
        )
    return ray


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        remedy = "install it with `pip install 'stageloom[planner]'`"
        raise ExecutorError(f"ray cannot be imported: {_line(error)}", remedy=remedy) from error
    return ray


def cluster_token(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """What to set so that a cluster gets its token, if one is at hand. A cluster without tokens ignores it.

    By itself Ray shows a token to a cluster that it found on its own machine, but to none that it is named.
    """
    in_home = os.access(home / ".ray/auth_token", os.R_OK)  # of a service's home, even this may be forbidden
    has_token = in_home or any(environment.get(name) for name in _TOKEN_VARIABLES)
    return {"RAY_AUTH_MODE": "token"} if has_token else {}


def _our_code() -> list[str]:
    """The package that a search imports."""
    return [str(Path(shared.__file__).absolute().parents[1])]


def _require_able(ray: Any) -> None:
    """Every node that a search may come to must have what it imports."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise UnavailableError("none of its nodes has a processor for searches")
    probe = ray.remote(num_cpus=0, max_retries=0)(lacking)
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [probe.options(scheduling_strategy=one).remote() for one in there]
    for node, answer in zip(nodes, answers, strict=True):
        if problem := ray.get(answer, timeout=_ABLE_S):
            raise UnavailableError(f"its node {node['NodeManagerAddress']} cannot search: {problem}")


def lacking() -> str:
    """On a node: what keeps it from importing what a search imports; empty where nothing does."""
    try:
        for module in ("stageloom.planner.cluster.run", "stageloom.planner.contest.task", "numba"):
            importlib.import_module(module)
    except ImportError as error:
        return _line(error)
    return ""


def _require_reachable(address: str) -> None:
    name, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((name, int(port)), _REACH_S):
            pass
    except (OSError, ValueError) as error:
        text = f"the Ray cluster at {address} cannot be reached: {_line(error)}"
        raise _Unreachable(text, remedy="check --ray-address") from error


class _Tasks:
    """Tasks under way, by number."""

    def __init__(self, ray: Any, pipe: Connection) -> None:
        self._ray = ray
        self._pipe = pipe
        self._sending = threading.Lock()  # results arrive on Ray's own thread
        self._references: dict[int, Any] = {}
        self._remote: dict[Any, Any] = {}  # Ray keeps every remote function that was ever made

    def serve(self) -> None:
        """Take messages until the planner closes the pipe."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                return
            if message is None:
                return
            if isinstance(message, Cancel):
                reference = self._references.get(message.task)
                if reference is not None:
                    self._ray.cancel(reference, force=False)
            elif isinstance(message, Submit):
                self._submit(message)

    def _submit(self, message: Submit) -> None:
        try:
            function, arguments = pickle.loads(message.work)  # from the planner, never from a device
            if function not in self._remote:
                # One try: a task that dies of memory takes its machine along if it is started again.
                self._remote[function] = self._ray.remote(max_retries=0, num_cpus=1)(function)
            reference = self._remote[function].remote(*arguments)
        except Exception as error:
            failed = UnavailableError(f"Ray takes no task: {_line(error)}")
            self._send(Ended(message.task, False, failed))
            return
        self._references[message.task] = reference
        reference.future().add_done_callback(lambda done: self._done(message.task, done))

    def _done(self, task: int, done: Any) -> None:
        self._references.pop(task, None)
        try:
            ended = Ended(task, True, done.result())
        except Exception as error:
            cause = getattr(error, "cause", None)
            if isinstance(error, self._ray.exceptions.NodeDiedError):
                cause = WorkersGone(_line(error))
            elif not isinstance(cause, StageloomError):
                cause = UnavailableError(f"a search on Ray ended without an answer: {_line(error)}")
            ended = Ended(task, False, cause)
        self._send(ended)

    def _send(self, ended: Ended) -> None:
        with self._sending:
            try:
                self._pipe.send(ended)
            except OSError:
                pass  # the planner has gone: nobody waits for it


def _line(error: BaseException) -> str:
    """What it says, in one line; of a task's error the last one, since the traceback comes first."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if hasattr(error, "cause") else 0].strip()[:200] or type(error).__name__
