"""Random plans, loads and swaps: the invariants hold, and the simulator would notice if they did not.

Checked in every scenario, after every event: each task ends in exactly one way and none runs twice; its data
pass through every block exactly once, in order, and arrive unchanged; one instance per (replica, block); no
slot is overwritten before its last reader; `Step.after` is the exact set; lanes, run-ahead, queue bounds,
launch spacing, starvation bound, exact deadlines; nothing is left at the end and every plan is released.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.choice import Rivals
from stageloom.shared.engine.queues import Launcher
from stageloom.shared.engine.slots import Slot, Touched
from stageloom.shared.engine.steps import Action, MoveInstance, Outcome, Step
from tests.engine.memory import Wrong
from tests.engine.played import PlayedEngine
from tests.engine.simulator import Scenario

CHUNKS = 12
USUAL_CHUNKS = 6
"""Of every run; the marker `full` has the others, and six thousand more scenarios."""
SEEDS_PER_CHUNK = 25


@pytest.mark.promise("under-seeded-simulator-over", "step-waits-another-lane")
@pytest.mark.parametrize(
    "chunk",
    [pytest.param(chunk, marks=[] if chunk < USUAL_CHUNKS else pytest.mark.full) for chunk in range(CHUNKS)],
)
def test_invariants_hold_over_random_plans_and_swaps(chunk: int) -> None:
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        Scenario(seed).run()


@pytest.mark.promise("under-seeded-simulator-over")
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_invariants_hold_over_many_random_plans_and_swaps() -> None:
    for seed in range(10_000, 16_000):
        Scenario(seed).run()


def test_a_shared_task_that_is_given_up_leaves_the_model_that_launched_it_at_once() -> None:
    """The one of 16,000 scenarios in which a block stood for election whose only task had been given up."""
    Scenario(11_296).run()


@pytest.mark.promise("under-seeded-simulator-over")
def test_scenarios_exercise_every_mechanism() -> None:
    seen: Counter[str] = Counter()
    wanted = {"moves", "drops", "swaps", "staged", "fallbacks", "waits", "shared", "given_up"}
    wanted |= {"copies", "placed"}
    for seed in range(40):
        tally = Scenario(seed).run()
        seen.update({outcome.value: count for outcome, count in tally.outcomes.items()})
        for name in wanted:
            seen[name] += getattr(tally, name)
    assert {name for name, count in seen.items() if count} == wanted | {o.value for o in Outcome}


def test_a_scenario_is_the_same_every_time() -> None:
    assert Scenario(5).run() == Scenario(5).run()


# Planted defects: each one must be noticed, by the device's memory where data are at stake.


def _outcome(error: type[BaseException], scenario: Scenario) -> str | None:
    try:
        scenario.run()
    except error as caught:
        return str(caught)
    return None


def _first_caught(error: type[BaseException], make: Callable[[int], Scenario], seeds: int = 300) -> str:
    for seed in range(seeds):
        caught = _outcome(error, make(seed))
        if caught is not None:
            return caught
    raise AssertionError(f"the defect went unnoticed in {seeds} scenarios")


def _drop_one_dependency(random: Random) -> Callable[[Action], Action]:
    def spoil(action: Action) -> Action:
        if isinstance(action, Step) and action.after:
            after = list(action.after)
            after.pop(random.randrange(len(after)))
            return structs.replace(action, after=tuple(after))
        return action

    return spoil


@pytest.mark.promise("simulator-catches-planted-defects")
def test_memory_notices_a_dropped_dependency() -> None:
    _first_caught(
        Wrong, lambda seed: Scenario(seed, spoil=_drop_one_dependency(Random(seed)), check_after=False)
    )


def test_hazard_check_notices_a_dropped_dependency() -> None:
    caught = _first_caught(
        AssertionError, lambda seed: Scenario(seed, spoil=_drop_one_dependency(Random(seed)))
    )
    assert "not the exact set" in caught


@pytest.mark.promise("simulator-catches-planted-defects")
def test_hazard_check_notices_a_needless_dependency() -> None:
    def spoil(action: Action) -> Action:
        if isinstance(action, Step) and action.id > 0:
            extra = {*action.after, action.id - 1}
            return structs.replace(action, after=tuple(sorted(extra)))
        return action

    caught = _first_caught(AssertionError, lambda seed: Scenario(seed, spoil=spoil))
    assert "not the exact set" in caught


@pytest.mark.more
@pytest.mark.promise("simulator-catches-planted-defects")
def test_memory_notices_an_output_that_is_not_staged() -> None:
    def spoil(action: Action) -> Action:
        if isinstance(action, Step):
            members = tuple(structs.replace(member, staged=False) for member in action.members)
            return structs.replace(action, members=members)
        return action

    caught = _first_caught(Wrong, lambda seed: Scenario(seed, spoil=spoil, check_after=False))
    assert "overwritten while" in caught


def test_memory_notices_a_move_that_does_not_wait() -> None:
    def spoil(action: Action) -> Action:
        return structs.replace(action, after=()) if isinstance(action, MoveInstance) else action

    _first_caught(Wrong, lambda seed: Scenario(seed, spoil=spoil, check_after=False))


def _free_slots_early(bound: BoundPlan) -> BoundPlan:
    models = tuple(replace(m, slot_readers=tuple(range(len(m.blocks)))) for m in bound.models)
    return replace(bound, models=models)


@pytest.mark.promise("simulator-catches-planted-defects")
def test_memory_notices_a_slot_that_is_released_early() -> None:
    _first_caught(Wrong, lambda seed: Scenario(seed, misread=_free_slots_early, check_after=False))


def _read_own_slot_only(bound: BoundPlan) -> BoundPlan:
    models = tuple(replace(m, slot_reads=tuple((b.index,) for b in m.blocks)) for m in bound.models)
    return replace(bound, models=models)


def test_memory_notices_a_read_that_the_core_does_not_know_of() -> None:
    _first_caught(Wrong, lambda seed: Scenario(seed, misread=_read_own_slot_only, check_after=False))


@pytest.mark.promise("simulator-catches-planted-defects")
def test_audit_notices_starvation(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_overdue(self: Rivals) -> None:
        self.turns += 1

    monkeypatch.setattr(Rivals, "take_turn", never_overdue)
    assert "passed over" in _first_caught(AssertionError, Scenario)


@pytest.mark.promise("simulator-catches-planted-defects")
def test_audit_notices_a_launch_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Launcher.due_s

    def hasty(self: Launcher, *, early: bool = False) -> float:
        return honest(self, early=early) - 1e-3

    monkeypatch.setattr(Launcher, "due_s", hasty)
    assert "launched" in _first_caught(AssertionError, Scenario)


def test_audit_notices_a_slot_that_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Slot.vacate

    def leaky(self: Slot, touched: Touched) -> None:
        instance = self.instance
        honest(self, touched)
        self.track.slots[0].holder = instance

    monkeypatch.setattr(Slot, "vacate", leaky)
    _first_caught(AssertionError, Scenario)


@pytest.mark.promise("simulator-catches-planted-defects")
def test_memory_notices_a_lost_move() -> None:
    class Forgetful(PlayedEngine):
        def carry_out(self, action: Action) -> None:
            if not isinstance(action, MoveInstance):
                super().carry_out(action)

    _first_caught(Wrong, lambda seed: Scenario(seed, check_after=False, engine=Forgetful))
