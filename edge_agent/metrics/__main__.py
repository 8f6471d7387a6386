"""The process that tells metrics, as the agent starts it: `python -m stageloom.edge_agent.metrics`."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from stageloom.edge_agent.metrics.scrape import scrape
from stageloom.edge_agent.metrics.server import metrics_application
from stageloom.edge_agent.metrics.settings import MetricsConfig, decode_metrics
from stageloom.edge_agent.serving.child import address_unusable, end_with, failure_told
from stageloom.edge_agent.serving.http_server import HttpServer, address_text, listen_on
from stageloom.edge_agent.serving.settings import host_and_port, read_tokens, tls_context
from stageloom.shared.errors import ExitCode, SettingError, StageloomError

_log = logging.getLogger("stageloom.edge_agent.metrics")
_CONNECTIONS: Final = 16


def main() -> int:
    os.umask(0o077)
    try:
        if len(sys.argv) != 2:
            raise SettingError("this process is started by the agent", remedy="stageloom-agent run --metrics")
        config = decode_metrics(sys.argv[1])
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


async def serve(config: MetricsConfig) -> None:
    """Until SIGTERM or SIGINT.

    Raises:
        StageloomError: the address or the certificate cannot be used.
    """
    settings = config.settings
    tokens = read_tokens(settings.tokens) if settings.tokens else frozenset()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    application = metrics_application(partial(scrape, Path(config.socket)), tokens)
    tls = tls_context(settings.certificate, settings.key) if settings.certificate else None
    host, port = host_and_port(settings.listen)
    try:
        listening = listen_on(host, port)
    except OSError as error:
        raise address_unusable(settings.listen, error) from error
    server = HttpServer(application, listening, tls, _CONNECTIONS)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        address = address_text(host, listening[0].getsockname()[1])
        os.write(config.report, msgspec.json.encode({"http": address}) + b"\n")
        _log.info("metrics are told on %s", address)
        await ending.wait()


if __name__ == "__main__":
    sys.exit(main())
