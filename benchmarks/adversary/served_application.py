"""An application that is served all the time and says how long its longest task took.

    python served_application.py AGENT_HOME [--seconds S]

Run with the packages of the version under attack on the path.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from stageloom import Client
from stageloom.edge_agent.ingest.channel import SOCKET_NAME
from stageloom.shared.errors import StageloomError


def main() -> None:
    """Print `serving` at the first answer, and at the end the longest task's time in seconds."""
    parser = argparse.ArgumentParser(description="An application that is served all the time")
    parser.add_argument("home", metavar="AGENT_HOME", type=Path, help="the agent's state directory")
    parser.add_argument("--seconds", type=float, default=10.0, help="from the first answer on (default 10)")
    given = parser.parse_args()
    client = _connected(given.home)
    model = next(iter(client.models().values()))
    inputs = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs}
    client.run(model.name, inputs)
    print("serving", flush=True)
    longest_s, ends_s = 0.0, time.monotonic() + given.seconds
    while (began_s := time.monotonic()) < ends_s:
        while not _answered(client, model.name, inputs):
            time.sleep(0.1)
        longest_s = max(longest_s, time.monotonic() - began_s)
        time.sleep(0.005)
    print(longest_s)


def _answered(client: Client, model: str, inputs: dict[str, np.ndarray]) -> bool:
    try:
        client.run(model, inputs)
    except StageloomError:  # an engine that ends takes its tasks along; they are submitted again
        return False
    return True


def _connected(home: Path) -> Client:
    ends_s = time.monotonic() + 60.0
    while True:
        try:
            client = Client(home / "run" / SOCKET_NAME)
            if client.models():
                return client
        except StageloomError:
            if time.monotonic() > ends_s:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    main()
