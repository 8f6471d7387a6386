"""The plan of a device for which nobody chose a scheduler: what is known of it decides.

Cores and executors are those that its agent told of; which executor runs a model fastest is what the device
measured (`stageloom.planner.store.machines`). Nothing is searched, so the answer comes at once. What is not
known is said, with the command that has it measured.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stageloom.planner.plan_search import model_choices
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.store.desired import desired
from stageloom.planner.store.machines import CHOSEN, TRIED, Machine, executor_times, machine_of
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import MAX_LANES, MAX_MODELS, ExecutorOptions, Plan, decode_plan
from stageloom.shared.search.arrangements import fastest
from stageloom.shared.search.auto import AUTO, auto_plan
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.text import counted

Times = Mapping[str, float]
"""Seconds of one run of a whole model by executor; infinity where it cannot run there."""

_OWN: Final = (
    *("combination", "members_max", "lanes", "executor", "intra_op_threads", "precision"),
    *("further_executors", "resources", "lane_resources", "placement", "r", "s"),
    *("step_choice", "wait", "wait_timeout_s", "run_ahead", "max_skips", "barrier", "measure_s"),
)
_OWN_OF_MODELS: Final = ("partition", "cuts", "executors", "resources", "replicas", "weight", "queue")


class AutoPlan(NamedTuple):
    """A plan, and in a sentence what it was made from."""

    plan: Plan
    known: str


def chosen_rules(request: PlanCreateRequest) -> list[str]:
    """Rules of a request that `auto` would decide, in words; empty where it may decide all."""
    plain = PlanCreateRequest()
    found = [name for name in _OWN if getattr(request, name) != getattr(plain, name)]
    for choice in request.models:
        usual = ModelOptions(model=choice.model)
        found += [
            f"{name} of {choice.model}"
            for name in _OWN_OF_MODELS
            if getattr(choice, name) != getattr(usual, name)
        ]
    return [name.replace("_", " ") for name in found]


def is_auto(store: ReadStore, request: PlanCreateRequest) -> bool:
    """Whether `auto` makes the plan: it is named, or nothing else is, of a device that told what it has.

    Raises:
        InputError: it is named beside rules that it decides, or without a device that told what it has; or
            there is no such device.
    """
    if request.scheduler not in (None, AUTO) or request.policy is not None or request.budget_s is not None:
        if request.scheduler == AUTO:
            raise InputError("auto searches nothing, and follows no policy", remedy="leave the others out")
        return False
    rules = chosen_rules(request)
    if request.scheduler == AUTO:
        if rules:
            raise InputError(f"auto decides {rules[0]}", remedy="leave that out, or name another scheduler")
        if request.device is None:
            raise InputError("auto plans for a device", remedy="name it")
    if request.device is None or rules:
        return False
    machine = store.read(machine_of, request.device)
    if machine is None or not machine.cores or not set(machine.executors[:1]) <= set(CHOSEN):
        if request.scheduler == AUTO:
            raise InputError(
                f"{request.device} has not told of cores and an executor that runs on them",
                remedy="start an agent of this version there, or name another scheduler",
            )
        return False
    return bool(machine.executors)


def named(store: ReadStore, request: PlanCreateRequest) -> PlanCreateRequest:
    """The request with its models: without any, those that its device should run, else all that there are.

    Raises:
        InputError: there are none, or too many to be meant, or no device is named.
    """
    if request.models:
        return request
    if request.device is None:
        raise InputError("a plan needs models", remedy="name one with --model, or a device")
    wanted = store.read(desired, request.device)
    if wanted is not None and wanted.plan:
        names = [model.name for model in decode_plan(wanted.plan).models]
    else:
        names = [info.model for info in store.read(model_infos, limit=MAX_MODELS + 1)]
    if not names:
        raise InputError("the planner has no models", remedy="add some with `stageloom model add`")
    if len(names) > MAX_MODELS:
        raise InputError(
            f"there are more than {MAX_MODELS} models, more than a plan takes", remedy="name those meant"
        )
    return msgspec.structs.replace(request, models=tuple(ModelOptions(model=name) for name in names))


def make(store: ReadStore, request: PlanCreateRequest, device: DeviceId) -> AutoPlan:
    """The plan from what is known of the device.

    Raises:
        InputError: a model or the device does not exist.
        PlanError: the plan would not be legal.
    """
    machine = store.read(machine_of, device)
    assert machine is not None, "is_auto has seen it"
    choices = model_choices(store, request.models)
    times = {one.name: _times(store, device, one, machine.executors) for one in choices}
    usual = machine.executors[0]
    known = {one.artifact: _by_options(times[one.name]) for one in choices}
    plan = auto_plan(choices, known, ExecutorOptions(name=usual), machine.cores)
    return AutoPlan(plan, sentence(device, machine, times, usual))


def _by_options(times_s: Times) -> dict[ExecutorOptions, float]:
    """Of sessions of one thread."""
    return {ExecutorOptions(name=name): taken for name, taken in times_s.items()}


def _times(store: ReadStore, device: DeviceId, choice: ModelChoice, usable: Sequence[str]) -> Times:
    rows = store.read(executor_times, device, [choice.artifact], batch=choice.batch)
    return {
        name: math.inf if row.time_us is None else row.time_us / 1e6
        for name, row in rows.get(Digest(choice.artifact), {}).items()
        if name in usable and name in CHOSEN
    }


_NAMED: Final = 8  # models that a sentence names


def sentence(device: str, machine: Machine, models: Mapping[str, Times], usual: str) -> str:
    """What is known of a device and its models, and what is not; `models`: by name what was measured."""
    cores = counted(len(machine.cores), "core")
    lanes = f", {MAX_LANES} of them used" if len(machine.cores) > MAX_LANES else ""
    executors = [name for name in machine.executors if name == usual or name in CHOSEN[:-1]]
    said = [f"{device} has {cores}{lanes} and {' and '.join(executors)}"]
    runs = [_runs(name, times_s, usual) for name, times_s in models.items() if times_s]
    if runs:
        said.append(_listed(runs))
    tried = [name for name in machine.executors if name == usual or name in TRIED]
    for executor in tried:
        missing = [name for name, times_s in models.items() if executor not in times_s]
        if missing and len(tried) > 1:
            command = f"`stageloom device profile {device} --executor {executor}`"
            said.append(f"{_listed(missing)} not measured on {executor} yet, {command} does it")
    if len(tried) == 1 and not runs:
        said.append(f"there is nothing to choose between, so no time is needed to run all on {usual}")
    return "; ".join(said)


def _runs(name: str, times_s: Times, usual: str) -> str:
    """Where a model runs fastest, and what the others take."""
    best = fastest(_by_options(times_s), ExecutorOptions(name=usual)).name
    if not times_s.get(best, math.inf) < math.inf:
        best = usual
    others = sorted((other, took_s) for other, took_s in times_s.items() if other != best)
    beside = ", ".join(f"{_ms(took_s)} on {other}" for other, took_s in others)
    if best not in times_s:
        return f"{name} on {best} ({beside})"
    return f"{name} on {best} in {_ms(times_s[best])}" + (f" ({beside})" if beside else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < math.inf else "cannot run"


def _listed(parts: Sequence[str]) -> str:
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return ", ".join([*parts[:_NAMED], *more])
