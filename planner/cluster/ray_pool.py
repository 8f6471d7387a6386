"""Searches as Ray tasks, through a process that owns Ray. Ray is imported only there.

A process of its own, since a Ray driver whose cluster goes away ends its process, and whatever that process
serves. Its main thread starts Ray: Ray's own processes die with the thread that started them (Linux,
PR_SET_PDEATHSIG). When the planner ends, however it ends, the pipe ends, and so do Ray and this process.

A local Ray listens on the loopback interface only. Ray binds to the address of its node, and asks the network
for that address unless `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` is set. The planner makes the token; Ray alone
would write one into the home directory, which a service may not have.

A cluster is sent this code, so its nodes need the packages that the code imports, but not Stageloom. There it
lies in another place than anywhere before, so each node compiles the twin's kernels, behind all else that it
does; until then searches simulate slowly there. This machine must be a node of the cluster: a Ray driver
talks to the cluster through its own node.

Over the pipe the planner sends `(task, pickled function and arguments)`, `(task, None)` to cancel, and None
to end. The process sends None once Ray runs, or the error, and `(task, succeeded, result or error)`.
"""

import importlib
import logging
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from stageloom import shared
from stageloom.planner.cluster.interface import SearchFuture, WorkersGone
from stageloom.planner.cluster.priority import BEHIND_SERVING, come_after
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.shared.errors import ExecutorError, StageloomError, UnavailableError

T = TypeVar("T")

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
_END_S: Final = 15.0  # that Ray may take to shut down

_Order: TypeAlias = tuple[int, bytes | None]
_Ended: TypeAlias = tuple[int, bool, Any]


class RayPool:
    """Ray from `__init__`, which returns at once, to `close`; implements `SearchPool` once `ready`."""

    where = "ray"

    def __init__(
        self,
        workers: int = 1,
        *,
        address: str = "",
        failed: Callable[[StageloomError], None] = lambda error: None,
    ) -> None:
        """Start a local Ray, or with an `address` join the cluster there.

        `failed` is told, on a thread of this pool, why Ray does not run, or runs no more.
        """
        self.workers = workers
        self._address = address
        self._failed = failed
        self._lock = threading.Lock()
        self._open: dict[int, SearchFuture[Any]] = {}
        self._numbers = count(1)
        self._state = threading.Condition()
        self._running = self._over = self._closing = False
        self._error: StageloomError | None = None
        self._pipe: Connection | None = None
        self._process: SpawnProcess | None = None
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether tasks may be submitted."""
        return self._running and not self._over

    @property
    def error(self) -> StageloomError | None:
        """Why Ray does not run, with the remedy."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait until Ray runs or has failed; whether it runs."""
        with self._state:
            self._state.wait_for(lambda: self._running or self._over, timeout_s)
        return self.ready

    def submit(self, function: Callable[..., T], *arguments: Any) -> "SearchFuture[T]":
        future: SearchFuture[T] = SearchFuture()
        task = next(self._numbers)
        work = pickle.dumps((function, arguments))
        with self._lock:
            if self._pipe is None or not self.ready:
                future.fail(self._error or UnavailableError("Ray does not run"))
                return future
            self._open[task] = future
            future.stop = lambda: self._cancel(task)
            self._send((task, work))
        return future

    def close(self) -> None:
        with self._lock:
            self._closing = True
            waiting = list(self._open.values())
        for future in waiting:
            future.cancel()
        with self._lock:
            if self._process is not None:
                if self._running:
                    self._send(None)
                else:
                    self._process.terminate()  # it starts Ray, whose processes end with it
        self._thread.join()

    def _cancel(self, task: int) -> None:
        with self._lock:
            self._open.pop(task, None)
            self._send((task, None))

    def _send(self, message: _Order | None) -> None:
        """To the host, under the lock. One that has just gone fails every open task in `_run`."""
        try:
            if self._pipe is not None:
                self._pipe.send(message)
        except OSError:
            pass

    # -- the thread that listens to the host ----------------------------------------------------------------

    def _run(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=host, args=(there, self.workers, self._address), name="ray-host", daemon=True
        )
        try:
            process.start()
        except Exception as error:
            self._end(UnavailableError(f"the process for Ray does not start: {error}"))
            return
        finally:
            there.close()
        with self._lock:
            self._pipe, self._process = here, process
            if self._closing:
                process.terminate()
        self._listen(here)
        process.join(_END_S)
        process.kill()
        process.join()
        if self._running and self._address:
            self._end(WorkersGone(f"the Ray cluster at {self._address} went away"))
        else:  # Ray aborts a driver that does not find its node
            gone = f"the process that owns Ray ended with code {process.exitcode}"
            self._end(WorkersGone(gone, remedy=_as_a_node(self._address) if self._address else ""))

    def _listen(self, pipe: Connection) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                return
            if message is None:
                with self._state:
                    self._running = True
                    self._state.notify_all()
            elif isinstance(message, StageloomError):
                self._error = message
            else:
                self._settle(*message)

    def _settle(self, task: int, ok: bool, value: Any) -> None:
        with self._lock:
            future = self._open.pop(task, None)
        if future is None:
            return  # it was cancelled
        future.settle(value) if ok else future.fail(value)

    def _end(self, error: StageloomError) -> None:
        """Ray is gone: fail what is open, and say why unless it was closed on purpose."""
        with self._lock:
            self._error = self._error or error
            waiting, self._open = list(self._open.values()), {}
            closing = self._closing
            self._over = True  # under the lock: nothing may be submitted once what is open was taken
        with self._state:
            self._state.notify_all()
        for future in waiting:
            future.fail(self._error)
        if not closing:
            self._failed(self._error)


# -- the process that owns Ray ------------------------------------------------------------------------------


class _Unreachable(UnavailableError):
    """Nothing listens at the cluster's address."""


def host(pipe: Connection, workers: int, address: str) -> None:
    """Start Ray, say so, and run tasks until None comes or the pipe ends."""
    os.setsid()  # Ctrl-C at the planner's terminal is the planner's; SIGINT is how Ray cancels a task
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    come_after(BEHIND_SERVING)
    os.dup2(2, 1)  # Ray says what it says on stdout, which is for the planner's data
    try:
        ray = _start(workers, address)
    except (ExecutorError, _Unreachable) as error:
        pipe.send(error)
        return
    except Exception as error:
        pipe.send(_no_cluster(address, error) if address else _no_local(error))
        return
    pipe.send(None)
    _Tasks(ray, pipe).serve()
    pipe.close()  # the planner waits for this process from here on, and not for ever
    ray.shutdown()


def _no_local(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"a local Ray does not start: {_line(error)}", remedy="see /tmp/ray/session_latest/logs"
    )


def _no_cluster(address: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"the Ray cluster at {address} cannot be used: {_line(error)}", remedy=_as_a_node(address)
    )


def _as_a_node(address: str) -> str:
    """What a planner needs to join a cluster. Its unit has a /tmp of its own, and Ray keeps sockets there."""
    return (
        f"see that this machine is a node of it (`ray start --address {address} --num-cpus 0`; for a planner "
        "that is a service, as its account and with --temp-dir=/var/lib/stageloom/ray), that Ray and Python "
        "are the same there, and, if it has a token, that RAY_AUTH_TOKEN or ~/.ray/auth_token has it"
    )


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
            address="local",  # else Ray joins whatever RAY_ADDRESS or a file of its own names, or fails
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
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]

    def on_each(function: Callable[[], Any]) -> list[Any]:
        remote = ray.remote(num_cpus=0, max_retries=0)(function)
        return [remote.options(scheduling_strategy=one).remote() for one in there]

    for node, answer in zip(nodes, on_each(lacking), strict=True):
        if problem := ray.get(answer, timeout=_ABLE_S):
            raise UnavailableError(f"its node {node['NodeManagerAddress']} cannot search: {problem}")
    on_each(compile_here)  # nobody waits for it


def lacking() -> str:
    """On a node: what keeps it from importing what a search imports; empty where nothing does."""
    try:
        for module in (
            "stageloom.planner.cluster.interface",
            "stageloom.planner.tournament.evaluator",
            "numba",
        ):
            importlib.import_module(module)
    except ImportError as error:
        return _line(error)
    return ""


def compile_here() -> None:
    """On a node: compile the twin's kernels where that was not done.

    In a process of its own, which may come after all others; this one is Ray's, and searches next.
    """
    from stageloom.planner.twin.compiled import compile_ahead
    from stageloom.planner.twin.compiled.compile_cache import is_compiled

    if not is_compiled():
        pool = ProcessPool(1)
        try:
            pool.submit(compile_ahead).result()
        finally:
            pool.close()


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
            task, work = message
            if work is not None:
                self._submit(task, work)
            elif (reference := self._references.get(task)) is not None:
                self._ray.cancel(reference, force=False)

    def _submit(self, task: int, work: bytes) -> None:
        try:
            function, arguments = pickle.loads(work)  # from the planner, never from a device
            if function not in self._remote:
                # One try: a task that dies of memory takes its machine along if it is started again.
                self._remote[function] = self._ray.remote(
                    max_retries=0, num_cpus=1, scheduling_strategy="SPREAD"
                )(function)  # by default Ray fills a node before it starts a worker on the next
            reference = self._remote[function].remote(*arguments)
        except Exception as error:
            self._send((task, False, UnavailableError(f"Ray takes no task: {_line(error)}")))
            return
        self._references[task] = reference
        reference.future().add_done_callback(lambda done: self._done(task, done))

    def _done(self, task: int, done: Any) -> None:
        self._references.pop(task, None)
        try:
            ended: _Ended = task, True, done.result()
        except Exception as error:
            cause = getattr(error, "cause", None)
            if isinstance(error, self._ray.exceptions.NodeDiedError):
                cause = WorkersGone(_line(error))
            elif not isinstance(cause, StageloomError):
                cause = UnavailableError(f"a search on Ray ended without an answer: {_line(error)}")
            ended = task, False, cause
        self._send(ended)

    def _send(self, ended: _Ended) -> None:
        with self._sending:
            try:
                self._pipe.send(ended)
            except OSError:
                pass  # the planner has gone: nobody waits for it


def _line(error: BaseException) -> str:
    """What it says, in one line; of a task's error the last one, since the traceback comes first."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if hasattr(error, "cause") else 0].strip()[:200] or type(error).__name__
