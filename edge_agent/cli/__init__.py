"""The console script `stageloom-agent`. Nothing heavy is imported until it runs."""

import sys

from stageloom.shared.standard_streams import open_closed_streams


def main() -> None:
    """Run the command line; the process ends with a code of `stageloom.shared.errors.ExitCode`."""
    open_closed_streams()
    try:
        from stageloom.edge_agent.cli.app import run_command_line
    except KeyboardInterrupt:  # pressed while the commands are imported, before anything can catch it
        sys.exit(130)
    run_command_line()
