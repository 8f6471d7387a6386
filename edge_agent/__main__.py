"""`python -m edge_agent` is `stageloom-agent`."""

from edge_agent.cli import main

main()
