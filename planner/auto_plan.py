"""The plan of a device for which nobody chose a scheduler: what is known of it decides.

Cores and executors are those that its agent told of; which executor runs a model fastest is what the device
measured (`stageloom.planner.store.machines`). Nothing is searched, so the answer comes at once; but for one
model of which parts were measured its splits are a rival (`stageloom.planner.split_search`). What is not
known is said, with the command that has it measured.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stageloom.planner.plan_search import model_choices
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.store.desired import desired
from stageloom.planner.store.machines import CHOSEN, NULL, TRIED, Machine, machine_of, whole_times
from stageloom.planner.store.models import newest_models, plan_references
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.plan import MAX_MODELS, ExecutorOptions, Plan, decode_plan
from stageloom.shared.search.arrangements import ON_GPU, Times
from stageloom.shared.search.auto import AUTO, auto_plan, split_carries_more
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.text import counted

_OWN: Final = (
    *("combination", "members_max", "lanes", "executor", "intra_op_threads", "precision", "issue"),
    *("further_executors", "resources", "lane_resources", "placement", "r", "s"),
    *("step_choice", "wait", "wait_timeout_s", "run_ahead", "max_skips", "barrier", "measure_s"),
)
_OWN_OF_MODELS: Final = ("partition", "cuts", "executors", "resources", "replicas", "weight", "queue")


class AutoPlan(NamedTuple):
    """A plan, and in a sentence what it was made from."""

    plan: Plan
    known: str


class KnownModel(NamedTuple):
    """What is known of a model, and how the plan runs it.

    `scaled`: the ways that were measured of one task alone, whose times are so many times as long. `older`:
    `NAME@VERSION` where it is not the newest version.
    """

    times: Times
    way: ExecutorOptions
    batch: int = 1
    scaled: frozenset[ExecutorOptions] = frozenset()
    older: str = ""


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
    if machine is None or not machine.cores or not set(machine.executors[:1]) <= {*CHOSEN, NULL}:
        if request.scheduler == AUTO:
            raise InputError(
                f"{request.device} has not told of cores and an executor that runs on them",
                remedy="start an agent of this version there, or name another scheduler",
            )
        return False
    return bool(machine.executors)


def named(store: ReadStore, request: PlanCreateRequest) -> PlanCreateRequest:
    """The request with its models: without any, the versions that its device should run, else all models.

    Raises:
        InputError: there are none, too many to be meant, a version was removed, or no device is named.
    """
    if request.models:
        return request
    if request.device is None:
        raise InputError("a plan needs models", remedy="name one with --model, or a device")
    wanted = store.read(desired, request.device)
    if wanted is not None and wanted.plan:
        names = list(store.read(plan_references, decode_plan(wanted.plan)).values())
    else:
        names = store.read(newest_models, MAX_MODELS + 1)
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
    known = _known(store, device, choices, machine.executors)
    usual = ExecutorOptions(name=machine.executors[0])
    plan = auto_plan(choices, [one.times for one in known], usual, machine.cores)
    ways = {block.members[0].model: plan.executors[block.executor] for block in plan.combined}
    older = {name: one for name, one in store.read(plan_references, plan).items() if one != name}
    models = {
        one.name: known[at]._replace(way=ways[at], older=older.get(one.name, ""))
        for at, one in enumerate(choices)
    }
    used = {core for lane in range(plan.lanes) for core in plan.cores_of(lane)}
    return AutoPlan(plan, sentence(device, machine, models, len(used)))


def splits_carry_more(store: ReadStore, request: PlanCreateRequest, device: DeviceId, split_s: float) -> bool:
    """Whether the only model of a request carries clearly more load where a task takes `split_s`, split over
    two cores, than in the plan that `make` makes of it.

    Raises:
        InputError: the model or the device does not exist.
    """
    machine = store.read(machine_of, device)
    assert machine is not None, "is_auto has seen it"
    choices = (choice,) = model_choices(store, request.models)
    (known,) = _known(store, device, choices, machine.executors)
    usual = ExecutorOptions(name=machine.executors[0])
    most_blocks = len(choice.graph.base_cuts) + 1
    return split_carries_more(known.times, most_blocks, usual, len(machine.cores), split_s)


def _known(
    store: ReadStore, device: DeviceId, choices: Sequence[ModelChoice], usable: Sequence[str]
) -> list[KnownModel]:
    """By model what is known of it whole, in the batches that it is to have; all are run by the usual
    executor."""
    chosen = (NULL,) if usable[0] == NULL else (*CHOSEN, *ON_GPU)
    rows = store.read(whole_times, device, [one.artifact for one in choices])
    found = []
    for one in choices:
        by_batch: dict[int, dict[ExecutorOptions, float]] = {}
        for (way, batch), seconds in rows.get(one.artifact, {}).items():
            if way.name in usable and way.name in chosen:
                by_batch.setdefault(batch, {})[way] = seconds
        measured, alone = by_batch.get(one.batch, {}), by_batch.get(1, {})
        times = {way: one.batch * seconds for way, seconds in alone.items()} | measured
        scaled = frozenset(way for way in alone.keys() - measured.keys() if alone[way] < math.inf)
        found.append(KnownModel(times, ExecutorOptions(name=usable[0]), one.batch, scaled))
    return found


_NAMED: Final = 8  # models that a sentence names


def sentence(device: str, machine: Machine, models: Mapping[str, KnownModel], used: int) -> str:
    """What is known of a device and its models, and what is not.

    `used`: how many cores the plan's lanes keep to; 0 where they keep to none.
    """
    usual = machine.executors[0]
    cores = counted(len(machine.cores), "core")
    lanes = f", {used} of them used" if 0 < used < len(machine.cores) else ""
    executors = [name for name in machine.executors if name == usual or name in (*CHOSEN, *ON_GPU)]
    said = [f"{device} has {cores}{lanes} and {' and '.join(executors)}"]
    runs = [_runs(name, one) for name, one in models.items() if one.times]
    if runs:
        said.append(_listed(runs))
    tried = [name for name in machine.executors if name == usual or name in (*TRIED, *ON_GPU)]
    for executor in tried if len(tried) > 1 else ():
        single = ExecutorOptions(name=executor)
        missing: dict[tuple[int, bool], list[str]] = {}
        for name, one in models.items():
            if single not in one.times or single in one.scaled:
                missing.setdefault((one.batch, bool(one.older)), []).append(one.older or name)
        for (batch, older), names in sorted(missing.items()):
            on, option = (f" in batches of {batch}", f" --batch {batch}") if batch > 1 else ("", "")
            if older:  # without a name the newest versions are measured
                option += "".join(f" --model {name}" for name in names)
            command = f"`stageloom device profile {device} --executor {executor}{option}`"
            said.append(f"{_listed(names)} not measured on {executor}{on} yet, {command} does it")
    if len(tried) == 1 and not runs:
        said.append(f"there is nothing to choose between, so no time is needed to run all on {usual}")
    return "; ".join(said)


def _runs(name: str, model: KnownModel) -> str:
    """How the plan runs a model, and what it takes otherwise, on each executor at the least."""
    least: dict[str, tuple[float, int]] = {}
    for way, taken in model.times.items():
        found = taken, way.intra_op_threads
        if way != model.way and found < least.get(way.name, (math.inf, math.inf)):
            least[way.name] = found
    others = sorted((taken, executor, threads) for executor, (taken, threads) in least.items())
    beside = ", ".join(f"{_ms(taken)} {_on(executor, threads)}" for taken, executor, threads in others)
    took_s = model.times.get(model.way)
    said = f"{name} {_on(model.way.name, model.way.intra_op_threads)}"
    about = "about " if model.way in model.scaled else ""
    return said + ("" if took_s is None else f" in {about}{_ms(took_s)}") + (f" ({beside})" if beside else "")


def _on(executor: str, threads: int) -> str:
    return f"on {executor}" if threads == 1 else f"on {executor} with {threads} threads"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < math.inf else "cannot run"


def _listed(parts: Sequence[str]) -> str:
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return ", ".join([*parts[:_NAMED], *more])
