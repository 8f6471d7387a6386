"""An application that asks its agent for a trace into a pipe that is full and that nobody reads.

    python trace_into_pipe.py AGENT_HOME

Run with the packages of the version under attack on the path. The messages are written out: both versions
have them, under other names.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Final

import msgpack

from stageloom.edge_agent.ingest import channel

_HELLO: Final = msgpack.packb([1, 1])  # version 1
_TRACE: Final = msgpack.packb([10, 0, 0.5])  # request 0, for half a second


def main() -> None:
    """Ask, say so on stdout, and hold the pipe until killed."""
    parser = argparse.ArgumentParser(description="An application that wants a trace in a full pipe")
    parser.add_argument("home", metavar="AGENT_HOME", type=Path, help="the agent's state directory")
    sock = channel.connect(parser.parse_args().home / "run" / channel.SOCKET_NAME, 60.0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    sock.send(_HELLO)
    channel.send_with_descriptor(sock, _TRACE, writing)
    print("asked", flush=True)
    time.sleep(600.0)
    os.close(reading)


if __name__ == "__main__":
    main()
