"""A plan from an operator's wishes: the store's models, the device's measured costs, a scheduler by name."""

from planner.costs.measured import cost_table
from planner.store.store import ReadStore
from shared.errors import InputError
from shared.messages.admin import PlanCreateRequest
from shared.plan import ExecutorOptions, Plan
from shared.search.compose import Combination, ModelChoice, compose
from shared.search.costs import CostTable
from shared.search.interface import Limits


def create_plan(store: ReadStore, request: PlanCreateRequest) -> Plan:
    """A legal plan over the named models.

    Raises:
        InputError: a model or the device does not exist, or `combination` is unknown.
        SettingError: there is no scheduler of that name.
        PlanError: a partition is unknown, or the plan would not be legal.
    """
    try:
        combination = Combination(request.combination)
    except ValueError as error:
        raise InputError(
            f"there is no combination {request.combination!r}",
            remedy=f"choose one of {', '.join(one.value for one in Combination)}",
        ) from error
    infos = store.named_models([choice.model for choice in request.models])
    choices = [
        ModelChoice(
            name=choice.model,
            artifact=info.digest,
            graph=store.graph(info.digest),
            partition=choice.partition,
            replicas=choice.replicas,
            batch=choice.batch,
            launch_interval_us=round(choice.launch_interval_s * 1e6),
        )
        for choice, info in zip(request.models, infos, strict=True)
    ]
    return compose(
        choices,
        scheduler=request.scheduler,
        combination=combination,
        members_max=request.members_max,
        costs=_costs(store, request, choices),
        limits=Limits(r=request.r, s=request.s),
        lanes=request.lanes,
        executor=ExecutorOptions(name=request.executor, intra_op_threads=request.intra_op_threads),
    )


def scheduler_key(request: PlanCreateRequest) -> str:
    """The scheduler's name with the limits that it obeyed: together they decide what it finds."""
    limits = "".join(f" {name}={value}" for name, value in (("r", request.r), ("s", request.s)) if value)
    return request.scheduler + limits


def _costs(store: ReadStore, request: PlanCreateRequest, choices: list[ModelChoice]) -> CostTable:
    """What the device's class measured; estimates alone where no device is named."""
    if request.device is None:
        return CostTable()
    device_class = store.device(request.device).device_class
    return cost_table(
        (choice.artifact, store.operator_costs(device_class, choice.artifact, choice.batch))
        for choice in choices
    )
