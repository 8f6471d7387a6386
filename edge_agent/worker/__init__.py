"""The engine's own process: `handle` is the agent's end of it, `shell` drives the core inside it.

Nothing here imports numpy or a backend before a plan is loaded.
"""
