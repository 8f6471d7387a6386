"""Search processes come after what is served, in whatever session that runs."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stageloom.planner.cluster import priority
from stageloom.planner.cluster.priority import BEHIND_SERVING, come_after
from stageloom.planner.cluster.processes import ProcessPool
from stageloom.shared import session_nice

AUTOGROUP = Path("/proc/self/autogroup")


def standing() -> tuple[bool, int, str]:
    """Of a process: whether it leads a session, its niceness, and what the kernel says of its session."""
    group = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    return os.getsid(0) == os.getpid(), os.nice(0), group


def test_a_search_process_leads_a_session_that_is_as_nice_as_it_is() -> None:
    pool = ProcessPool(1)
    try:
        leads, nice, group = pool.submit(standing).result(60)
    finally:
        pool.close()
    assert leads
    assert nice == min(os.nice(0) + BEHIND_SERVING, 19)
    if os.access(AUTOGROUP, os.W_OK):
        assert group.split()[-2:] == ["nice", str(nice)]
        assert group != AUTOGROUP.read_text(), "the planner itself stays what it is"


@pytest.mark.parametrize(("refusals", "expected"), [(0, ["7"]), (2, ["7"]), (99, [])])
def test_a_session_is_set_again_where_another_was_set_a_moment_before(
    monkeypatch: pytest.MonkeyPatch, refusals: int, expected: list[str]
) -> None:
    written: list[str] = []
    left = [BlockingIOError()] * refusals

    def write(text: str) -> None:
        if left:
            raise left.pop()
        written.append(text)

    monkeypatch.setattr(session_nice, "_AUTOGROUP", SimpleNamespace(write_text=write))
    monkeypatch.setattr("os.nice", lambda niceness: 2 + niceness)
    monkeypatch.setattr(priority, "leads_session", lambda: True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    come_after(5)
    assert written == expected


def test_a_kernel_without_such_groups_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session_nice, "_AUTOGROUP", tmp_path / "nothing" / "autogroup")
    come_after(0)


def test_a_process_that_leads_no_session_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a twin are compiled in whatever session asks for it, a terminal's too."""
    written: list[str] = []
    monkeypatch.setattr(session_nice, "_AUTOGROUP", SimpleNamespace(write_text=written.append))
    monkeypatch.setattr("os.nice", lambda niceness: niceness)
    monkeypatch.setattr(priority, "leads_session", lambda: False)
    come_after(19)
    assert written == []
