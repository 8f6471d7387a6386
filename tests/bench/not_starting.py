"""A contestant's process that never becomes ready."""

from stageloom.edge_agent.bench.contestant import ContestantSetting
from stageloom.edge_agent.bench.contestant_process import ContestantError


class NotStarting:
    """In the place of `ContestantProcess`."""

    def __init__(self, setting: ContestantSetting, models: object) -> None:
        self.name = setting.name

    def wait_ready(self) -> None:
        raise ContestantError(f"{self.name}: out of memory")

    def kill(self) -> None:
        """It has ended."""
