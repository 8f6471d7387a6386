"""Stageloom: the planner, the edge agent, and `Client`, by which applications of a machine submit tasks."""

from typing import TYPE_CHECKING, Any

from stageloom.shared.version import __version__

if TYPE_CHECKING:
    from stageloom.edge_agent.ingest.client import Client, TaskFuture

__all__ = ["Client", "TaskFuture", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, because the agent's own processes import this package and must not load numpy for it.
    if name in ("Client", "TaskFuture"):
        from stageloom.edge_agent.ingest import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
