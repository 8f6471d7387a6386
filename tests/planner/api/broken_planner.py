"""A planner's local socket that answers what a test says, byte for byte, and hangs up when it should."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageloom.planner.api.client import socket_path


@contextmanager
def answering(folder: Path, *answers: bytes) -> Iterator[None]:
    """On the socket of a data directory: one answer to whatever comes on each connection, then the end.

    Each connection has the next of the answers, and all further ones the last.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(socket_path(folder)))
        listening.listen()

        left = list(answers)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(20)
