"""The process that speaks the protocol, as the agent starts it: `python -m stageloom.edge_agent.serving`."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from stageloom.edge_agent.serving.body import WaitingBytes
from stageloom.edge_agent.serving.child import address_unusable, end_with, failure_told
from stageloom.edge_agent.serving.grpc_api import GrpcServer
from stageloom.edge_agent.serving.http_api import HttpApi
from stageloom.edge_agent.serving.http_server import HttpServer, address_text, listen_on
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.regions import RegionTable
from stageloom.edge_agent.serving.request_counts import COUNTS_EVERY_S, RequestCounters
from stageloom.edge_agent.serving.settings import (
    ServingConfig,
    ServingSettings,
    decode_serving,
    host_and_port,
    read_tokens,
    tls_context,
)
from stageloom.edge_agent.serving.verbs import Verbs
from stageloom.shared.errors import ExitCode, SettingError, StageloomError

_Stop = Callable[[], Coroutine[Any, Any, None]]

_log = logging.getLogger("stageloom.edge_agent.serving")
_SWITCH_INTERVAL_S: Final = 0.0005  # a reply must not wait for a thread that decodes JSON


def main() -> int:
    os.umask(0o077)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        if len(sys.argv) != 2:
            raise SettingError("this process is started by the agent", remedy="`stageloom-agent run --http`")
        config = decode_serving(sys.argv[1])
        logging.basicConfig(
            level=config.log_level,
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        end_with(config.agent)
        with failure_told(config.report):
            asyncio.run(serve(config))
    except StageloomError as error:
        _log.error("%s", error)
        return error.exit_code
    return ExitCode.OK


async def serve(config: ServingConfig) -> None:
    """Until SIGTERM or SIGINT.

    Raises:
        StageloomError: an address, a certificate or the agent cannot be used.
    """
    settings = config.settings
    tokens = read_tokens(settings.tokens) if settings.tokens else frozenset()
    service = InferenceService(Path(config.socket), settings.rows)
    verbs = Verbs(service, RegionTable())
    waiting = WaitingBytes(settings.waiting_bytes)
    counters = RequestCounters() if config.count else None
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    stops: list[_Stop] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(service.close)
        stack.push_async_callback(_stop_together, stops)
        bound = {}
        if settings.http:
            bound["http"] = await _serve_http(settings, verbs, tokens, waiting, counters, stops)
        if settings.grpc:
            threaded = Verbs(service.in_threads(), verbs.regions)
            bound["grpc"] = _serve_grpc(settings, threaded, tokens, waiting, counters, stops)
        os.write(config.report, msgspec.json.encode(bound) + b"\n")
        _log.info("serving %s", ", ".join(f"{kind} on {address}" for kind, address in bound.items()))
        while counters is not None and not ending.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ending.wait(), COUNTS_EVERY_S)
            counters.tell(config.report)
        await ending.wait()


async def _stop_together(stops: Sequence[_Stop]) -> None:
    """Side by side: neither takes requests while the other ends, and the agent waits for one time only."""
    await asyncio.gather(*(stop() for stop in stops))


async def _serve_http(
    settings: ServingSettings,
    verbs: Verbs,
    tokens: frozenset[str],
    waiting: WaitingBytes,
    counters: RequestCounters | None,
    stops: list[_Stop],
) -> str:
    api = HttpApi(verbs, tokens, settings.message_bytes, waiting, counters)
    tls = tls_context(settings.certificate, settings.key) if settings.certificate else None
    host, port = host_and_port(settings.http)
    try:
        listening = listen_on(host, port)
    except OSError as error:
        raise address_unusable(settings.http, error) from error
    server = HttpServer(api.application, listening, tls, settings.connections)
    await server.start()
    stops.append(server.stop)
    return address_text(host, listening[0].getsockname()[1])


def _serve_grpc(
    settings: ServingSettings,
    verbs: Verbs,
    tokens: frozenset[str],
    waiting: WaitingBytes,
    counters: RequestCounters | None,
    stops: list[_Stop],
) -> str:
    pem = _pem(settings)
    server = GrpcServer(verbs, tokens, settings.grpc, settings.message_bytes, waiting, pem, counters)
    try:
        port = server.start()
    except (OSError, RuntimeError) as error:
        raise address_unusable(settings.grpc, error) from error
    stops.append(partial(asyncio.to_thread, server.stop))
    return address_text(host_and_port(settings.grpc)[0], port)


def _pem(settings: ServingSettings) -> tuple[bytes, bytes] | None:
    """The certificate and its key as they are in their files.

    Raises:
        SettingError: they cannot be used; grpc would not say so.
    """
    if not settings.certificate:
        return None
    tls_context(settings.certificate, settings.key)
    certificate = Path(settings.certificate).read_bytes()
    return certificate, Path(settings.key).read_bytes() if settings.key else certificate


if __name__ == "__main__":
    sys.exit(main())
