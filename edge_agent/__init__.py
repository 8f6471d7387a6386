"""The edge agent, and `Client`: the library by which applications of a machine use it."""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from edge_agent.ingest.client import Client, TaskFuture

__version__: Final = "0.1.0"
__all__ = ["Client", "TaskFuture", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, because the agent's own processes import this package and must not load numpy for it.
    if name in ("Client", "TaskFuture"):
        from edge_agent.ingest import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
