"""From the store to an `Observation`."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from stageloom.planner.costs.measured import STALE_S, device_costs
from stageloom.planner.costs.operators import OperatorCost
from stageloom.planner.costs.policies import trained_policy
from stageloom.planner.replan.considered import serves
from stageloom.planner.replan.observation import Observation
from stageloom.planner.store.costs import kept_schedules, operator_costs
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.policies import fitting_policy
from stageloom.planner.store.replans import Begun, barred_plans, begun_replan, committed_plans, plan_wires
from stageloom.planner.store.store import ReadStore, Snapshot
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.plain import Load

BARRED_S: Final = 3600.0
"""What did not gain on a device is not proposed there again for so long: its load may be another by then. Nor
does it count once the device's costs were renewed."""

_PROVEN_MOST: Final = 16
_PROVEN_LOOKED_AT: Final = 64  # plans that differ in launch intervals alone count once

_decoded = lru_cache(maxsize=256)(decode_plan)
"""A plan is a value: what a device runs and has proven is the same in every observation of it."""


def observe(store: ReadStore, device: DeviceId, replan: int, now_us: int) -> Observation:
    """What a policy sees of a re-plan's device: one snapshot.

    Raises:
        InputError: the alarm, the device or the plan that runs there is unknown here.
    """
    with store.snapshot() as view:
        begun = _begun(view, replan)
        environment = begun.device_class
        committed = view.read(committed_plans, device, environment)[:_PROVEN_LOOKED_AT]
        incumbent, proven = _plans(view, begun, committed)
        costs = device_costs(
            view,
            begun.calibration.costs_key,
            incumbent.executor,
            [(model.artifact, model.batch) for model in incumbent.models],
            graph_of=store.graph,
            now_us=now_us,
            taught_by=begun.calibration.taught_by,
        )
        barred_since_us = max(now_us - round(BARRED_S * 1e6), begun.calibration.at_us)
        barred = view.read(barred_plans, device, environment, barred_since_us)
    held = begun.calibration
    learned = store.read(
        fitting_policy, "maddpg", environment, [model.artifact for model in incumbent.models]
    )
    return Observation(
        device=device,
        cause=begun.alarm.cause,
        incumbent=incumbent,
        desired=begun.desired,
        loads=tuple(
            Load(
                model=load.model,
                arrivals_per_s=max(load.arrivals_per_s, 0.0),
                service_s=max(load.service_us, 0.0) / 1e6,
                queued=load.queued,
                oldest_age_s=load.oldest_age_us / 1e6,
            )
            for load in begun.alarm.loads
        ),
        samples=begun.alarm.samples,
        graphs={model.artifact: store.graph(model.artifact) for model in incumbent.models},
        costs=costs,
        proven=proven,
        barred=tuple(barred),
        settings=begun.settings,
        environment=environment,
        costs_key=held.costs_key,
        learned=learned,
        schedules=store.read(kept_schedules, [held.costs_key, *held.taught_by]) if learned else {},
        checkpoint=trained_policy(store, environment) if begun.settings.scheduler == "gpg" else b"",
    )


def without_costs(store: ReadStore, replan: int, now_us: int) -> list[str]:
    """Names of the incumbent's models of which there is no measured operator for the device, or no fresh one.

    Raises:
        InputError: as `observe`.
    """
    with store.snapshot() as view:
        begun, incumbent = running(view, replan)
        key = begun.calibration.costs_key
        missing = dict.fromkeys(
            model.artifact
            for model in incumbent.models
            if _old(view.read(operator_costs, key, model.artifact, model.batch), now_us)
        )
    if not missing:
        return []
    names = {model.digest: model.model for model in store.read(model_infos, limit=1_000_000)}
    return [names[artifact] for artifact in missing if artifact in names]


def running(view: Snapshot, replan: int) -> tuple[Begun, Plan]:
    """What a re-plan's alarm found, and the plan that runs.

    Raises:
        InputError: as `observe`.
    """
    begun = _begun(view, replan)
    return begun, _plans(view, begun, [])[0]


def _old(known: Mapping[int, OperatorCost], now_us: int) -> bool:
    """Whether nothing is known, or nothing that is not stale."""
    return all(cost.measured_at_us < now_us - STALE_S * 1e6 for cost in known.values())


def _begun(view: Snapshot, replan: int) -> Begun:
    begun = view.read(begun_replan, replan)
    if begun is None:
        raise InputError(f"there is no re-plan {replan}")
    return begun


def _plans(view: Snapshot, begun: Begun, committed: list[Digest]) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan that runs, which is the one the alarm names, else the desired one; and those proven here.

    Proven are, of the plans that committed, those over the same models; the newest first, of each structure
    the newest alone.

    Raises:
        InputError: the plan that runs is not known here.
    """
    runs = begun.alarm.plan or begun.desired_plan
    if runs is None:
        raise InputError("nothing runs on the device", remedy="push a plan")
    wires = view.read(plan_wires, {runs, *committed})
    if runs not in wires:
        raise InputError(
            f"plan {runs[:12]}, which runs on the device, is not known here",
            remedy="push a plan of this planner",
        )
    incumbent = _decoded(wires[runs], runs)
    found: dict[Digest, Plan] = {}
    for digest in committed:
        if digest in wires and len(found) < _PROVEN_MOST:  # else planned on the device and never adopted
            plan = _decoded(wires[digest], digest)
            if serves(plan) == serves(incumbent):
                found.setdefault(plan.structure, plan)
    return incumbent, tuple(found.values())
