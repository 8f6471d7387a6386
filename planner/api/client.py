"""A client of the planner's API: over the local socket, or over TLS with a token.

It stands on the standard library's HTTP client: a command must not spend longer on imports than on its
answer.
"""

import contextlib
import hashlib
import http.client
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from stageloom.planner.api.problem import ApiRefused, decode_problem
from stageloom.planner.api.route import AnswerForm, Route, unbind
from stageloom.planner.api.routes import JOB_CANCEL, JOB_EVENTS
from stageloom.planner.schema.base import Page, Request
from stageloom.planner.schema.job import JobCancelRequest, JobEventsRequest, JobInfo, JobState, ProblemDetails
from stageloom.shared.errors import InputError, StorageError, UnavailableError

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")
T = TypeVar("T")

SOCKET_FILE: Final = "api.sock"
TIMEOUT_S: Final = 60.0
DEFAULT_PORT: Final = 7424
_PATH_MAX: Final = 100  # of a local socket's name; the kernel's limit is 107
CHUNK: Final = 1 << 20
_BUSY_TRIES: Final = 10
_LONGEST_WAIT_S: Final = 5.0


def socket_path(data_dir: Path) -> Path:
    """Where the planner of a data directory listens.

    Raises:
        InputError: the path is longer than a local socket's may be.
    """
    path = data_dir.absolute() / SOCKET_FILE
    if len(os.fsencode(path)) > _PATH_MAX:
        raise InputError(
            f"{path} is longer than {_PATH_MAX} bytes, the most a local socket's name may have",
            remedy="use a shorter --data-dir",
        )
    return path


def is_running(path: Path) -> bool:
    """Whether someone listens on a local socket; a killed planner leaves a file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[bytes], int]]:
    """What writes to a new file of mode 0600. It outlives a power cut then, and is removed where that fails.

    Raises:
        InputError: there is such a file.
        StorageError: it cannot be written.
    """

    def told(error: OSError) -> StorageError:
        return StorageError(f"{path} cannot be written: {error.strerror}", remedy="name a new file elsewhere")

    def write(part: bytes) -> int:
        left = memoryview(part)
        try:
            while left:  # a disk that fills takes what fits, and tells of it at the next write
                left = left[file.write(left) :]
        except OSError as error:
            raise told(error) from error
        return len(part)

    def sync() -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise told(error) from error

    try:
        file: IO[bytes] = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
    except FileExistsError as error:
        raise InputError(f"{path} exists", remedy="choose another name") from error
    except OSError as error:
        raise told(error) from error
    try:
        with file:
            yield write
            sync()
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _retry_after_s(answer: http.client.HTTPResponse) -> float:
    """How long to wait before asking again: what the planner says, within bounds."""
    try:
        return min(max(float(answer.headers.get("retry-after", "1")), 0.0), _LONGEST_WAIT_S)
    except ValueError:  # a date
        return 1.0


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        if parts.scheme == "https" and parts.hostname and not parts.path.strip("/"):
            return parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:  # of the port, or of a bracket that is not closed
        pass
    raise InputError(f"{url!r} is no planner's address", remedy="use https://HOST:PORT")


class _LocalConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("planner", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        timeout_s = self.timeout or TIMEOUT_S
        # A connect that does not block fails at once where many connect; this one waits for its turn.
        wait = struct.pack("ll", int(timeout_s), round(timeout_s % 1.0 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)


class _PinnedConnection(http.client.HTTPSConnection):
    """TLS to a planner whose certificate the token pins: its own is signed by nobody."""

    def __init__(self, host: str, port: int, timeout_s: float, certificate: bytes) -> None:
        if certificate:
            # The machine's certificates, which are nothing to this planner, would take 0.1 s to load.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        else:
            context = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout_s, context=context)
        self._pinned = certificate

    def connect(self) -> None:
        super().connect()
        shown = self.sock.getpeercert(binary_form=True) or b""
        if self._pinned and hashlib.sha256(shown).digest() != self._pinned:
            self.close()
            raise ssl.SSLCertVerificationError(0, "its certificate is not the one that the token names")


class PlannerClient:
    """Calls verbs of one planner. Not thread-safe; a connection is made at the first call and kept."""

    live = True

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        url: str = "",
        token: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """A planner by its data directory, or by `url` (https://HOST:PORT) and an access token.

        `sleep`: how to wait, in seconds, where the planner is asked too often.

        Raises:
            InputError: the URL or the path of the socket cannot be used.
            TokenError: the token is none.
        """
        self._sleep = sleep
        self._bearer = ""
        if url:
            from stageloom.planner.api.access import split_token

            host, port = _host_and_port(url)
            self.where = f"https://{host}:{port}"
            self._bearer, pinned = split_token(token)
            self._connect: Callable[[float], http.client.HTTPConnection] = lambda timeout_s: (
                _PinnedConnection(host, port, timeout_s, pinned)
            )
        else:
            assert data_dir is not None
            path = socket_path(data_dir)
            self.where = str(data_dir)
            self._connect = lambda timeout_s: _LocalConnection(path, timeout_s)
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> "PlannerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls ----------------------------------------------------------------------------------------------

    def call(self, route: Route[Q, R], request: Q, *, timeout_s: float = TIMEOUT_S) -> R:
        """The reply to a request; of a job, its result.

        Raises:
            ApiRefused: the planner said no.
            UnavailableError: no planner there, or no whole answer in time.
        """
        if route.form is AnswerForm.JOB:
            job = self.start(route, request)
            *_, end = self.follow(job.job)
            return result(route, end)
        return self._decoded(self._ask(route, request, timeout_s=timeout_s), route.reply)

    def start(self, route: Route[Q, R], request: Q) -> JobInfo:
        """Begin a job. Raises as `call`."""
        return self._decoded(self._ask(route, request), JobInfo)

    def follow(self, job: str) -> Iterator[JobInfo]:
        """The job at each change, and at last as it ended. Raises as `call`."""
        for name, data in self._events(JOB_EVENTS, JobEventsRequest(job=job)):
            info = self._decoded(data, JobInfo)
            yield info
            if name == "end":
                return
        raise UnavailableError(f"the planner at {self.where} went away", remedy="see its log")

    def cancel(self, job: str) -> JobInfo:
        """Have a job end, over a connection of its own. Raises as `call`."""
        self.close()
        return self.call(JOB_CANCEL, JobCancelRequest(job=job), timeout_s=10.0)

    def pages(self, route: Route[Q, Page[T]], request: Q, *, timeout_s: float = TIMEOUT_S) -> Iterator[T]:
        """All items of a list, from as many pages as it takes, each in `timeout_s`. Raises as `call`."""
        while True:
            page = self.call(route, request, timeout_s=timeout_s)
            yield from page.items
            if not page.next:
                return
            request = msgspec.structs.replace(request, after=page.next)

    def upload(self, route: Route[Q, R], request: Q, file: Path) -> R:
        """The reply to a request whose body is a file. Raises as `call`."""
        with file.open("rb") as body:
            return self._decoded(self._ask(route, request, body=body, timeout_s=600.0), route.reply)

    def download(self, route: Route[Q, bytes], request: Q, file: Path) -> int:
        """Write the answer to a new file of mode 0600; returns its size. Raises as `call` and `new_file`."""
        with new_file(file) as write, self._answered(route, request, None, 600.0) as answer:
            size_bytes = sum(write(chunk) for chunk in iter(lambda: answer.read(CHUNK), b""))
            if answer.length:  # bytes still missing; a read of a part does not tell of an early end
                raise UnavailableError(
                    f"the planner at {self.where} broke its answer off: {answer.length} bytes are missing",
                    remedy="see its log, and ask again",
                )
            return size_bytes

    # -- HTTP -----------------------------------------------------------------------------------------------

    def _ask(
        self, route: Route[Q, Any], request: Q, *, body: IO[bytes] | None = None, timeout_s: float = TIMEOUT_S
    ) -> bytes:
        with self._answered(route, request, body, timeout_s) as answer:
            return answer.read()

    @contextlib.contextmanager
    def _answered(
        self, route: Route[Q, Any], request: Q, body: IO[bytes] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        path, encoded = unbind(route, request)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"
            headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        if route.creates:
            headers["Idempotency-Key"] = secrets.token_hex(16)
        kept = self._connection is not None
        try:
            try:
                answer = self._sent(route.method, path, body or encoded, headers, timeout_s)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not (kept and body is None and (route.creates or not route.changes)):
                    raise
                self.close()  # it was idle for long: once more, which the key makes safe
                answer = self._sent(route.method, path, encoded, headers, timeout_s)
            for _ in range(_BUSY_TRIES if body is None else 0):
                if answer.status != HTTPStatus.TOO_MANY_REQUESTS:
                    break
                answer.read()  # nothing was done: whoever looks at many devices in a row asks again
                self._sleep(_retry_after_s(answer))
                answer = self._sent(route.method, path, encoded, headers, timeout_s)
            if answer.status >= 400:
                raise ApiRefused(decode_problem(answer.status, answer.read()))
            yield answer
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unavailable(error, timeout_s) from error
        except BaseException:
            self.close()
            raise

    def _sent(
        self, method: str, path: str, body: bytes | IO[bytes], headers: dict[str, str], timeout_s: float
    ) -> http.client.HTTPResponse:
        if self._connection is not None and _was_closed(self._connection.sock):
            self.close()  # or what changes something would fail, which cannot be sent twice
        if self._connection is None:
            self._connection = self._connect(timeout_s)
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            connection.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            if isinstance(body, bytes):
                raise
        return connection.getresponse()  # that to a file which was refused before it was sent, too

    def _events(self, route: Route[Q, Any], request: Q) -> Iterator[tuple[str, bytes]]:
        with self._answered(route, request, None, TIMEOUT_S) as answer:
            name, data = "", b""
            for line in answer:
                field, _, value = line.rstrip(b"\r\n").partition(b": ")
                if field == b"event":
                    name = value.decode("ascii", "replace")
                elif field == b"data":
                    data = value
                elif not field and name:
                    if name == "problem":
                        raise ApiRefused(msgspec.json.decode(data, type=ProblemDetails))
                    yield name, data
                    name = ""

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise _something_else(f"the planner at {self.where} answers", error) from error

    def _unavailable(self, error: Exception, timeout_s: float) -> UnavailableError:
        if isinstance(error, TimeoutError):
            return UnavailableError(
                f"the planner at {self.where} does not answer within {timeout_s:g} s",
                remedy="see its log, or restart it",
            )
        if isinstance(error, FileNotFoundError | ConnectionRefusedError) and not self._bearer:
            return UnavailableError(
                f"no planner runs on {self.where}",
                remedy="start it with `stageloom up`, or name its --data-dir",
            )
        if isinstance(error, PermissionError) and not self._bearer:
            return UnavailableError(
                f"the socket of the planner on {self.where} is for its owner alone",
                remedy="run as the planner's account",
            )
        reason = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or error
        if isinstance(error, ssl.SSLCertVerificationError):
            return UnavailableError(
                f"the planner at {self.where} is not trusted: {reason}",
                remedy="make a new token there with `stageloom access create`, if it is your planner",
            )
        return UnavailableError(
            f"the planner at {self.where} cannot be asked: {reason}",
            remedy="check the address, the token's file, and that the planner runs with --api",
        )


def _was_closed(kept: socket.socket | None) -> bool:
    """Whether the planner closed a connection after the last answer: its end is all that can wait there."""
    if kept is None:
        return False
    waiting = select.poll()
    waiting.register(kept, select.POLLIN)
    return bool(waiting.poll(0))


def result(route: Route[Any, R], job: JobInfo) -> R:
    """What a job that has ended resulted in.

    Raises:
        ApiRefused: it failed, or was ended.
        UnavailableError: it resulted in something else than the route promises.
    """
    if job.state is not JobState.DONE:
        raise ApiRefused(job.problem or ProblemDetails(title="failed", status=500, detail="the job failed"))
    try:
        return msgspec.convert(job.result, route.reply)
    except msgspec.ValidationError as error:
        raise _something_else(f"{route.name} ends", error) from error


def _something_else(said: str, error: msgspec.DecodeError) -> UnavailableError:
    return UnavailableError(
        f"{said} with something else: {error}", remedy="use the command of the planner's version"
    )
