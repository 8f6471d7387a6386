"""`python -m stageloom.edge_agent` is `stageloom-agent`."""

from stageloom.edge_agent.cli import main

main()
