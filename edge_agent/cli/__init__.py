"""The console script `stageloom-agent`. Nothing is imported until it runs."""

import sys


def main() -> None:
    """Run the command line; the process ends with a code of `stageloom.shared.errors.ExitCode`."""
    try:
        from stageloom.edge_agent.cli.app import run_command_line
    except KeyboardInterrupt:  # pressed while the commands are imported, before anything can catch it
        sys.exit(130)
    run_command_line()
