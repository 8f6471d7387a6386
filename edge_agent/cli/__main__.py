"""`python -m edge_agent.cli` is `stageloom-agent`, too."""

from edge_agent.cli import main

main()
