"""`python -m tests.bad_input.application SOCKET MODEL [NAME=DTYPE:DIMS]... [deadline=S]`: submits one task.

The error of the library becomes one line and the exit code that it carries.
"""

import sys
from pathlib import Path

import numpy as np

from stageloom import Client
from stageloom.shared.errors import ExitCode, StageloomError

PATIENCE_S = 30.0


def main(socket: str, model: str, *inputs: str) -> int:
    """Submit a task of zeros and wait for its end."""
    tensors, deadline_s = {}, None
    for text in inputs:
        name, _, kind = text.partition("=")
        if name == "deadline":
            deadline_s = float(kind)
            continue
        dtype, _, dims = kind.partition(":")
        tensors[name] = np.zeros([int(dim) for dim in dims.split("x")], dtype)
    try:
        with Client(Path(socket)) as client:
            client.run(model, tensors, deadline_s=deadline_s, timeout_s=PATIENCE_S)
    except StageloomError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
