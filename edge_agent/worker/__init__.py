"""The engine's own process: `client` is the agent's end of it, `runtime` drives the core inside it.

Nothing here imports numpy or a backend before a plan is loaded.
"""
