"""Bring a plan to many devices, one of them first: the others get it once it has proved itself there.

    python -m examples.rollout PLAN FIRST --planner https://planner.example:7424 --token-file ci.token

FIRST tries the plan against the one that it runs. If that commits it, every other device of the same class
is pushed the plan as well, and tries it for itself. The token needs the role `operator`.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.schema.device import DeviceListRequest, DeviceShowRequest
from stageloom.planner.schema.plan import (
    MAX_PUSHED,
    HistoryEntry,
    PlanHistoryRequest,
    PlanPushRequest,
    Pushed,
)
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId

ENDS: Final = ("committed", "rejected", "no_gain", "rolled_back", "superseded")
POLL_S: Final = 1.0


def push(client: PlannerClient, plan: str, devices: list[DeviceId]) -> Iterator[Pushed]:
    """Desire the plan on devices, as many in one transaction as it takes."""
    for at in range(0, len(devices), MAX_PUSHED):
        some = tuple(devices[at : at + MAX_PUSHED])
        yield from client.call(routes.PLAN_PUSH, PlanPushRequest(plan=plan, devices=some)).pushed


def outcome(client: PlannerClient, pushed: Pushed, patience_s: float) -> HistoryEntry:
    """The generation of a push, once it has ended.

    Raises:
        TimeoutError: it has not, for so long: it may be offline.
    """
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        page = client.call(routes.PLAN_HISTORY, PlanHistoryRequest(device=pushed.device, limit=16))
        for entry in page.items:
            mine = (entry.epoch, entry.generation) == (pushed.epoch, pushed.generation)
            if mine and entry.state in ENDS:
                return entry
        time.sleep(POLL_S)
    raise TimeoutError(f"{pushed.device} has not decided within {patience_s:.0f} s")


def roll_out(client: PlannerClient, plan: str, first: DeviceId, patience_s: float) -> int:
    """How many devices have the plan now, the first one included; 0 if it decided against the plan."""
    device_class = client.call(routes.DEVICE_SHOW, DeviceShowRequest(device=first)).device.device_class
    (pushed,) = push(client, plan, [first])
    if pushed.cause:
        print(f"{first}: {pushed.cause}")
        return 0
    end = outcome(client, pushed, patience_s)
    print(f"{first}: {end.state}{f', {end.reason}' if end.reason else ''}")
    if end.state != "committed":
        return 0
    others = [
        info.device
        for info in client.pages(routes.DEVICE_LIST, DeviceListRequest())
        if info.device != first and info.device_class == device_class and not info.revoked
    ]
    done = 1
    for entry in push(client, plan, others):
        print(f"{entry.device}: {entry.cause or 'pushed'}")
        done += not entry.cause
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Push a plan to one device, then to all of its class.")
    parser.add_argument("plan")
    parser.add_argument("first", type=DeviceId)
    parser.add_argument("--planner", required=True, help="https://HOST:PORT")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--patience", type=float, default=180.0, help="seconds that the first one may take")
    options = parser.parse_args()
    try:
        with PlannerClient(url=options.planner, token=options.token_file.read_text()) as client:
            done = roll_out(client, options.plan, options.first, options.patience)
    except (StageloomError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if not done:
        raise SystemExit("the plan is not rolled out")
    print(f"{options.plan} is on {done} devices")


if __name__ == "__main__":
    main()
