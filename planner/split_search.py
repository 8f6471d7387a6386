"""Plans that split operators over two resources of a device, from part times that it measured.

`stageloom device profile D --splits` has the device measure parts, operators, the whole model and hand-overs;
here they become a problem (`stageloom.shared.search.measured_splits`), and what a splitter chooses becomes a
plan. Both resources run one of the executors of which all that is known.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import combinations_with_replacement
from typing import Final, NamedTuple

from msgspec.structs import replace as replace_struct

from stageloom.planner.costs.measured_parts import (
    costs_there,
    operator_nodes,
    part_costs,
    split_measurements,
)
from stageloom.planner.plan_search import model_choices
from stageloom.planner.replan.predict import CostPrediction, predict
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.store.machines import TRIED, Machine, machine_of
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import ExecutorOptions, Plan, QueueRule
from stageloom.shared.search.arrangements import BY_DEADLINE
from stageloom.shared.search.compose import ModelChoice, Rules
from stageloom.shared.search.eop import at_best_home, eop_at_most, splitter, splitters
from stageloom.shared.search.measured_splits import (
    OperatorNodes,
    SplitMeasurements,
    batch_splits,
    split_problem,
)
from stageloom.shared.search.part_costs import PartCosts
from stageloom.shared.search.split_plan import ResourcePair, split_plan
from stageloom.shared.search.split_problem import SplitChoice, SplitProblem, Whole
from stageloom.shared.text import counted

MOST_SPLITS: Final = 24
"""Splits of a model that `eop` keeps: a plan has a size on the wire, and the first ones gain nearly all."""

EOP: Final = "eop"

GAIN: Final = 0.97
"""Of what one resource takes: with splits it must be predicted to be less, since a split that pays by a
little on paper does not on a device (`docs/schedulers/eop.md`)."""

_OURS: Final = (
    *("scheduler", "plan", "models", "device", "executor", "intra_op_threads"),
    *("further_executors", "resources", "step_choice", "run_ahead", "max_skips"),
)
"""Fields of a request that a plan with splits heeds. Parts are measured in one precision, the usual one."""

_OURS_OF_MODELS: Final = (
    *("model", "launch_interval_s", "work_conserving"),
    *("queue", "queue_max_tasks", "queue_max_bytes"),
)


class SplitCandidate(NamedTuple):
    """A plan with splits, in a word which, and the seconds of one task that its search predicts."""

    name: str
    plan: Plan
    seconds: float
    splits: int
    beside: int  # pairs of runs of whole operators, each run on a resource
    away: int  # other operators that run whole on the resource that is not the plan's home


class SplitPlan(NamedTuple):
    """A plan, in a sentence what it was made from, what it costs as any plan of these operators, and the
    seconds of one task that its search predicts."""

    plan: Plan
    known: str
    prediction: CostPrediction
    seconds: float


class MeasuredModel(NamedTuple):
    """A model on a device, with what is known of two resources, the faster one first."""

    choice: ModelChoice
    nodes: OperatorNodes
    pair: ResourcePair
    times: tuple[SplitMeasurements, SplitMeasurements]
    rules: Rules = Rules()

    @property
    def session_s(self) -> tuple[float, float]:
        """One session over the whole model on each resource."""
        return self.times[0].session_s, self.times[1].session_s

    def problem(self) -> SplitProblem:
        """Raises:
        InputError: a sample is no time of a part.
        """
        return split_problem(self.choice.graph, self.nodes, self.times)

    def clearly_gains(self, candidate: SplitCandidate) -> bool:
        """Whether its splits are predicted to take clearly less than the faster resource alone."""
        return candidate.splits > 0 and candidate.seconds < GAIN * self.session_s[0]

    def plan(self, choice: SplitChoice) -> Plan:
        """The plan of a choice, with the model's rules and the engine's.

        Raises:
            PlanError: it would not be legal.
        """
        model = self.choice
        made = split_plan(model.name, model.artifact, model.graph, choice, self.pair)
        return replace(made, models=(replace(model.plan(), splits=choice.splits),), **asdict(self.rules))


def splits_operators(request: PlanCreateRequest) -> bool:
    """Whether the scheduler that is asked for splits operators."""
    return request.scheduler in splitters()


def check_request(request: PlanCreateRequest) -> DeviceId:
    """Refuse what a plan with splits cannot heed; returns the device that it is for.

    Raises:
        InputError: a field has no effect beside the scheduler, or there is not one model, or no device.
    """
    name = request.scheduler
    if request.device is None:
        raise InputError(f"{name} plans for a device that measured parts of operators", remedy="name it")
    plain = PlanCreateRequest()
    fields = [one for one in PlanCreateRequest.__struct_fields__ if one not in _OURS]
    given = [one for one in fields if getattr(request, one) != getattr(plain, one)]
    for choice in request.models:
        usual = ModelOptions(model=choice.model)
        given += [
            f"{one} of {choice.model}"
            for one in ModelOptions.__struct_fields__
            if one not in _OURS_OF_MODELS and getattr(choice, one) != getattr(usual, one)
        ]
    given += [
        f"precision of {one.name}" for one in request.further_executors if one.precision != plain.precision
    ]
    if given:
        raise InputError(f"{name} decides {given[0].replace('_', ' ')}", remedy="leave that out")
    if len(request.models) != 1:
        raise InputError(
            f"{name} plans one model, and {len(request.models)} are meant", remedy="name it with --model"
        )
    if len(request.further_executors) > 1 or len(request.resources) not in (0, 2):
        raise InputError(
            f"{name} plans for two resources, with an executor for both or one for each",
            remedy="give two [[resources]] or none, and one of [[further_executors]] at the most",
        )
    return request.device


def make(store: ReadStore, request: PlanCreateRequest, device: DeviceId) -> SplitPlan:
    """The plan that the request's scheduler chooses.

    Of `eop` that is the least of what it is predicted to take among operators' splits, a batch split through
    the whole model, and either resource alone. Of several pairs of executors the one with the least is taken.

    Raises:
        InputError: the device or model does not exist, what has to be known of them is not, or onnx is not
            installed.
        PlanError: the plan would not be legal.
    """
    return _split_plan(store, device, *_least(store, request, device))


def clear_gain(store: ReadStore, request: PlanCreateRequest, device: DeviceId) -> SplitPlan | None:
    """What `eop` makes of a request for one model, where all is known and splits are predicted to take
    clearly less than the faster resource alone. Tasks go by deadline, as in any plan of `auto`."""
    asked = replace_struct(
        request,
        scheduler=EOP,
        models=tuple(replace_struct(one, queue=QueueRule.DEADLINE) for one in request.models),
        step_choice=BY_DEADLINE.step_choice,
        run_ahead=BY_DEADLINE.run_ahead,
        max_skips=BY_DEADLINE.max_skips,
    )
    try:
        check_request(asked)
        measured, best = _least(store, asked, device)
    except (InputError, PlanError):  # what keeps `eop` from a plan leaves nothing to gain
        return None
    return _split_plan(store, device, measured, best) if measured.clearly_gains(best) else None


def _least(
    store: ReadStore, request: PlanCreateRequest, device: DeviceId
) -> tuple[MeasuredModel, SplitCandidate]:
    """Of what the request's scheduler proposes on each pair of resources that which takes least."""
    name = request.scheduler or EOP
    (choice,) = model_choices(store, request.models)
    found = []
    for pair in _pairs(store, request, device, choice):
        measured = measured_on(store, device, choice, pair, _rules(request), request.models[0].model)
        if name == EOP:
            found += [(measured, one) for one in proposals(measured)]
        else:
            found.append((measured, _candidate(measured, name, splitter(name).choose(measured.problem()))))
    return min(found, key=lambda one: one[1].seconds)


def _split_plan(
    store: ReadStore, device: DeviceId, measured: MeasuredModel, best: SplitCandidate
) -> SplitPlan:
    graphs = {measured.choice.artifact: measured.choice.graph}
    prediction = predict(best.plan, graphs, costs_there(store, device, best.plan, graphs), ())
    return SplitPlan(best.plan, _sentence(measured, best), prediction, best.seconds)


def proposals(measured: MeasuredModel) -> list[SplitCandidate]:
    """What `eop` proposes: operators' splits, the batch split, and the faster resource alone."""
    problem = measured.problem()
    operators = at_best_home(lambda one: eop_at_most(one, MOST_SPLITS), problem)
    handover_s = max(one.handover_s for one in measured.times)
    graph = measured.choice.graph
    batches = batch_splits(graph, measured.nodes, measured.session_s, handover_s)
    fast_s = measured.session_s[0]
    alone = SplitChoice(states=(Whole(0),) * len(graph.operators), splits=(), seconds=fast_s)
    return [
        _candidate(measured, "one resource", alone),
        _candidate(measured, "operators split", operators),
        *(_candidate(measured, f"batch split at {one.splits[0].boundary}", one) for one in batches),
    ]


def _candidate(measured: MeasuredModel, name: str, choice: SplitChoice) -> SplitCandidate:
    paired = {op for sides in choice.beside for side in sides for op in side}
    away = sum(
        isinstance(state, Whole) and state != choice.home and op not in paired
        for op, state in enumerate(choice.states)
    )
    plan = measured.plan(choice)
    return SplitCandidate(name, plan, choice.seconds, len(choice.splits), len(choice.beside), away)


class Entrants(NamedTuple):
    """Plans with splits that take part in a tournament, and the costs of parts by which it judges them."""

    candidates: tuple[SplitCandidate, ...]
    parts: Mapping[Digest, PartCosts]


def entrants(store: ReadStore, request: PlanCreateRequest, device: DeviceId) -> Entrants:
    """What `eop` proposes on the first executor of a request for one model, where all is known and splits
    are predicted to take clearly less than the faster resource alone; else nothing."""
    models = tuple(replace_struct(one, weight=1) for one in request.models)  # one model takes no turns
    asked = replace_struct(request, scheduler=EOP, budget_s=None, rates=(), models=models)
    try:
        check_request(asked)
        (choice,) = model_choices(store, asked.models)
        machine = store.read(machine_of, device)
        if machine is None:
            return Entrants((), {})
        options = ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads)
        pair = ResourcePair((options, options), _cores(asked, machine, device))
        measured = measured_on(store, device, choice, pair, _rules(asked))
        proposed = proposals(measured)
    except (InputError, PlanError):  # what keeps `eop` from a plan keeps it from taking part, and no more
        return Entrants((), {})
    found = {one.plan.digest: one for one in proposed if measured.clearly_gains(one)}
    return Entrants(
        tuple(found.values()), {choice.artifact: part_costs(choice.graph, measured.nodes, measured.times[0])}
    )


# What is known


def _rules(request: PlanCreateRequest) -> Rules:
    return Rules(step_choice=request.step_choice, run_ahead=request.run_ahead, max_skips=request.max_skips)


def measured_on(
    store: ReadStore,
    device: DeviceId,
    choice: ModelChoice,
    pair: ResourcePair,
    rules: Rules | None = None,
    reference: str = "",
) -> MeasuredModel:
    """What a device measured of a model on two resources; the faster one becomes the first. `rules`: of the
    plans that are made of it. `reference`: what names its version, `NAME@VERSION`; empty: the newest.

    Raises:
        InputError: parts, hand-overs or the whole model were not measured on one of them, or onnx is not
            installed.
    """
    times = [_times(store, device, choice, options, reference or choice.name) for options in pair.executors]
    if times[1].session_s < times[0].session_s:
        times.reverse()
        pair = ResourcePair(pair.executors[::-1], pair.cores[::-1])
    nodes = operator_nodes(store, choice.artifact)
    return MeasuredModel(choice, nodes, pair, (times[0], times[1]), rules or Rules())


def _times(
    store: ReadStore, device: DeviceId, choice: ModelChoice, options: ExecutorOptions, reference: str
) -> SplitMeasurements:
    known = split_measurements(store, device, choice.artifact, choice.graph, options)
    if known is None:
        threads = f" --threads {options.intra_op_threads}" if options.intra_op_threads > 1 else ""
        command = f"device profile {device} --model {reference} --executor {options.name}{threads} --splits"
        raise InputError(
            f"{device} has not measured parts of {reference} on {options.name}, on two resources, "
            "beside the whole model and each of its operators",
            remedy=f"run `stageloom {command}`, with a longer --budget where it was not enough; "
            f"it needs {2 * options.intra_op_threads} cores there",
        )
    return known


def _pairs(
    store: ReadStore, request: PlanCreateRequest, device: DeviceId, choice: ModelChoice
) -> list[ResourcePair]:
    """The pairs of resources to plan for: those of the request, else each pair of executors of which all is
    known, on the first cores of the device."""
    machine = store.read(machine_of, device)
    if machine is None or not machine.cores:
        raise InputError(
            f"{device} has not told which cores it has", remedy="start an agent of this version there"
        )
    first = ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads)
    cores = _cores(request, machine, device)
    if request.further_executors:
        (other,) = request.further_executors
        second = ExecutorOptions(name=other.name, intra_op_threads=other.intra_op_threads)
        named = [(first, second)]
    elif request.resources or request.executor != PlanCreateRequest().executor:
        named = [(first, first)]
    else:
        ways = [replace(first, name=one) for one in TRIED if one in machine.executors]
        known = [
            one
            for one in ways
            if split_measurements(store, device, choice.artifact, choice.graph, one) is not None
        ]
        named = list(combinations_with_replacement(known, 2)) or [(first, first)]
    for pair in named:
        for options in pair:
            machine.require(options.name, device)
    return [ResourcePair(executors, cores) for executors in named]


def _cores(
    request: PlanCreateRequest, machine: Machine, device: DeviceId
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores of both resources: those of the request, else of the device's first as many as its threads."""
    if request.resources:
        first, second = (one.cores for one in request.resources)
        if missing := {*first, *second} - set(machine.cores):
            raise InputError(
                f"{device} has no core {min(missing)} for plans",
                remedy=f"choose among {', '.join(map(str, machine.cores))}",
            )
        return first, second
    threads = request.intra_op_threads
    both = threads + (request.further_executors[0].intra_op_threads if request.further_executors else threads)
    if len(machine.cores) < both:
        raise InputError(
            f"two resources need {counted(both, 'core')}, and {device} has {len(machine.cores)}",
            remedy="choose another scheduler",
        )
    return machine.cores[:threads], machine.cores[threads:both]


def _sentence(measured: MeasuredModel, best: SplitCandidate) -> str:
    """What was chosen, and what the search predicts with and without splits."""
    names = [
        f"{options.name} on {'cores' if len(cores) > 1 else 'core'} {', '.join(map(str, cores))}"
        for options, cores in zip(measured.pair.executors, measured.pair.cores, strict=True)
    ]
    alone = " and ".join(
        f"{1e3 * seconds:.3g} ms whole on {name}"
        for seconds, name in zip(measured.session_s, names, strict=True)
    )
    return f"{measured.choice.name}: {_gain(best)}, against {alone}"


def _gain(best: SplitCandidate) -> str:
    counts = (
        (best.splits, "split", ""),
        (best.away, "operator", " whole on the other resource"),
        (best.beside, "pair", " of runs beside each other"),
    )
    said = " and ".join(counted(number, noun) + rest for number, noun, rest in counts if number)
    if not said:
        return "no split is predicted to pay"
    return (
        f"{best.name if best.splits else 'no split'}, {said}, predicted to take {1e3 * best.seconds:.3g} ms"
    )
