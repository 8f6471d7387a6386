"""A contest from the command line: the best so far while it goes on, its curve; Ctrl-C keeps the best."""

import secrets
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final

import msgspec

from stageloom.planner.admin.client import TIMEOUT_S, ask
from stageloom.planner.cli.output import progress
from stageloom.shared.messages import admin

_POLL_S: Final = 0.25
_BAR: Final = 30


def hold(folder: Path, request: admin.PlanCreateRequest) -> admin.PlanReply:
    """Ask for a contest and show it.

    Ctrl-C ends it with the best so far, which is looked at once more; another one skips that.

    Raises:
        AdminRefused, UnavailableError: as `ask`.
    """
    ticket = 1 + secrets.randbelow(2**53 - 1)
    wanted = msgspec.structs.replace(request, ticket=ticket)
    timeout_s = TIMEOUT_S + 2.0 * (request.budget_s or 0.0)
    reply: Future[admin.PlanReply] = Future()

    def wait_for_it() -> None:
        try:
            reply.set_result(ask(folder, wanted, admin.PlanReply, timeout_s=timeout_s))
        except BaseException as error:
            reply.set_exception(error)

    threading.Thread(target=wait_for_it, daemon=True).start()
    while not _watched(folder, ticket, reply, request.budget_s or 0.0):
        progress("\nending with the best so far, looked at once more; Ctrl-C again skips that")
        ask(folder, admin.PlanCancelRequest(ticket=ticket), admin.Done, timeout_s=5.0)
    return reply.result()


def _watched(folder: Path, ticket: int, reply: "Future[admin.PlanReply]", budget_s: float) -> bool:
    """Whether it was watched to its end, and not left by Ctrl-C."""
    try:
        _watch(folder, ticket, reply, budget_s)
    except KeyboardInterrupt:
        return False
    return True


def _watch(folder: Path, ticket: int, reply: "Future[admin.PlanReply]", budget_s: float) -> None:
    """Until there is a reply: a redrawn line on a terminal, elsewhere one for each new best so far."""
    shown = ""
    while not wait([reply], timeout=_POLL_S).done:
        now = ask(folder, admin.PlanProgressRequest(ticket=ticket), admin.PlanProgressReply)
        if not now.size:
            continue
        best = f"best so far {now.best}: {_worth(now)}" if now.best else "the first plan is being judged"
        if sys.stderr.isatty():
            filled = round(_BAR * min(now.elapsed_s / budget_s, 1.0))
            bar = "#" * filled + "." * (_BAR - filled)
            sys.stderr.write(f"\r\x1b[K[{bar}] {now.done} of {now.size} judged, {best}")
            sys.stderr.flush()
        elif best != shown:
            progress(f"{now.elapsed_s:.1f} s, {now.done} of {now.size} judged, {best}")
        shown = best
    if shown and sys.stderr.isatty():
        sys.stderr.write("\n")


def tell(contest: admin.TournamentInfo) -> None:
    """The curve and what came of it, for whoever reads stderr."""
    progress(f"judged on a twin ({contest.twin}); arrivals: {contest.arrivals}")
    for failure in contest.failed:
        progress(f"{failure.name} took no part: {failure.reason}")
    for point in (one for one in contest.judged if one.led):
        progress(f"  {point.at_s:6.1f} s  {point.name:30}  {_worth(point)}")
    if contest.left:
        progress(f"{contest.left} more were not judged in time")
    for figures in contest.fresh:
        progress(f"on fresh arrivals {figures.name}: {_worth(figures)}")
    if contest.unchecked:
        progress(f"the first valid plan is taken: {contest.unchecked}")


def _worth(one: admin.PlanProgressReply | admin.TournamentFigures) -> str:
    return f"{one.throughput_per_s:.1f} tasks/s, p99 {1e3 * one.p99_s:.1f} ms"
