"""Servers as contestants of `benchmarks.slo`: started in a process group, asked over their own protocols."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageloom.edge_agent.bench.contestant import Contestant, Ended, TimedTask
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.stageloom_contestant import model_files
from stageloom.edge_agent.config import AgentConfig, encode_config
from stageloom.edge_agent.executor_choice import TIMES_NAME
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.reporting.status import ask_status
from stageloom.edge_agent.serving.datatypes import PROTOCOL_NAMES
from stageloom.edge_agent.serving.settings import ServingSettings
from stageloom.shared.errors import UnavailableError

STAGELOOM: Final = "stageloom"
_SERVERS: Final = Path(__file__).with_name("servers")
_START_S: Final = 240.0
_POLL_S: Final = 0.1
_STOP_S: Final = 10.0
_SUSPENDED_S: Final = 86_400.0
_CONNECTIONS: Final = 32


@dataclass(frozen=True)
class ServerSetting:
    """One way of running a server; the numbers are a rival's, Stageloom chooses for itself."""

    name: str
    server: str  # a key of `environments.SERVERS`, or STAGELOOM
    python: str = sys.executable
    workers: int = 0
    threads: int = 0
    latest_s: float = 0.0  # the longest deadline of any model
    times_folder: str = ""  # where agents leave what they measured, and find it

    @property
    def measures(self) -> bool:
        return self.server == STAGELOOM

    def make(self, models: Sequence[ModelUnderTest]) -> Contestant:
        """The server and a client, not started."""
        kinds = {STAGELOOM: AgentServer, "mlserver": MlServer, "litserve": LitServer}
        return kinds[self.server](models, self)


class _Server:
    """A server process in a folder of its own."""

    def __init__(self, models: Sequence[ModelUnderTest], setting: ServerSetting) -> None:
        self.models, self.setting = models, setting
        self.folder = Path(tempfile.mkdtemp(prefix="stageloom-server-"))
        self.ended: Ended = lambda task, completed: None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ended: Ended) -> None:
        """Start it, and connect once it serves all models.

        Raises:
            UnavailableError: it ended, or did not serve in time.
        """
        self.ended = ended
        command = self.command()
        with (self.folder / "log").open("wb") as log:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_SERVERS), *_import_path()])}
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        until_s = time.monotonic() + _START_S
        while not self.connected():
            if time.monotonic() > until_s or self._process.poll() is not None:
                lines = (self.folder / "log").read_text(errors="replace").splitlines() or ["it said nothing"]
                raise UnavailableError(f"{self.setting.name} does not serve: {lines[-1]}")
            time.sleep(_POLL_S)

    def command(self) -> list[str]:
        """That starts it; called once."""
        raise NotImplementedError

    def connected(self) -> bool:
        """Whether it serves; then tasks can be submitted."""
        raise NotImplementedError

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Ask, without waiting."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class _GrpcServer(_Server):
    """A server that speaks the Open Inference Protocol over gRPC."""

    address = ""
    deadlines = False  # whether it takes them

    def connected(self) -> bool:
        import tritonclient.grpc
        from tritonclient.utils import InferenceServerException

        if not self._is_served():
            return False
        self._module: Any = tritonclient.grpc
        self._client = tritonclient.grpc.InferenceServerClient(self.address)
        try:
            return all(self._client.is_model_ready(model.name) for model in self.models)
        except InferenceServerException:
            return False

    def _is_served(self) -> bool:
        return True

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Ask, with a deadline if the task has one; who runs out of time is given up."""
        left_s = task.due_s - time.monotonic()
        if left_s <= 0.0:
            self.ended(task, False)
            return
        inputs = []
        for name, array in feeds.items():
            given = self._module.InferInput(name, array.shape, PROTOCOL_NAMES[array.dtype.name])
            inputs.append(given.set_data_from_numpy(array))
        bounded: dict[str, Any] = {}
        if left_s < _SUSPENDED_S:
            bounded = {"timeout": max(int(left_s * 1e6), 1)} if self.deadlines else {"client_timeout": left_s}
        name = self.models[task.model].name
        self._client.async_infer(name, inputs, self._done(task), **bounded)

    def _done(self, task: TimedTask) -> Callable[[Any, Any], None]:
        return lambda result, error: self.ended(task, error is None)


class AgentServer(_GrpcServer):
    """Stageloom's agent with the plan that it makes itself, over gRPC."""

    deadlines = True

    def command(self) -> list[str]:
        times = Path(self.setting.times_folder, TIMES_NAME)
        if self.setting.times_folder and times.exists():
            shutil.copy(times, self.folder / TIMES_NAME)
        config = AgentConfig(
            home=str(self.folder),
            models=model_files(self.models),
            silent_engine_s=_SUSPENDED_S,  # it is suspended together with its engine
            alarms=False,
            serving=ServingSettings(grpc="127.0.0.1:0"),
        )
        return [sys.executable, "-m", "stageloom.edge_agent.run", encode_config(config)]

    def _is_served(self) -> bool:
        try:
            status = ask_status(socket_of(self.folder))
        except UnavailableError:
            return False
        if not status.ready or status.measuring or status.trial is not None or status.serving is None:
            return False
        self.address = status.serving.grpc
        found = self.folder / TIMES_NAME
        if self.address and self.setting.times_folder and found.exists():
            shutil.copy(found, self.setting.times_folder)
        return bool(self.address)


class MlServer(_GrpcServer):
    """MLServer with so many worker processes, which share its models' requests."""

    def command(self) -> list[str]:
        http_port, grpc_port, metrics_port = _free_ports(3)
        self.address = f"127.0.0.1:{grpc_port}"
        settings = {
            "host": "127.0.0.1",
            "http_port": http_port,
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "parallel_workers": self.setting.workers,
            "grpc_max_message_length": 1 << 30,
            "debug": False,
        }
        (self.folder / "settings.json").write_text(json.dumps(settings))
        for model in self.models:
            about = {
                "name": model.name,
                "implementation": "mlserver_runtime.OnnxModel",
                "parameters": {"uri": str(model.path.resolve()), "extra": {"threads": self.setting.threads}},
            }
            (self.folder / model.name).mkdir()
            (self.folder / model.name / "model-settings.json").write_text(json.dumps(about))
        return [str(Path(self.setting.python).with_name("mlserver")), "start", str(self.folder)]


class LitServer(_Server):
    """LitServe with so many workers, all models in each, over HTTP: it has no gRPC."""

    def __init__(self, models: Sequence[ModelUnderTest], setting: ServerSetting) -> None:
        super().__init__(models, setting)
        self.port = 0
        self._pool = ThreadPoolExecutor(_CONNECTIONS)
        self._idle: deque[http.client.HTTPConnection] = deque()

    def command(self) -> list[str]:
        (self.port,) = _free_ports(1)
        settings = {
            "port": self.port,
            "workers": self.setting.workers,
            "threads": self.setting.threads,
            "latest_s": self.setting.latest_s,
            "models": {model.name: str(model.path.resolve()) for model in self.models},
        }
        script = "import sys; from litserve_server import serve; serve(sys.argv[1])"
        return [self.setting.python, "-c", script, json.dumps(settings)]

    def connected(self) -> bool:
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        with contextlib.closing(asked):
            try:
                asked.request("GET", "/health")
                return asked.getresponse().status == 200
            except OSError:
                return False

    def submit(self, task: TimedTask, feeds: Feeds) -> None:
        """Ask in a thread, over a connection that is kept."""
        self._pool.submit(self._ask, task, feeds)

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for connection in self._idle:
            connection.close()
        super().stop()

    def _ask(self, task: TimedTask, feeds: Feeds) -> None:
        if task.expired:
            self.ended(task, False)
            return
        inputs = [(name, array.dtype.str, array.shape) for name, array in feeds.items()]
        head = json.dumps([self.models[task.model].name, inputs]).encode()
        body = b"".join([head, b"\n", *(array.tobytes() for array in feeds.values())])
        try:
            connection = self._idle.pop()
        except IndexError:  # all are in use
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("POST", "/predict", body, {"content-type": "application/octet-stream"})
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            self.ended(task, False)
            return
        self._idle.append(connection)
        self.ended(task, answer.status == 200)


def _import_path() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports
