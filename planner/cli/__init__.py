"""The console script `stageloom`. Nothing heavy is imported until a command needs it."""


def main() -> None:
    """Run the command line; the process ends with a code of `shared.errors.ExitCode`."""
    from planner.cli.app import run

    run()
