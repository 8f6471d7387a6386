"""What becomes of a search when something else is desired of its device meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.plans import add_plan
from stageloom.shared.messages.control import Alarm, ModelLoad
from tests.replan.drifting import BOOT, InlinePool, planned
from tests.replan.test_recalibration import World
from tests.store.helpers import NANO


class MeanwhilePool(InlinePool):
    """Something happens once, while a search runs."""

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], object]] = []

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().submit(function, *arguments)


@pytest.mark.parametrize("other", ["intervals", "lanes"])
def test_what_a_search_found_is_pushed_over_launch_intervals_that_the_device_took_meanwhile_alone(
    tmp_path: Path, other: str
) -> None:
    pool = MeanwhilePool()
    world = World(tmp_path, pool=pool)
    wide = planned(world.device, "greedy")
    models = tuple(replace(model, launch_interval_us=900) for model in wide.models)
    taken = replace(wide, models=models) if other == "intervals" else replace(wide, lanes=2)
    for name, plan in (("runs", wide), ("taken", taken)):
        world.store.write(add_plan, name, plan, "sequential")
    world.store.write(push, Push(device=NANO, plan="runs", decided_by="operator"))
    world.device.runs(wide)
    pool.meanwhile.append(
        lambda: world.store.write(push, Push(device=NANO, plan="taken", decided_by="local"))
    )
    load = ModelLoad("branches", 20.0, 1500.0, 0, 0)
    alarm = Alarm(
        boot=BOOT, number=1, at_us=1, cause="variance", value=0.5, threshold=0.0625, plan=wide.digest,
        loads=(load,), samples=(),
    )  # fmt: skip
    replan = world.answered(alarm)
    world.close()
    if other == "intervals":
        assert (replan.how, replan.outcome) == ("search", "pending") and replan.digest != wide.digest
    else:
        assert (replan.outcome, replan.reason) == ("no_gain", "something newer was desired meanwhile")
