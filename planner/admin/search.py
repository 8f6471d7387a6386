"""A plan from an operator's wishes: the store's models, the device's measured costs, a scheduler by name."""

from collections.abc import Sequence
from dataclasses import replace

from stageloom.planner.costs.measured import device_costs
from stageloom.planner.costs.policies import trained_policy
from stageloom.planner.costs.unsure import unsure_blocks
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.models import named_models
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.admin import ModelChoice as Choice
from stageloom.shared.messages.admin import PlanCreateRequest
from stageloom.shared.plan import ExecutorOptions, QueuePlan, StepChoice, Wait, decode_plan
from stageloom.shared.search.compose import Combination, ModelChoice, Rules
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Limits
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.rivals import policy as find_policy


def search_job(store: ReadStore, request: PlanCreateRequest) -> SearchJob:
    """The search that a request asks for, as plain data.

    Raises:
        InputError: a model or the device does not exist, `combination` is unknown, or a wish would have no
            effect beside the others. SettingError: no such policy.
    """
    try:
        combination = Combination(request.combination)
    except ValueError as error:
        raise InputError(
            f"there is no combination {request.combination!r}",
            remedy=f"choose one of {', '.join(one.value for one in Combination)}",
        ) from error
    _check_effect(request)
    infos = store.read(named_models, [choice.model for choice in request.models])
    choices = tuple(
        ModelChoice(
            name=choice.model,
            artifact=info.digest,
            graph=store.graph(info.digest),
            partition=choice.partition,
            replicas=choice.replicas,
            batch=choice.batch,
            batch_max_delay_us=_us(choice.batch_max_delay_s),
            launch_interval_us=_us(choice.launch_interval_s),
            work_conserving=choice.work_conserving,
            weight=choice.weight,
            queue=QueuePlan(
                rule=choice.queue, max_tasks=choice.queue_max_tasks, max_bytes=choice.queue_max_bytes
            ),
        )
        for choice, info in zip(request.models, infos, strict=True)
    )
    executor = ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads)
    job = SearchJob(
        models=choices,
        scheduler=request.scheduler,
        combination=combination,
        members_max=request.members_max,
        costs=_costs(store, request, choices, executor),
        limits=Limits(r=request.r, s=request.s),
        lanes=request.lanes,
        executor=executor,
        rules=Rules(
            run_ahead=request.run_ahead,
            step_choice=request.step_choice,
            wait=request.wait,
            wait_timeout_us=_us(request.wait_timeout_s),
            max_skips=request.max_skips,
            barrier=request.barrier,
        ),
        budget_s=request.budget_s,
        checkpoint=_checkpoint(store, request),
    )
    return job if request.policy is None else find_policy(request.policy).plan(job)


def _check_policy(request: PlanCreateRequest, name: str) -> None:
    """What a policy decides is not to be asked for, too."""
    found = find_policy(name)
    plain = PlanCreateRequest(models=request.models, scheduler=found.scheduler)
    asked = [field for field in found.decides if getattr(request, field, None) != getattr(plain, field, None)]
    for choice in request.models:
        usual = Choice(model=choice.model)
        asked += [
            f"{field} of {choice.model}"
            for field in found.decides
            if getattr(choice, field, None) != getattr(usual, field, None)
        ]
    if asked:
        raise InputError(
            f"the policy {name} decides {sorted(asked)[0].replace('_', ' ')}",
            remedy="leave that out, or leave the policy out",
        )


def _checkpoint(store: ReadStore, request: PlanCreateRequest) -> bytes:
    """The policy trained for the device's class, or for any; none where the scheduler takes none."""
    if request.scheduler != "gpg":
        return b""
    device_class = "" if request.device is None else store.read(device_info, request.device).device_class
    return trained_policy(store, device_class)


def _check_effect(request: PlanCreateRequest) -> None:
    """A wish that the engine would never look at is a mistake, not a detail."""
    if request.policy is not None:
        _check_policy(request, request.policy)
    if (request.wait is Wait.TIMEOUT) != (request.wait_timeout_s > 0):
        raise InputError(
            f"wait {request.wait.value} and a timeout of {request.wait_timeout_s:g} s do not go together",
            remedy="use --wait timeout with --wait-timeout above 0, or neither",
        )
    for choice in request.models:
        proportional = request.policy == "proportional" or request.contest  # where it takes part
        weighted = request.step_choice is StepChoice.WEIGHTED or proportional
        if choice.weight > 1 and not weighted:
            raise InputError(
                f"the weight of {choice.model} has no effect under step choice {request.step_choice.value}",
                remedy="add --step-choice weighted",
            )
        if choice.batch_max_delay_s > 0 and choice.batch == 1:
            raise InputError(
                f"{choice.model} has a batch delay but takes one task at a time",
                remedy=f"give it a batch above 1, or --model {choice.model}:delay=0",
            )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def unsure_of(store: ReadStore, device: DeviceId, plan: str, now_us: int) -> tuple[int, ...]:
    """The combined blocks of a plan that hold stages nobody is sure of on a device's class.

    Raises:
        InputError: there is no such device or plan, or a model of the plan was removed.
    """
    wanted = decode_plan(store.read(plan_info, plan).wire)
    held = store.read(calibration_of, device)
    graphs = {model.artifact: store.graph(model.artifact) for model in wanted.models}
    costs = device_costs(
        store,
        held.costs_key,
        wanted.executor,
        [(model.artifact, model.batch) for model in wanted.models],
        graph_of=store.graph,
        now_us=now_us,
        taught_by=held.taught_by,
    )
    return unsure_blocks(bind(wanted, graphs), costs)


def scheduler_key(request: PlanCreateRequest) -> str:
    """The policy, the scheduler, and the limits that it obeyed: together they decide what is found."""
    limits = "".join(f" {name}={value}" for name, value in (("r", request.r), ("s", request.s)) if value)
    policy = f"{request.policy} " if request.policy is not None else ""
    return policy + request.scheduler + limits


def _costs(
    store: ReadStore, request: PlanCreateRequest, choices: Sequence[ModelChoice], executor: ExecutorOptions
) -> CostTable:
    """What the device's class measured, or itself since it drifted; estimates where no device is named."""
    if request.device is None:
        return CostTable()
    held = store.read(calibration_of, request.device)
    models = [(choice.artifact, choice.batch) for choice in choices]
    table = device_costs(
        store, held.costs_key, executor, models, graph_of=store.graph, taught_by=held.taught_by
    )
    return replace(table, optimism=1.0) if request.optimistic else table
