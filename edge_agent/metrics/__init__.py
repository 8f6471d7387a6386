"""The agent's metrics for Prometheus: counted in its main process, told by a process of their own.

Nothing here runs in the engine's process. It reports every end of a task to the main process in any case.
"""
