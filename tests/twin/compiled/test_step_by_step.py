"""The compiled twin does what the engine core does, step by step and bit by bit."""

import builtins
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from stageloom.planner.twin.arrivals import Periodic, Poisson, Process
from stageloom.planner.twin.compiled import layout
from stageloom.planner.twin.compiled.twin import CompiledTwin
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.plan import QueuePlan, StepChoice
from tests.engine.plans import chains
from tests.twin.compiled.plain import PlainTwin, plain_kernels
from tests.twin.compiled.worlds import TracedTwin, UnevenWorld, World, lengthened, random_world

pytestmark = pytest.mark.more

_OUTCOMES = {
    Outcome.COMPLETED: layout.COMPLETED,
    Outcome.REFUSED: layout.REFUSED,
    Outcome.EXPIRED: layout.EXPIRED,
}


HOPELESS = World(
    load_device("nano"),
    {"a": Poisson(rate_per_s=2.0**11), "b": Poisson(rate_per_s=2.0**12)},
    {"a": 165e-6},  # of 169 that a task takes
    ((chains(4, 1, step_choice=StepChoice.DEADLINE, run_ahead=1), 2.0**-6),),
    0,
)


def _world(number: int | World) -> World:
    return number if isinstance(number, World) else random_world(number)


class Differ(AssertionError):
    """The twins did not do the same."""


def play(world: World, make: Callable[..., CompiledTwin], *, prepared: bool = False) -> int:
    """Run a world on both twins and compare all that they do; the number of steps."""
    reference = TracedTwin(world, prepared=prepared)
    twin = make(
        world.times,
        world.arrivals,
        seed=world.seed,
        deadlines_s=world.deadlines_s,
        patience_s=world.patience_s,
        prepared=prepared,
        trace=True,
    )
    for bound, seconds in world.plans:
        reference.deploy(bound)
        twin.deploy(bound)
        samples_s = [0.0, seconds / 4, seconds / 2, seconds]
        expected = reference.run(seconds, sample_at_s=samples_s)
        found = twin.run(seconds, sample_at_s=samples_s)
        compare_steps(reference, twin)
        compare_endings(reference, twin)
        if found != expected:
            raise Differ(f"windows differ: {found} is not {expected}")
    return reference.stats.steps


def compare_steps(reference: TracedTwin, twin: CompiledTwin) -> None:
    """Time, lane, combined block, mask, dependencies, members, instances and tasks of every step."""
    issued = [
        (
            now,
            key,
            step.id,
            step.lane,
            step.program.combined,
            step.program.mask,
            len(step.after),
            member.instance,
            member.member.replica,
            member.member.block,
            member.tasks[0],
            len(member.tasks),
        )
        for now, step in reference.issued
        for key in [step.program.plan]
        for member in step.members
    ]
    reference.issued.clear()
    traced = [
        (
            row.at_s,
            row.key,
            row.step,
            row.lane,
            row.combined,
            row.active,
            row.after,
            row.instance,
            row.track,
            row.block,
            row.task,
            row.tasks,
        )
        for row in twin.take_trace()
    ]
    for number, (found, expected) in enumerate(zip(traced, issued, strict=False)):
        if found != expected:
            raise Differ(f"member {number} of the steps: {found} is not {expected}")
    if len(traced) != len(issued):
        raise Differ(f"{len(traced)} members of steps are not {len(issued)}")


def compare_endings(reference: TracedTwin, twin: CompiledTwin) -> None:
    """When and how every task ended; tasks that end at one instant have no order."""
    expected = sorted((now, int(one.task), _OUTCOMES[one.outcome]) for now, one in reference.ended)
    reference.ended.clear()
    found = sorted((end.at_s, end.task, end.outcome) for end in twin.ended)
    if found != expected:
        raise Differ(f"endings differ: {found[:3]}... is not {expected[:3]}...")


@pytest.mark.promise("twin-decides-agent-s")
@pytest.mark.parametrize("world", [7, 11, 12, 26, 35, 67, 483, pytest.param(HOPELESS, id="hopeless")])
def test_every_step_and_ending_is_that_of_the_engine_core(world: int | World) -> None:
    """The kernels' text, uncompiled."""
    play(_world(world), PlainTwin)


def test_every_step_is_that_of_the_engine_core_where_all_programs_are_ready() -> None:
    play(random_world(7), PlainTwin, prepared=True)


@pytest.mark.promise("both-twins-judge-plan")
def test_a_sum_that_makes_up_for_rounding_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's does from 3.12 on, machine code never does: what both add up, both must add up alike.

    Steps of shares 0.1, 0.2 and 0.3 run side by side, whose sum is 0.6 or a bit more.
    """
    plain = sum

    def made_up(values: Iterable[Any], start: Any = 0) -> Any:
        values = list(values)
        floats = any(isinstance(value, float) for value in values)
        return math.fsum([start, *values]) if floats else plain(values, start)

    monkeypatch.setattr(builtins, "sum", made_up)
    arrivals: dict[str, Process] = {name: Periodic(rate_per_s=4096.0) for name in "abc"}
    plans = ((chains(1, 1, 1, lanes=3), 2.0**-6),)
    assert play(UnevenWorld(load_device("nano"), arrivals, {}, plans, 0), PlainTwin) > 100


def test_queues_grow_with_what_waits_in_them() -> None:
    """A plan whose queue is longer than the memory's rings, while tasks wait."""
    small, large = (
        chains(
            1,
            fields={"queue": QueuePlan(max_tasks=tasks), "launch_interval_us": 400, "work_conserving": False},
        )
        for tasks in (200, 600)
    )
    world = World(
        load_device("nano"), {"a": Periodic(rate_per_s=2.0**16)}, {}, ((small, 2.0**-8), (large, 2.0**-10)), 0
    )
    play(world, PlainTwin)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_every_step_is_that_of_the_engine_core_in_many_worlds(first: int) -> None:
    assert sum(play(random_world(seed), PlainTwin) for seed in range(first, first + 20)) > 50


@pytest.mark.promise("twin-decides-agent-s")
@pytest.mark.timeout(900)  # the first time it compiles, on however loaded a machine
def test_machine_code_does_what_the_engine_core_does() -> None:
    assert sum(play(random_world(seed), CompiledTwin) for seed in range(24)) > 1000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_machine_code_does_what_the_engine_core_does_for_long() -> None:
    steps = sum(play(lengthened(random_world(seed), 20.0), CompiledTwin) for seed in range(100, 140))
    assert steps > 50_000


DEFECTS: dict[str, tuple[int | World, str, str, str]] = {
    # With a small world that shows it, the kernel, and what is altered there.
    "the newest instance wins a tie": (
        11,
        "slots",
        "return ours.tie < theirs.tie",
        "return ours.tie > theirs.tie",
    ),
    "overdue one step late": (5, "slots", "home.skips == home.max_skips", "home.skips > home.max_skips"),
    "a slot is free before its last reader": (
        67,
        "slots",
        "w.links[i].block)\n    instance.block",
        "0)\n    instance.block",
    ),
    "spacing counts launches, not tasks": (
        12,
        "ledger",
        "launcher.interval_s * count",
        "launcher.interval_s",
    ),
    "the spacing of the plan before goes on": (
        137,
        "ledger",
        "launcher.next_s = launcher.last_s + launcher.interval_s * launcher.last_count",
        "launcher.next_s = launcher.next_s",
    ),
    "the queue holds one more": (
        12,
        "ledger",
        "launcher.queued >= launcher.max_tasks",
        "launcher.queued > launcher.max_tasks",
    ),
    "early launches though strict": (67, "ledger", "early and launcher.work_conserving", "early"),
    "the youngest moves first": (
        26,
        "board",
        "instance.id < w.instances[best].id",
        "instance.id > w.instances[best].id",
    ),
    "a step waits for no reader": (
        35,
        "slots",
        "after |= slot.readers or slot.writers\n        slot.writers, slot.readers = bit, 0\n    slot",
        "slot.writers, slot.readers = bit, 0\n    slot",
    ),
    "the fullest lane first": (
        7,
        "board",
        "range(w.clock[0].max_load)",
        "range(w.clock[0].max_load - 1, -1, -1)",
    ),
    "behind what merely overwrites": (
        0,
        "board",
        "and (made or track.blocks == 1)",
        "and track.blocks > 0",
    ),
    "a member begins though it waits for another lane": (
        3,
        "board",
        "if not lanes or (home.lanes == 1 and lanes == 1):",
        "if lanes >= 0:",
    ),
    "the replica with the least room": (53, "slots", "found > best_room", "found < best_room"),
    "any replica at once": (0, "slots", "if best == NOBODY and target.at_once:", "if best == NOBODY:"),
    "the last deadline counts": (
        58,
        "slots",
        "earliest_s = min(earliest_s, w.instances",
        "earliest_s = min(NEVER, w.instances",
    ),
    "launches do not compete by deadline": (
        10,
        "ledger",
        "w.combined[launched].rank <= earliest_s",
        "w.combined[launched].rank > earliest_s",
    ),
    "a backlog without deadlines takes all": (
        48,
        "ledger",
        "max(row.arrived_s + launcher.patience_s, turn_s)",
        "row.arrived_s + launcher.patience_s",
    ),
    "a batch is ranked by a task that has ended": (
        136,
        "ledger",
        "rank(w, index, w.rows[index, first + 1])",
        "instance.expires_s = w.rows[index, first + 1].arrived_s + w.models[instance.model].deadline_s",
    ),
    "endless patience": (
        10,
        "ledger",
        "max(row.arrived_s + launcher.patience_s, turn_s)",
        "max(NEVER, turn_s)",
    ),
    "idle lanes are paid for": (
        48,
        "ledger",
        "min(turn_s + spacing_s, now + patience_s)",
        "turn_s + spacing_s",
    ),
    "no queued task is given up": (19, "ledger", "if deadline_s - now > least_s:", "if least_s >= 0.0:"),
    "no launched task is given up": (
        134,
        "ledger",
        "oldest.arrived_s + deadline_s - now > least_s",
        "least_s >= 0.0",
    ),
    "no task that never had the time is tried": (
        HOPELESS,
        "ledger",
        "if is_alone(w, plan, model, NOBODY, lanes, now):",
        "if False:",
    ),
    "a task that is tried is given up when others are": (
        HOPELESS,
        "ledger",
        "if is_alone(w, plan, NOBODY, launched, lanes, now):",
        "if False:",
    ),
    "a task that is tried gives way to none": (
        HOPELESS,
        "ledger",
        "if is_alone(w, plan, NOBODY, launched, lanes, now):",
        "if True:",
    ),
    "no doubt of a pace where a task was tried": (
        HOPELESS,
        "ledger",
        "doubt_pace(w, target)\n            drop_row",
        "pass\n            drop_row",
    ),
    "an idle lane launches early by deadline alone": (
        8,
        "engine",
        "ready_s(w, model, idle, lanes)",
        "ready_s(w, model, by_deadline and idle, lanes)",
    ),
    "the pace follows long steps at once": (
        9,
        "slots",
        "known_s and known_s < seconds:",
        "known_s and False:",
    ),
    "no doubt of a pace": (151, "slots", "w.slots[s].least_s *= DOUBT", "w.slots[s].least_s *= 1.0"),
    "a step is thought to begin when it is issued": (
        9,
        "board",
        "now - max(step.issued_s, lane.free_s)",
        "now - step.issued_s",
    ),
    "arrivals before endings": (
        13,
        "engine",
        "if at_s == clock.next_end_s:",
        "if at_s == clock.next_end_s and at_s != arrival_s:",
    ),
}


@pytest.mark.promise("twin-decides-agent-s")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(name: str) -> None:
    world, kernel, before, after = DEFECTS[name]

    class Defective(PlainTwin):
        run_kernels = staticmethod(plain_kernels({kernel: (before, after)}))

    with pytest.raises(Differ):
        play(_world(world), Defective)
