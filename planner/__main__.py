"""`python -m planner` is `stageloom`."""

from planner.cli import main

main()
