"""An application that asks its agent for a trace into a pipe that is full and that nobody reads.

    python trace_into_pipe.py AGENT_HOME

Run with the packages of the version under attack on the path: local messages may differ between versions.
"""

import argparse
import os
import time
from pathlib import Path

from stageloom.edge_agent.ingest import channel
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.ingest.messages import PROTOCOL_VERSION, ClientHello, TraceRequest, encode


def main() -> None:
    """Ask, say so on stdout, and hold the pipe until killed."""
    parser = argparse.ArgumentParser(description="An application that wants a trace in a full pipe")
    parser.add_argument("home", metavar="AGENT_HOME", type=Path, help="the agent's state directory")
    sock = channel.connect(socket_of(parser.parse_args().home), 60.0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    sock.send(encode(ClientHello(PROTOCOL_VERSION)))
    channel.send_with_descriptor(sock, encode(TraceRequest(0, 0.5)), writing)
    print("asked", flush=True)
    time.sleep(600.0)
    os.close(reading)


if __name__ == "__main__":
    main()
