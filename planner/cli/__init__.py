"""The console script `stageloom`. Nothing heavy is imported until a command needs it."""

import sys


def main() -> None:
    """Run the command line; the process ends with a code of `shared.errors.ExitCode`."""
    try:
        from planner.cli.app import run
    except KeyboardInterrupt:  # pressed while the commands are imported, before anything can catch it
        sys.exit(130)
    run()
