"""An application of its own process: submits until its stdin closes, then says how its tasks ended.

`python -m tests.e2e.application SOCKET MODEL` prints `serving` once its first task is completed, and at the
end one JSON object: {"submitted": n, ending: n, ...}.
"""

import json
import sys
import threading
from collections import Counter, deque

import numpy as np

from stageloom import Client
from stageloom.shared.errors import StageloomError
from tests.e2e.networks import ROW_SHAPE

WINDOW = 8
_PACE_S = 0.001  # between two tasks, so that three of these leave room on two cores


def main(path: str, model: str) -> None:
    """See above."""
    stop = threading.Event()

    def watch_stdin() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=watch_stdin, daemon=True).start()
    endings: Counter[str] = Counter()
    submitted, told = 0, False
    row = np.ones(ROW_SHAPE, np.float32)
    with Client(path) as client:
        window = deque([client.submit(model, {"input": row})])
        submitted += 1
        while window:
            try:
                window.popleft().result(60)
                endings["completed"] += 1
            except StageloomError as error:
                endings[type(error).__name__] += 1
            if endings["completed"] and not told:
                told = True
                sys.stdout.write("serving\n")
                sys.stdout.flush()
            while len(window) < WINDOW and not stop.wait(_PACE_S):
                window.append(client.submit(model, {"input": row}))
                submitted += 1
    sys.stdout.write(json.dumps({"submitted": submitted, **endings}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
