"""Steps wait for those that they name, however the waiting and the end of a step meet."""

import threading
from collections.abc import Callable

from stageloom.edge_agent.executor.threads import StepOrder
from stageloom.shared.engine.steps import PlanKey, ProgramKey, Step
from stageloom.shared.ids import StepId

LONG_S = 30.0


def _step(number: int, *after: int) -> Step:
    return Step(StepId(number), 0, ProgramKey(PlanKey(1), 0, 1, (1,)), (), tuple(map(StepId, after)))


class Look:
    """A thread's second look whether a step runs: it waits until it may, and says when it has looked."""

    def __init__(self) -> None:
        self.near, self.may, self.over = threading.Event(), threading.Event(), threading.Event()
        self.looks = 0

    def take(self, see: Callable[[], bool]) -> bool:
        self.looks += 1
        if self.looks < 2:
            return see()
        self.near.set()
        assert self.may.wait(LONG_S)
        seen = see()
        self.over.set()
        return seen


class Running(set[StepId]):
    """Has threads look when they may, by their names."""

    def __init__(self, looks: dict[str, Look]) -> None:
        super().__init__()
        self.looks = looks

    def __contains__(self, step: object) -> bool:
        look, found = self.looks.get(threading.current_thread().name), super().__contains__
        return found(step) if look is None else look.take(lambda: found(step))


class Gates(dict[StepId, threading.Lock]):
    """Calls `between` when a step has ended and its gate was not looked for yet."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between

    def __bool__(self) -> bool:
        self.between()
        return len(self) > 0


def test_nobody_waits_for_ever_where_another_sees_the_step_ended_before_its_gate_is_opened() -> None:
    """1. The first has made a gate, and is about to look again. 2. The second is to wait at that gate. 3. The
    step ends. 4. The first sees that, and takes the gate away before the step's end looks for one."""
    order, awaited = StepOrder(), _step(1)
    looks = {"first": Look(), "second": Look()}
    threads = [
        threading.Thread(target=order.begin, args=(_step(number, 1),), name=name, daemon=True)
        for number, name in enumerate(looks, start=2)
    ]

    def first_goes_on() -> None:
        looks["first"].may.set()
        threads[0].join(LONG_S)

    order._running, order._gates = Running(looks), Gates(first_goes_on)
    order.issue(awaited)
    for thread, look in zip(threads, looks.values(), strict=True):
        thread.start()
        assert look.near.wait(LONG_S)
    looks["second"].may.set()
    assert looks["second"].over.wait(LONG_S)
    order.end(awaited)
    threads[1].join(LONG_S / 3)
    assert not any(thread.is_alive() for thread in threads)
