"""The benchmark of a waking thread: the session beside it is as nice as its row says, or there is no row."""

import pytest

from benchmarks import waking
from stageloom.shared.errors import UnavailableError

_STAYS = "\nimport signal\nsignal.pause()"


@pytest.mark.parametrize(
    ("child", "problem"),
    [
        ("raise SystemExit(1)", "is not 5 nice, but ended or in no group"),
        ("print(flush=True)" + _STAYS, "is not 5 nice, but ended or in no group"),
        ("print('/autogroup-7 nice 0', flush=True)" + _STAYS, "is not 5 nice, but /autogroup-7 nice 0"),
    ],
    ids=["ended", "no groups", "not made nice"],
)
def test_there_are_no_waits_beside_a_session_that_is_not_as_nice_as_asked(
    child: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waking, "_COMPUTE", child)
    with pytest.raises(UnavailableError, match=problem):
        waking.waits_ms(5, 1)


def test_waits_are_measured_beside_a_session_that_says_it_is_so_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "_COMPUTE", "print('/autogroup-7 nice 5', flush=True)" + _STAYS)
    assert len(waking.waits_ms(5, 2)) == 2
