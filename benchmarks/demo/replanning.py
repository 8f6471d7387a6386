"""One burst after another, each answered by another proposer from the same first plan."""

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from benchmarks.demo.clients import Clients
from benchmarks.demo.comparison import NAMES
from benchmarks.demo.processes import DemoFailed
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ReplanInfo
from stageloom.shared.messages.control import DeviceState

CALM_S: Final = 3.0  # before a burst: the trigger is armed, and has samples of the usual load
BURST_S: Final = 4.0
MEMBERS_MAX: Final = 3  # H, of the plain replanner as of the policy
BURSTS_MOST: Final = 3
ALARM_WITHIN_S: Final = 20.0  # a burst's client takes a while to start, and alarms have a cool-down


class Replanning:
    """`answer` for each proposer, `run_again` between them."""

    def __init__(
        self,
        device: str,
        planner: Callable[..., Any],
        clients: Clients,
        store: ReadStore,
        say: Callable[[str], None],
        *,
        patience_s: float,
    ) -> None:
        self._device = DeviceId(device)
        self._planner = planner
        self._clients = clients
        self._store = store  # looked at between commands: a process a second would disturb what is measured
        self._say = say
        self._patience_s = patience_s

    def answer(self, proposer: str, model: str, rate_per_s: float, *, search_s: float = 10.0) -> int:
        """Cause a burst of one model, and wait for what one proposer's re-plan comes to; its number.

        Raises:
            DemoFailed: no queue diverged, or the device never decided.
        """
        self._clients.pause(CALM_S)
        how = ("--on", "--proposer", proposer, "--budget", f"{search_s:g}", "--members-max", str(MEMBERS_MAX))
        self._planner("device", "replan", self._device, *how)
        before = max((one.replan for one in self._replans()), default=0)
        self._say(f"{NAMES[proposer]} is asked")

        def begun() -> ReplanInfo | None:
            return min(
                (one for one in self._replans() if one.replan > before),
                key=lambda one: one.replan,
                default=None,
            )

        self._burst_until(lambda: begun() is not None, model, rate_per_s)
        self._clients.watch("the re-plan to be decided", lambda: _decided(begun()), self._patience_s)
        self._planner("device", "replan", self._device, "--off")
        found = begun()
        assert found is not None
        ratio = "" if found.ratio is None else f", ratio {found.ratio:.3f}"
        self._say(f"{NAMES[proposer]}: {found.outcome.replace('_', ' ')}{ratio} {found.reason}".strip())
        return found.replan

    def _burst_until(self, begun: Callable[[], bool], model: str, rate_per_s: float) -> None:
        """Bursts, each twice the one before: the machine may have become faster since it was calibrated.

        Raises:
            DemoFailed: none of them led to a re-plan.
        """
        for _ in range(BURSTS_MOST):
            self._say(f"a burst of {model}, {rate_per_s:.0f}/s for {BURST_S:g} s")
            self._clients.burst(model, rate_per_s, BURST_S)
            until_s = time.monotonic() + ALARM_WITHIN_S
            self._clients.watch(
                "a queue to diverge", partial(_begun_or_late, begun, until_s), 2 * ALARM_WITHIN_S
            )
            if begun():
                return
            rate_per_s *= 2.0
        raise DemoFailed("no burst made a queue diverge enough for a re-plan")

    def run_again(self, plan: str) -> None:
        """Have the device run this plan, if it does not: the next answer begins where the last did."""
        if self._runs(plan):
            return
        self._say(f"the device runs {plan} again")
        self._planner("plan", "push", self._device, plan, "--now")
        self._clients.watch(f"{plan} to run again", lambda: self._runs(plan), self._patience_s)

    def run_best(self, answers: Collection[int]) -> None:
        """Have the device run on with the best of the plans that won their trials there; it is proven."""
        won = [one for one in self._replans() if one.replan in answers and _won(one)]
        best = max(won, key=lambda one: one.ratio or 0.0, default=None)
        if best is None or self._runs(best.plan):
            return
        self._say(f"the device runs on with {best.plan}, the best of those that won")
        self._planner("plan", "push", self._device, best.plan)
        self._clients.watch(f"{best.plan} to run again", lambda: self._runs(best.plan), self._patience_s)

    def _runs(self, plan: str) -> bool:
        report = self._store.read(device_info, self._device).report
        return (
            report.active == self._store.read(plan_info, plan).digest
            and report.state is DeviceState.COMMITTED
        )

    def _replans(self) -> list[ReplanInfo]:
        return list(self._store.read(replan_infos, self._device, limit=20))


def _begun_or_late(begun: Callable[[], bool], until_s: float) -> bool:
    return begun() or time.monotonic() > until_s


def _won(replan: ReplanInfo) -> bool:
    return replan.outcome == "committed" and replan.ratio is not None


def _decided(replan: ReplanInfo | None) -> bool:
    """It has its outcome, and the row with the trial's figures has come, too."""
    return replan is not None and replan.outcome != "pending" and replan.trigger_to_decision_ms is not None
