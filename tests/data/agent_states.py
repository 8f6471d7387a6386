"""Makes `agent_states/VERSION/`: state files of an agent, written by that version's own code.

    git archive 5cfc748 | tar -x -C /tmp/version_0_1_0
    PYTHONPATH=benchmarks/adversary/older:/tmp/version_0_1_0 python tests/data/agent_states.py 0_1_0
    python tests/data/agent_states.py TODAY

One file per way in which a start can find plans; `states.json` holds what that version reads of each, as JSON
values, bytes as base64.
"""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.trial import TrialRecord
from stageloom.shared.messages.control import (
    ArtifactNeed,
    Autonomy,
    Desired,
    DeviceState,
    Origin,
    ProfileRequest,
)

_MODULES = ("lifecycle.states", "lifecycle.statefile", "link.events", "link.statefile", "plans.fallback")


def _of(*names: str) -> Any:
    """A class under one of its names: 0.1.0 kept the state apart from the transitions."""
    for module in _MODULES:
        with suppress(ImportError):
            module_found = import_module(f"stageloom.edge_agent.{module}")
            for name in names:
                if hasattr(module_found, name):
                    return getattr(module_found, name)
    raise LookupError(names)


def states() -> dict[str, Any]:
    """The states by name: each is what the device believed when it stopped."""
    ref, runnable, planned = _of("PlanRef"), _of("RunnablePlan"), _of("Planned")
    link_state, local_attempt, proven = _of("LinkState"), _of("LocalAttempt", "PlanAttempt"), _of("Proven")
    need = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)
    good = runnable(ref(digest_bytes([b"good"]), Origin.PLANNER), b"good", (need,))
    local = runnable(ref(digest_bytes([b"local"]), Origin.LOCAL, 3), b"local", (need,))
    desired = Desired(
        epoch=2,
        generation=7,
        plan_digest=digest_bytes([b"plan"]),
        plan=b"plan",
        artifacts=(need,),
        profiles=(ProfileRequest(4, need),),
        autonomy=Autonomy.FULL,
    )
    record = TrialRecord(
        candidate=digest_bytes([b"plan"]),
        control=good.ref.digest,
        environment="15 W",
        began_us=1_700_000_000_000_000,
    )
    local_record = TrialRecord(
        candidate=local.ref.digest,
        control=good.ref.digest,
        environment="15 W",
        began_us=1_700_000_000_000_001,
    )
    why = planned(epoch=2, generation=7, cause="variance")
    common = {
        "revision": 12,
        "desired": desired,
        "environment": "15 W",
        "active": good.ref,
        "last_good": good,
        "proven": (proven(good.ref.digest, "15 W"),),
        "local_counter": 3,
        "answered": (4,),
    }
    return {
        "received": link_state(**common, state=DeviceState.RECEIVED),
        "trial": link_state(**common, state=DeviceState.TRIAL, trial=record, abandoned=1),
        "probation": link_state(
            **{**common, "active": ref(desired.plan_digest, Origin.PLANNER)},
            state=DeviceState.PROBATION,
            trial=record,
            way="guard",
            probation_boots=1,
        ),
        "rejected": link_state(**common, state=DeviceState.REJECTED, reason="worse by more than 2%"),
        "local_trial": link_state(
            **common,
            state=DeviceState.NO_GAIN,
            local=local_attempt(
                plan=local, planned=why, state=DeviceState.TRIAL, record=local_record, way="trial"
            ),
        ),
        "local_probation": link_state(
            **{**common, "active": local.ref},
            state=DeviceState.REJECTED,
            reason="worse",
            local=local_attempt(
                plan=local, planned=why, state=DeviceState.PROBATION, record=local_record, way="proven"
            ),
        ),
        "local_good": link_state(
            **{**common, "active": local.ref, "last_good": local},
            state=DeviceState.COMMITTED,
            planned=why,
            barred=(digest_bytes([b"worse"]),),
        ),
    }


def main(version: str) -> None:
    folder = Path(__file__).parent / "agent_states" / version
    folder.mkdir(parents=True, exist_ok=True)
    read = {}
    for name, state in states().items():
        _of("save_state")(folder / name, state)
        read[name], problem = _of("load_state")(folder / name)
        assert problem is None and read[name] == state
    _of("FallbackFile")(folder / "fallback").save(states()["local_good"].last_good)
    values = msgspec.to_builtins(read, builtin_types=())
    (folder / "states.json").write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
