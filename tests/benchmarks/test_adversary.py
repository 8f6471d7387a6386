"""What counts as broken by a flood or by the ping attack: each bound by itself."""

from dataclasses import replace

import pytest

from benchmarks.adversary.beside import MOST_GROWN_MIB, Noticed
from benchmarks.adversary.pinged import Survived

HELD = Noticed(
    sent=1, alone_p99_ms=100.0, p99_ms=300.0, unanswered=0, died=0, grown_mib=MOST_GROWN_MIB, alive=True
)
SURVIVED = Survived(
    aborts=0, admitted=1, refused=0, sent_mib=1.0, acknowledged=5, lost=0, unanswered=0, grown_mib=1.0
)


def test_what_stays_within_every_bound_is_held() -> None:
    assert HELD.broken == "" and replace(HELD, alone_p99_ms=1.0, p99_ms=250.0).broken == ""
    assert SURVIVED.broken == ""


@pytest.mark.parametrize(
    "noticed",
    [
        replace(HELD, p99_ms=301.0),
        replace(HELD, alone_p99_ms=1.0, p99_ms=251.0),
        replace(HELD, unanswered=1),
        replace(HELD, died=1),
        replace(HELD, grown_mib=MOST_GROWN_MIB + 1),
        replace(HELD, alive=False),
    ],
)
def test_a_flood_beyond_one_bound_is_not_held(noticed: Noticed) -> None:
    assert noticed.broken


@pytest.mark.parametrize(
    "survived", [replace(SURVIVED, aborts=1), replace(SURVIVED, lost=1), replace(SURVIVED, unanswered=1)]
)
def test_an_abort_or_anything_lost_under_pings_is_told(survived: Survived) -> None:
    assert survived.broken
