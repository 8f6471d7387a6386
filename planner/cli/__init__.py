"""The console script `stageloom`. Nothing heavy is imported until a command needs it."""

import gc
import sys

from stageloom.shared.standard_streams import open_closed_streams


def main() -> None:
    """Run the command line; the process ends with a code of `stageloom.shared.errors.ExitCode`."""
    open_closed_streams()
    if sys.version_info < (3, 11):  # pip has left the planner's packages out without a word
        version = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(
            f"error: the planner needs Python 3.11 or later, this is {version}; make its environment with a "
            "newer one, such as python3.11 -m venv (stageloom-agent runs on 3.10)\n"
        )
        sys.exit(6)
    gc.disable()  # what is imported stays: looking for cycles in it takes a seventh of a short command
    try:
        from stageloom.planner.cli.app import run
    except KeyboardInterrupt:  # pressed while the commands are imported, before anything can catch it
        sys.exit(130)
    run()
