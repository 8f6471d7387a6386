"""The listener's process: `python -m stageloom.planner.enrolment CERTIFICATE LISTENING-FD CHANNEL-FD`."""

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from typing import Final

from stageloom.planner.enrolment.listener import Bounds, Listener

_NICENESS: Final = 10  # a flood of handshakes must not take the planner's processor time
_MEMORY_BYTES: Final = 1 << 30  # of addresses; it needs a tenth of it
_FILES: Final = 256


def main() -> None:
    """Serve until the planner is gone."""
    certificate, listening, channel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the planner, which ends this process
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.num_tickets = 0  # nobody comes back
    tls.load_cert_chain(certificate)
    with socket.socket(fileno=listening) as strangers, socket.socket(fileno=channel) as planner:
        strangers.setblocking(False)
        planner.setblocking(False)
        asyncio.run(Listener(strangers, planner, tls, Bounds()).serve())


if __name__ == "__main__":
    main()
