"""A policy's check on what the store knows: a twin of a device, and the rates of the policy's training."""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from stageloom.planner.learning.maddpg.gate import judge
from stageloom.planner.learning.maddpg.held_out import CheckSettings, held_out, load_outcome
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.stored import running_plan
from stageloom.planner.learning.messages import Checked, Tell, TrainingStep
from stageloom.planner.schema.policy import PolicyCheckRequest, PolicyVerdict
from stageloom.planner.store.devices import device_info, device_infos
from stageloom.planner.store.models import model_references
from stageloom.planner.store.policies import digest_beginning, policy_body, require_gated
from stageloom.planner.store.store import ReadStore
from stageloom.planner.twin.arrivals import Poisson, Process
from stageloom.planner.twin.device_file import DeviceFile, named_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.stored import stored_times
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import MakeDevice
from stageloom.shared.bound import bind
from stageloom.shared.errors import DecodeError, InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable

MakesDevices = Callable[[Mapping[str, Process]], MakeDevice]
"""Devices where such tasks arrive."""

SETTINGS: Final = CheckSettings()
_DEVICES_MOST: Final = 1_000_000
_RATE_MOST: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class CheckedOn:
    """A policy's own problem, and twins for it under any arrivals; in words what they are."""

    problem: Problem
    make: MakesDevices
    twin: str
    arrivals: str


def check_stored(store: ReadStore, request: PolicyCheckRequest, tell: Tell) -> Checked:
    """The verdict on a policy of the store.

    Raises:
        NotFoundError: there is no such policy.
        InputError: it needs no check; the planner lacks a model of it; no twin can be made; or nothing says
            at which rates its tasks arrive.
    """
    tell(TrainingStep(text="reading what is known of the policy"))
    digest = store.read(digest_beginning, request.policy)
    store.read(require_gated, digest)
    body = store.read(policy_body, digest)
    assert body is not None
    policy = decode(body)
    return Checked(verdict=verdict_on(policy, digest, checked_on(store, policy, request), tell))


def verdict_on(
    policy: MaddpgCheckpoint,
    digest: Digest,
    on: CheckedOn,
    tell: Tell,
    settings: CheckSettings = SETTINGS,
) -> PolicyVerdict:
    """Run the check, load by load."""
    outcomes = []
    loads = held_out(on.problem, on.make)
    for done, (load, problem) in enumerate(loads.items()):
        tell(TrainingStep(text=f"checking under {load}", done=done, size=len(loads)))
        outcomes.append(load_outcome(load, problem, policy, settings))
    return judge(digest, policy.space, outcomes, twin=on.twin, arrivals=on.arrivals)


def checked_on(store: ReadStore, policy: MaddpgCheckpoint, request: PolicyCheckRequest) -> CheckedOn:
    """What a policy of the store is checked on. Raises as `check_stored`."""
    device = _device(store, policy, request)
    graphs = {model.artifact: _graph(store, model.artifact) for model in policy.space.models}
    template = _template(store, policy, graphs, device)
    base = named_device(request.twin) if request.twin else None
    if device is not None:
        times, twin = stored_times(store, device, bind(template, graphs), base)
    else:
        assert base is not None
        times = StepTimes.derived(base, template.executor.precision)
        twin = f"{base.kind.value} from {base.name}"
    rates = _rates(policy, template, request)
    make = twins(times.device, times.costs)
    names = [model.name for model in template.models]
    problem = Problem(
        space=policy.space,
        template=template,
        graphs=graphs,
        costs=times.costs,
        arrivals_per_s=rates,
        make_device=make({name: Poisson(rate_per_s=rate) for name, rate in zip(names, rates, strict=True)}),
    )
    return CheckedOn(problem=problem, make=make, twin=twin, arrivals=_around(names, rates))


def checked_as_trained(problem: Problem, twin: str) -> CheckedOn:
    """The same for a policy that was trained on this problem, whose devices are twins."""
    devices = problem.make_device
    assert isinstance(devices, TwinDevices)
    names = [model.name for model in problem.template.models]
    return CheckedOn(
        problem=problem,
        make=twins(devices.device, devices.costs),
        twin=twin,
        arrivals=_around(names, problem.arrivals_per_s),
    )


def twins(device: DeviceFile, costs: CostTable) -> MakesDevices:
    """Twins of one device, compiled where numba is there."""
    compiled = find_spec("numba") is not None
    return lambda arrivals: TwinDevices(device, costs, dict(arrivals), compiled=compiled)


def _around(names: Sequence[str], rates: Sequence[float]) -> str:
    words = ", ".join(f"{name} {rate:.4g}/s" for name, rate in zip(names, rates, strict=True))
    return f"loads made of {words}"


def _device(store: ReadStore, policy: MaddpgCheckpoint, request: PolicyCheckRequest) -> DeviceId | None:
    """The device that was named, else, where no twin was, the first of the policy's class."""
    wanted = policy.space.device_class
    if request.device is not None:
        found = store.read(device_info, request.device).device_class
        if found != wanted:
            raise InputError(
                f"the policy is for the device class {wanted!r}, and {request.device} is of {found!r}",
                remedy="adopt it with `stageloom policy import FILE --device`, and check what that gives",
            )
        return request.device
    if request.twin:
        return None
    infos = store.read(device_infos, limit=_DEVICES_MOST, with_revoked=False)
    for info in infos:
        if info.device_class == wanted:
            return info.device
    raise InputError(
        f"no device of the policy's class {wanted!r} is known", remedy="name a device file with --twin"
    )


def _graph(store: ReadStore, artifact: Digest) -> Graph:
    try:
        return store.graph(artifact)
    except InputError as error:
        raise InputError(
            f"the policy is over artifact {artifact[:12]}, which is not here",
            remedy="add the model with `stageloom model add`, and import the policy with --device",
        ) from error


def _template(
    store: ReadStore, policy: MaddpgCheckpoint, graphs: Mapping[Digest, Graph], device: DeviceId | None
) -> Plan:
    """The plan that the policy was trained on; of a policy that does not tell one of its device class the one
    that the device runs where the policy is for that, else one of the policy's models."""
    if (trained := _trained_on(policy)) is not None:
        return trained
    running = None if device is None else running_plan(store, device)
    if running is not None and not policy.space.refusal(running, policy.space.device_class):
        return running
    known = store.read(model_references)
    choices = [
        ModelChoice(
            name=known[model.artifact].partition("@")[0],
            artifact=model.artifact,
            graph=graphs[model.artifact],
            partition=model.cuts,
            replicas=model.replicas,
            batch=model.batch,
        )
        for model in policy.space.models
    ]
    if running is None:
        return compose(choices)
    return compose(choices, executor=running.executor, lanes=running.lanes)


def _trained_on(policy: MaddpgCheckpoint) -> Plan | None:
    """Its template: lanes, rules and executor, other ones of which are another problem.

    None where it does not tell, and where it was adopted from another device class, whose template it tells.
    """
    before = policy.provenance.get("adopted")
    if isinstance(before, dict) and before.get("device_class") != policy.space.device_class:
        return None
    try:
        plan = decode_plan(b64decode(policy.provenance["template"], validate=True))
    except (KeyError, TypeError, ValueError, DecodeError):
        return None
    return None if policy.space.refusal(plan, policy.space.device_class) else plan


def _rates(policy: MaddpgCheckpoint, template: Plan, request: PolicyCheckRequest) -> tuple[float, ...]:
    """Mean arrivals per model: those of the request, else those of the policy's training. [W]"""
    names = [model.name for model in template.models]
    given = {rate.model: rate.per_s for rate in request.rates}
    if unknown := [name for name in given if name not in names]:
        raise InputError(f"the policy has no model {unknown[0]!r}", remedy=f"it has {', '.join(names)}")
    trained = policy.provenance.get("arrivals_per_s")
    if not given and isinstance(trained, list) and len(trained) == len(names):
        given = {
            name: float(rate)
            for name, rate in zip(names, trained, strict=True)
            if isinstance(rate, int | float) and 0.0 < rate < _RATE_MOST
        }
    for name in names:
        if name not in given:
            raise InputError(
                f"nothing says how often tasks of {name} arrive",
                remedy=f"give --rate {name}=PER_S for it, and for each other model",
            )
    return tuple(given[name] for name in names)
