"""The re-planner's own threads: what they survive."""

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stageloom.planner.replan.service import Replanner
from stageloom.planner.store.replans import end_replan, unfinished_replans
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import DeviceId
from tests.planner.processes import until

SHOP = DeviceId("shop-7")


class AwayStore:
    """A store whose database is away for the first calls; nothing can be read from it."""

    def __init__(self, away: int) -> None:
        self._away = away
        self.ended: list[int] = []

    def read(self, function: Callable[..., Any], *_: Any) -> list[tuple[DeviceId, int]]:
        assert function is unfinished_replans
        return []

    def snapshot(self) -> Any:
        raise StorageError("the database is away", remedy="start it")

    def write(self, function: Callable[..., Any], replan: int, reason: str, remark: str) -> None:
        assert function is end_replan
        self._away -= 1
        if self._away >= 0:
            raise StorageError("the database is away", remedy="start it")
        self.ended.append(replan)


def test_a_replan_waits_for_a_store_that_is_away_and_others_go_on_after_it() -> None:
    store = AwayStore(away=2)
    due: queue.SimpleQueue[tuple[DeviceId, int] | None] = queue.SimpleQueue()
    pool = SimpleNamespace(workers=1, where="processes")
    replanner = Replanner(store, SimpleNamespace(), pool, ManualClock(), due, store_again_s=0.0)  # type: ignore[arg-type]
    replanner.start()
    for number in (1, 2):
        due.put((SHOP, number))
    until(lambda: sorted(store.ended) == [1, 2])
    replanner.close()
