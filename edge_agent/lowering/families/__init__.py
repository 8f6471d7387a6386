"""Lowering functions, one file per family of operators; see `stageloom.edge_agent.lowering.node`."""
