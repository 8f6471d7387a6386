"""`python -m stageloom.planner` is `stageloom`."""

from stageloom.planner.cli import main

main()
