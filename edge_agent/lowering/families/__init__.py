"""Lowering functions, one file per family of operators; see `edge_agent.lowering.registry`."""
