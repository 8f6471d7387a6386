"""The API's server on a store of its own, with verbs that do what a test says."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from socket import create_server, socket
from typing import Any, Final

from stageloom.planner.api.application import Api
from stageloom.planner.api.bounds import RequestLimits
from stageloom.planner.api.client import PlannerClient, socket_path
from stageloom.planner.api.context import HANDLERS, ApiCall, ApiContext
from stageloom.planner.api.handlers.service import hold_tokens
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.api.routes import ACCESS_CREATE, ROUTES
from stageloom.planner.api.server import ApiServer, ServerLimits
from stageloom.planner.enrolment.service import certificate_digest
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.schema.base import Done, Request
from stageloom.shared.clock import SystemClock
from stageloom.shared.messages.base import Name, SmallCount
from tests.planner.api.context import planner_context
from tests.store.migrated import new_store


class TryRequest(Request, frozen=True, kw_only=True):
    """Whatever a test makes of it."""

    name: Name
    number: SmallCount = 0
    names: tuple[Name, ...] = ()


def _route(name: str, method: str, reply: Any = Done, **more: Any) -> Route[TryRequest, Any]:
    return Route(
        f"try.{name}", method, f"/v1/try/{name}/{{name}}", TryRequest, reply, Role.VIEWER, "", **more
    )


READ: Final = _route("read", "GET")
WRITE: Final = _route("write", "POST", creates=True)
CHANGE: Final = _route("change", "POST")
SECRET: Final = _route("secret", "POST", creates=True, secret=True)
WORK: Final = _route("work", "POST", form=AnswerForm.JOB)
STORED: Final = _route("stored", "POST", form=AnswerForm.JOB, creates=True)
UPLOAD: Final = _route("upload", "PUT", form=AnswerForm.UPLOAD)
FOLLOW: Final = _route("follow", "GET", form=AnswerForm.EVENTS)
TRIED: Final = (READ, WRITE, CHANGE, SECRET, WORK, STORED, UPLOAD, FOLLOW)

Handler = Callable[[TryRequest], Any]


class ApiRig:
    """A server over a store in `folder`; `answers` says what each of `TRIED` does."""

    def __init__(
        self,
        folder: Path,
        answers: dict[Route[TryRequest, Any], Handler],
        *,
        tls: bool = False,
        connections: ServerLimits | None = None,
        requests: RequestLimits | None = None,
    ) -> None:
        self.folder = folder
        self.path = socket_path(folder)
        self.store = new_store(folder)
        certificate = folder / "api.pem"
        pinned = certificate_digest(certificate) if tls else b""
        self.context = planner_context(self.store, SystemClock(), certificate=pinned)
        self.calls: list[ApiCall] = []
        for route in TRIED:
            HANDLERS[route] = self._handler(answers.get(route, lambda request: Done()))
        self.api = Api(self.context, (*ROUTES, *TRIED), requests)
        self.listening: socket | None = create_server(("127.0.0.1", 0)) if tls else None
        hold_tokens(self.context.live)
        self.server = ApiServer(
            self.path,
            self.api.local,
            remote=self.api.remote if tls else None,
            listening=self.listening,
            certificate=(certificate, certificate) if tls else None,
            limits=connections,
        )
        self.server.start()
        self._stopped = False

    def _handler(self, answer: Handler) -> Callable[[ApiContext, TryRequest, ApiCall], Any]:
        def handle(_: ApiContext, request: TryRequest, call: ApiCall) -> Any:
            self.calls.append(call)
            return answer(request)

        return handle

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens for other machines."""
        assert self.listening is not None
        host, port = self.listening.getsockname()
        return host, port

    def client(self, token: str = "") -> PlannerClient:
        """One over the local socket, or with a token over TLS."""
        if not token:
            return PlannerClient(data_dir=self.folder)
        host, port = self.address
        return PlannerClient(url=f"https://{host}:{port}", token=token)

    def token(self, name: str, role: Role = Role.VIEWER) -> str:
        """The text of a new token."""
        with self.client() as client:
            return client.call(ACCESS_CREATE, AccessCreateRequest(name=name, role=role)).token

    def https(self) -> HTTPSConnection:
        """A connection as a stranger makes it."""
        return HTTPSConnection(*self.address, timeout=20.0, context=unverified())

    def stop(self) -> None:
        """As the planner stops its API."""
        if not self._stopped:
            self._stopped = True
            self.context.jobs.close()
            self.api.end_streams()
            self.server.stop()
            if self.listening is not None:
                self.listening.close()
            self.api.close()
            self.store.close()


@contextmanager
def served(
    folder: Path, answers: dict[Route[TryRequest, Any], Handler] | None = None, **how: Any
) -> Iterator[ApiRig]:
    """A server until the test has ended; `how`: as `ApiRig`."""
    rig = ApiRig(folder, answers or {}, **how)
    try:
        yield rig
    finally:
        rig.stop()


class Gate:
    """A handler that waits until it is opened; `taken` is set once it was called so often."""

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._calls = 0
        self._lock = threading.Lock()
        self.taken = threading.Event()
        self.open = threading.Event()

    def __call__(self, request: TryRequest) -> Done:
        with self._lock:
            self._calls += 1
            if self._calls == self._number:
                self.taken.set()
        assert self.open.wait(30)
        return Done()


def unverified() -> ssl.SSLContext:
    """What a stranger connects with: loading the machine's certificates takes longer than a request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
