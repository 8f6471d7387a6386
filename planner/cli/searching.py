"""Searches from the command line: progress, Ctrl-C that ends them, rounds of measuring, tournaments."""

import secrets
import sys
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from stageloom.planner.admin.client import TIMEOUT_S, ask
from stageloom.planner.cli.options import reading
from stageloom.planner.cli.output import progress
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin

_ROUNDS = 4
_POLL_S = 0.2
_MEASURE_S = 120.0


@dataclass(frozen=True, slots=True)
class StagesMeasured:
    """What came of asking a device to measure a plan's stages."""

    requests: int  # one per combined block that has such stages
    reasons: tuple[str, ...] = ()  # why some of them were not measured


def search(folder: Path, request: admin.PlanCreateRequest) -> admin.PlanReply:
    """Ask for a plan and wait, saying every second how long it takes; Ctrl-C ends the search, too.

    Raises:
        AdminRefused, UnavailableError: as `ask`.
        KeyboardInterrupt: Ctrl-C, after the planner was told.
    """
    ticket = 1 + secrets.randbelow(2**53 - 1)
    wanted = msgspec.structs.replace(request, ticket=ticket)
    done = threading.Event()
    if sys.stderr.isatty():
        threading.Thread(target=_tell, args=(done,), daemon=True).start()
    try:
        return ask(folder, wanted, admin.PlanReply, timeout_s=TIMEOUT_S + 2.0 * (request.budget_s or 0.0))
    except KeyboardInterrupt:
        ask(folder, admin.PlanCancelRequest(ticket=ticket), admin.Done, timeout_s=5.0)
        raise
    finally:
        done.set()


def search_and_measure(
    folder: Path, database_url: str, request: admin.PlanCreateRequest, device: DeviceId, *, budget_s: float
) -> admin.PlanReply:
    """Search, have the device measure what nobody is sure of, search again, until nothing is asked.

    Stages of two plans: the one chosen, and the runner-up that would be chosen if all unsure stages took the
    least that they may. Once both are sure, no stage left unmeasured could have made a better plan but by
    taking less than its interval. At most four rounds.

    Raises:
        UnavailableError: the device does not answer in time.
    """
    unnamed = msgspec.structs.replace(request, plan=None)
    for number in range(1, _ROUNDS + 1):
        chosen = search(folder, unnamed)
        runner_up = search(folder, msgspec.structs.replace(unnamed, optimistic=True))
        asked = False
        for plan in dict.fromkeys((chosen.plan.plan, runner_up.plan.plan)):
            progress(f"round {number}: {device} measures the unsure stages of {plan}")
            found = measure_stages(folder, database_url, device, plan, budget_s=budget_s, unsure_only=True)
            asked = asked or found.requests > 0
        if not asked:
            break
    return search(folder, request)


def measure_stages(
    folder: Path,
    database_url: str,
    device: DeviceId,
    plan: str,
    *,
    budget_s: float,
    unsure_only: bool = False,
) -> StagesMeasured:
    """Have a device measure a plan's stages, all or the unsure ones, and wait.

    Raises:
        UnavailableError: it does not answer in time.
    """
    from stageloom.planner.store.profiles import answer_reasons, open_requests

    wanted = admin.StageProfileCreate(device=device, plan=plan, budget_s=budget_s, unsure_only=unsure_only)
    reply = ask(folder, wanted, admin.DeviceProfileReply)
    if not reply.requests:
        return StagesMeasured(0)
    give_up_s = time.monotonic() + _MEASURE_S + budget_s
    with reading(folder, database_url) as store:
        while store.read(open_requests, list(reply.requests)):
            if time.monotonic() > give_up_s:
                raise UnavailableError(
                    f"{device} has not measured the stages within {_MEASURE_S + budget_s:g} s",
                    remedy="it measures when it is online and idle; see `stageloom device show`",
                )
            time.sleep(_POLL_S)
        reasons = tuple(filter(None, store.read(answer_reasons, list(reply.requests)).values()))
        for reason in reasons:
            progress(f"not all stages were measured: {reason}")
        return StagesMeasured(len(reply.requests), reasons)


def _tell(done: threading.Event) -> None:
    began_s = time.monotonic()
    while not done.wait(1.0):
        progress(f"searching for {time.monotonic() - began_s:.0f} s; Ctrl-C ends it")


_PROGRESS_S: Final = 0.25
_BAR: Final = 30


def run_tournament(folder: Path, request: admin.PlanCreateRequest) -> admin.PlanReply:
    """Ask for a tournament and show its progress.

    Ctrl-C ends it with the best so far, which is evaluated once more; another Ctrl-C skips that.

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
        progress("\nending with the best so far, evaluated once more; Ctrl-C again skips that")
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
    while not wait([reply], timeout=_PROGRESS_S).done:
        now = ask(folder, admin.PlanProgressRequest(ticket=ticket), admin.PlanProgressReply)
        if not now.size:
            continue
        best = f"best so far {now.best}: {_score(now)}" if now.best else "the first plan is being evaluated"
        if sys.stderr.isatty():
            filled = round(_BAR * min(now.elapsed_s / budget_s, 1.0))
            bar = "#" * filled + "." * (_BAR - filled)
            sys.stderr.write(f"\r\x1b[K[{bar}] {now.done} of {now.size} evaluated, {best}")
            sys.stderr.flush()
        elif best != shown:
            progress(f"{now.elapsed_s:.1f} s, {now.done} of {now.size} evaluated, {best}")
        shown = best
    if shown and sys.stderr.isatty():
        sys.stderr.write("\n")


def tell(tournament: admin.TournamentInfo) -> None:
    """Tell a tournament's course and result on stderr."""
    progress(f"evaluated on a twin ({tournament.twin}); arrivals: {tournament.arrivals}")
    for failure in tournament.failed:
        progress(f"{failure.name} took no part: {failure.reason}")
    for point in (one for one in tournament.judged if one.led):
        progress(f"  {point.at_s:6.1f} s  {point.name:30}  {_score(point)}")
    if tournament.left:
        progress(f"{tournament.left} more were not evaluated in time")
    for figures in tournament.fresh:
        progress(f"on fresh arrivals {figures.name}: {_score(figures)}")
    if tournament.unchecked:
        progress(f"the first valid plan is taken: {tournament.unchecked}")


def _score(one: admin.PlanProgressReply | admin.TournamentFigures) -> str:
    return f"{one.throughput_per_s:.1f} tasks/s, p99 {1e3 * one.p99_s:.1f} ms"
