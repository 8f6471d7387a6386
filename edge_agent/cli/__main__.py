"""`python -m stageloom.edge_agent.cli` is `stageloom-agent`, too."""

from stageloom.edge_agent.cli import main

main()
