"""From the store to an `Observation`."""

from typing import Final

from planner.costs.measured import device_costs
from planner.costs.policies import trained_policy
from planner.replan.observation import Observation
from planner.store.reading import ReadStore
from shared.errors import InputError
from shared.ids import DeviceId, Digest
from shared.messages.control import Alarm
from shared.plan import Plan, decode_plan
from shared.policy.plain import Load

BARRED_S: Final = 3600.0
"""What did not gain on a device is not proposed there again for so long: its load may be another by then."""

_PROVEN_MOST: Final = 16


def observe(store: ReadStore, device: DeviceId, replan: int, now_us: int) -> Observation:
    """What a policy sees of a re-plan's device.

    Raises:
        InputError: the alarm, the device or the plan that runs there is unknown here.
    """
    alarm = alarm_of(store, replan)
    info = store.device(device)
    incumbent = incumbent_of(store, alarm, info.desired_plan)
    graphs = {model.artifact: store.graph(model.artifact) for model in incumbent.models}
    settings = store.replan_settings(device)
    barred = store.barred(device, info.device_class, now_us - round(BARRED_S * 1e6))
    return Observation(
        device=device,
        cause=alarm.cause,
        incumbent=incumbent,
        desired=(info.desired_epoch, info.desired_generation),
        loads=tuple(
            Load(
                model=load.model,
                arrivals_per_s=max(load.arrivals_per_s, 0.0),
                service_s=max(load.service_us, 0.0) / 1e6,
                queued=load.queued,
                oldest_age_s=load.oldest_age_us / 1e6,
            )
            for load in alarm.loads
        ),
        samples=alarm.samples,
        graphs=graphs,
        costs=device_costs(
            store,
            info.device_class,
            incumbent.executor,
            [(model.artifact, model.batch) for model in incumbent.models],
        ),
        proven=_proven(store, device, info.device_class, incumbent),
        barred=tuple(barred),
        settings=settings,
        checkpoint=trained_policy(store, info.device_class) if settings.scheduler == "gpg" else b"",
    )


def without_costs(store: ReadStore, device: DeviceId, replan: int) -> list[str]:
    """Names of the incumbent's models of which this device class never measured an operator."""
    info = store.device(device)
    incumbent = incumbent_of(store, alarm_of(store, replan), info.desired_plan)
    names = {model.digest: model.model for model in store.models(limit=1_000_000)}
    missing = dict.fromkeys(
        model.artifact
        for model in incumbent.models
        if not store.operator_costs(info.device_class, model.artifact, model.batch)
    )
    return [names[artifact] for artifact in missing if artifact in names]


def alarm_of(store: ReadStore, replan: int) -> Alarm:
    """The alarm that began a re-plan.

    Raises:
        InputError: there is no such re-plan.
    """
    alarm = store.alarm_of(replan)
    if alarm is None:
        raise InputError(f"there is no re-plan {replan}")
    return alarm


def incumbent_of(store: ReadStore, alarm: Alarm, desired: Digest | None) -> Plan:
    """The plan that runs: the one the alarm names, else the desired one.

    Raises:
        InputError: none is known here.
    """
    digest = alarm.plan or desired
    if digest is None:
        raise InputError("nothing runs on the device", remedy="push a plan")
    try:
        return decode_plan(store.plan(digest).wire)
    except InputError as error:
        raise InputError(
            f"plan {digest[:12]}, which runs on the device, is not known here",
            remedy="push a plan of this planner",
        ) from error


def _proven(store: ReadStore, device: DeviceId, environment: str, incumbent: Plan) -> tuple[Plan, ...]:
    """Plans whose newest trial in this environment committed, and that serve the same models."""
    serves = {(model.name, model.artifact) for model in incumbent.models}
    judged: set[Digest] = set()
    found: list[Plan] = []
    for trial in store.trials(device):
        if trial.environment != environment or trial.candidate in judged:
            continue
        judged.add(trial.candidate)
        if trial.verdict != "commit" or len(found) == _PROVEN_MOST:
            continue
        try:
            plan = decode_plan(store.plan(trial.candidate).wire)
        except InputError:
            continue  # planned on the device and never adopted
        if {(model.name, model.artifact) for model in plan.models} == serves:
            found.append(plan)
    return tuple(found)
