"""Pinned memory is slow to make: steps that run meanwhile do not wait for it."""

import random
import threading

from stageloom.edge_agent.executor.cuda.executor import HostMemory, pieces_of
from tests.executor.contract.schedules import bound_of, plan_of
from tests.executor.models import artifact_of
from tests.executor.torch.steps import members

LONG_S = 10.0


def test_pieces_are_given_and_taken_while_a_plan_has_its_own_made() -> None:
    model = artifact_of("squeezenet")
    bound = bound_of(plan_of([model], [()], [members(1)]), [model])
    other_size = 1 + max(pieces_of(bound))
    waited: list[bool] = []

    def step() -> None:
        memory.give(other_size, bytearray())
        memory.take(other_size)

    def make(nbytes: int) -> bytearray:
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        thread.join(LONG_S if not any(waited) else 0.0)
        waited.append(thread.is_alive())
        return bytearray(nbytes)

    memory = HostMemory(make)
    memory.reserve(bound)
    assert waited and not any(waited)


def test_a_plan_finds_the_pieces_of_all_of_its_steps() -> None:
    model, made = artifact_of("squeezenet"), []
    bound = bound_of(plan_of([model], [()], [members(1)]), [model])

    def make(nbytes: int) -> int:
        made.append(nbytes)
        return len(made)

    memory = HostMemory(make)
    for _ in range(2):  # the second time they are there
        memory.reserve(bound)
    wanted = list(pieces_of(bound).elements())
    assert sorted(made) == sorted(wanted)
    taken = [memory.take(size) for size in random.Random(1).sample(wanted, len(wanted))]
    assert len(set(taken)) == len(made) == len(wanted)
