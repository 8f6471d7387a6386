"""A task of a client of the agent that a test plays."""

from concurrent.futures import Future
from typing import Any

from stageloom.shared.errors import TaskCancelled


class PlayedTask(Future[Any]):
    """A task that its owner may cancel, as the client's."""

    queued_at_s = started_at_s = ended_at_s = 0.0

    def cancel(self) -> bool:
        if not self.done():
            self.set_exception(TaskCancelled("the task was cancelled"))
        return True
