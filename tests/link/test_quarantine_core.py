"""Quarantine in the planner's core, event by event."""

import pytest

from stageloom.planner.counters import (
    CEILING,
    CHANGES_AHEAD,
    EPOCHS_AHEAD,
    GENERATIONS_AHEAD,
    SEQUENCES,
    beyond_reach,
    rows_beyond_reach,
)
from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import FleetMember
from stageloom.shared.messages import control, telemetry
from stageloom.shared.messages.base import RefusalCode
from stageloom.shared.messages.telemetry import Ledger, RowRange
from tests.link.test_planner_core import KEY, A, beat, code, core_with, hello, sent

FAR = 2 + EPOCHS_AHEAD


def reported(**report: int) -> control.Reported:
    return control.Reported(boot=1, report=control.Report(**report))  # type: ignore[arg-type]


@pytest.mark.promise("device-counts-too-far")
@pytest.mark.parametrize(
    ("counter", "limit"),
    [
        ("epoch", 1 + EPOCHS_AHEAD),
        ("generation", 5 + GENERATIONS_AHEAD),
        ("revision", 7 + CHANGES_AHEAD),
        ("local_counter", 8 + CHANGES_AHEAD),
    ],
)
def test_a_counter_may_come_to_its_limit_above_what_is_known_and_no_further(counter: str, limit: int) -> None:
    known = control.Report(revision=7, local_counter=8, generation=4)
    for value, refused in ((limit, False), (limit + 1, True)):
        said = beyond_reach(reported(**{counter: value}), epoch=1, generation=5, known=known)
        assert bool(said) is refused
    assert counter.replace("_", " ") in said and str(limit) in said


def test_what_is_known_lifts_no_limit_above_the_ceiling() -> None:
    report = reported(epoch=CEILING + 1)
    assert beyond_reach(report, epoch=CEILING, generation=0, known=None)
    assert not beyond_reach(reported(epoch=CEILING), epoch=CEILING, generation=0, known=None)


@pytest.mark.parametrize(
    ("last", "produced", "dropped"), [(SEQUENCES, 0, 0), (0, SEQUENCES, 0), (0, 0, SEQUENCES)]
)
def test_rows_of_a_boot_are_numbered_below_a_bound(last: int, produced: int, dropped: int) -> None:
    def batch(less: int) -> telemetry.TelemetryBatch:
        numbers = (max(number - less, 0) for number in (last, produced, dropped))
        end, *counts = numbers
        return telemetry.TelemetryBatch(
            rows=(b"x",), ranges=(RowRange(1, end, end),), ledgers=(Ledger(1, *counts),)
        )

    assert rows_beyond_reach(batch(0)) and not rows_beyond_reach(batch(1))


def test_nothing_of_the_message_is_stored_and_the_session_ends() -> None:
    core = core_with()
    core.handle(hello(), 0.0)
    actions = core.handle(hello(connection=2, epoch=FAR, generation=1, revision=9), 1.0)
    quarantine, refusal, gone = actions
    assert isinstance(quarantine, ev.Quarantine) and quarantine.device == A
    assert isinstance(refusal, ev.Send) and gone == ev.PresenceChanged(A, False)
    assert code(actions) is RefusalCode.QUARANTINED
    assert code(core.handle(beat(0), 1.1)) is RefusalCode.QUARANTINED
    assert core.epoch == 1 and core.may_connect(KEY), "it connects, to be told why it is refused"


def test_a_quarantine_that_is_not_stored_is_begun_again_by_the_next_message_of_its_kind() -> None:
    core = core_with()
    core.handle(hello(epoch=FAR, generation=1), 0.0)
    core.handle(ev.QuarantineStored(A, ok=False), 0.1)
    actions = core.handle(hello(epoch=FAR, generation=1), 0.2)
    assert any(isinstance(action, ev.Quarantine) for action in actions)


def test_a_released_device_is_let_in_and_one_that_was_stored_as_quarantined_is_not() -> None:
    member = FleetMember(A, KEY, quarantine="it says epoch 9")
    core = DispatchCore([member], epoch=1, config=DispatchConfig())
    assert code(core.handle(hello(), 0.0)) is RefusalCode.QUARANTINED
    core.handle(ev.Released(A), 0.1)
    assert any(isinstance(message, control.Welcome) for message in sent(core.handle(hello(), 0.2)))
