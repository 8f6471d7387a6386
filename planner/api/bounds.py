"""What one request may take, and the refusal of one that takes more: bodies, files, turns."""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request

from stageloom.planner.api.problem import problem
from stageloom.planner.schema.job import ProblemDetails
from stageloom.shared.errors import ExitCode, StorageError


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may take: bytes, and seconds to send its body or to take a part of its answer."""

    body_bytes: int = 1 << 20
    upload_bytes: int = 8 << 30
    free_bytes: int = 512 << 20  # that an upload leaves on the disk, which holds the database, too,
    free_share: float = 0.05  # or of a small disk this share
    body_s: float = 20.0
    send_s: float = 60.0
    at_once: int = 4  # requests of one token that are worked on; the others of it wait
    streams: int = 64  # of events, open at once, over the local socket
    streams_of_one: int = 16  # of one token: as many as jobs may run


class Refusal(Exception):
    """The answer is this problem."""

    def __init__(self, refused: ProblemDetails, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(refused.detail)
        self.problem = refused
        self.headers = dict(headers or {})


def source_of(request: Request) -> str:
    """The address that a request comes from."""
    return request.client.host if request.client is not None else "?"


def too_many(what: str) -> Refusal:
    """Ask again in a second."""
    refused = problem(HTTPStatus.TOO_MANY_REQUESTS, f"too many {what}", "wait a second", ExitCode.UNAVAILABLE)
    return Refusal(refused, {"retry-after": "1"})


async def receive(request: Request, limits: RequestLimits) -> bytes:
    """The body, bounded in size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_large(limits.body_bytes)
    except TimeoutError:
        raise _late("body") from None
    return bytes(body)


async def receive_file(request: Request, path: Path, limits: RequestLimits) -> None:
    """The body as a file; each part of it bounded in time."""
    size = 0
    parts = request.stream()
    try:
        with path.open("wb") as file:
            while True:
                async with asyncio.timeout(limits.body_s):
                    chunk = await anext(parts, None)
                if chunk is None:
                    return
                size += len(chunk)
                if size > limits.upload_bytes:
                    raise _too_large(limits.upload_bytes)
                disk = shutil.disk_usage(path.parent)
                left = min(limits.free_bytes, int(limits.free_share * disk.total))
                if disk.free - len(chunk) < left:
                    raise StorageError(
                        f"the disk is full: an upload would leave less than {left >> 20} MiB of it free",
                        remedy="free some space where the planner keeps its data",
                    )
                file.write(chunk)
    except TimeoutError:
        raise _late("file") from None
    except OSError as error:
        raise StorageError(
            f"the upload cannot be written: {error}",
            remedy="free some space where the planner keeps its data",
        ) from error


def _late(what: str) -> Refusal:
    return Refusal(problem(HTTPStatus.REQUEST_TIMEOUT, f"the {what} did not come in time", "send it again"))


def _too_large(limit: int) -> Refusal:
    detail = f"the body is larger than {limit} bytes"
    return Refusal(problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, "send less", ExitCode.USAGE))
