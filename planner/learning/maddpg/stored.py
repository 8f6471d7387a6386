"""A problem from what the planner's store knows of a device: its plan, its times, what arrives there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.plan_search import search_job
from stageloom.planner.schema.plan import PlanCreateRequest, PrecisionName
from stageloom.planner.schema.training import MaddpgTrainingRequest
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.telemetry import newest_telemetry
from stageloom.planner.twin.arrivals import Poisson, Process, require_all
from stageloom.planner.twin.device_file import DeviceFile, named_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.replay import counted_arrivals
from stageloom.planner.twin.stored import stored_times
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.search.beam import beam
from stageloom.shared.search.gpg import with_checkpoint
from stageloom.shared.search.interface import Scheduler
from stageloom.shared.search.job import run_search

TOP_MEMBERS: Final[Mapping[str, int]] = {"nano": 2, "tx2": 2, "xavier_nx": 3, "a100": 4}
"""H per device (TOP, section VI-B)."""

OTHER_MEMBERS: Final = 3


@dataclass(frozen=True)
class StoredProblem:
    """A problem, its twin's device file, and in words where its times and arrivals are from."""

    problem: Problem
    device: DeviceFile
    times: str
    arrivals: str


def stored_problem(store: ReadStore, wanted: MaddpgTrainingRequest) -> StoredProblem:
    """What the store knows makes a problem.

    Arrivals are Poisson at the rates that were given, or as the device counted them: each episode enters
    that recording elsewhere and draws the arrivals within its intervals anew, so that training, validation
    and the last look have other arrivals of the same pattern.

    Raises:
        InputError: no such device, model or device file; the device runs no plan and no model was named;
            nothing arrived and no rate was given; or a rate is of another model.
    """
    device_class = store.read(device_info, wanted.device).device_class
    template = _template(store, wanted)
    graphs = {model.artifact: store.graph(model.artifact) for model in template.models}
    base = named_device(wanted.twin) if wanted.twin else None
    times, source = stored_times(store, wanted.device, bind(template, graphs), base)
    names = [model.name for model in template.models]
    arrivals, where = _arrivals(store, wanted, names)
    require_all(arrivals, names)
    problem = Problem.of(
        template,
        device_class=device_class,
        graphs=graphs,
        costs=times.costs,
        arrivals_per_s=[arrivals[name].mean_per_s for name in names],
        make_device=TwinDevices(times.device, times.costs, {name: arrivals[name] for name in names}),
        members_max=wanted.members_max or TOP_MEMBERS.get(times.device.name, OTHER_MEMBERS),
        scheduler=_scheduler(store, wanted, device_class),
    )
    words = ", ".join(f"{name} {arrivals[name].mean_per_s:.4g}/s" for name in names)
    return StoredProblem(problem, times.device, source, f"{words} ({where})")


def _scheduler(store: ReadStore, wanted: MaddpgTrainingRequest, device_class: str) -> Scheduler:
    """What finds the stages of combined blocks in the training."""
    if wanted.scheduler == "beam":
        return beam
    return with_checkpoint(trained_policy(store, device_class))


def _template(store: ReadStore, wanted: MaddpgTrainingRequest) -> Plan:
    """The plan that the device runs, or one of the models that were named, on the same executor."""
    running = running_plan(store, wanted.device)
    if not wanted.models:
        if running is None:
            raise InputError(
                f"{wanted.device} runs no plan that would say what to learn",
                remedy="name the models with --model, or push a plan first",
            )
        return running
    request = PlanCreateRequest(models=wanted.models, scheduler="sequential")
    if running is not None:
        request = PlanCreateRequest(
            models=wanted.models,
            scheduler="sequential",
            executor=running.executor.name,
            intra_op_threads=running.executor.intra_op_threads,
            precision=cast(PrecisionName, running.executor.precision),
            lanes=running.lanes,
        )
    return run_search(search_job(store, request), lambda: 0.0)


def running_plan(store: ReadStore, device: DeviceId) -> Plan | None:
    """The plan that a device runs, as far as it is known, else the one that it is to run.

    Raises:
        InputError: there is no such device.
    """
    info = store.read(device_info, device)
    digest = info.report.active or info.desired_plan
    return None if digest is None else decode_plan(store.read(plan_info, digest).wire)


def _arrivals(
    store: ReadStore, wanted: MaddpgTrainingRequest, names: Sequence[str]
) -> tuple[Mapping[str, Process], str]:
    """Processes by model, and in words where they are from."""
    if wanted.rates:
        given = {rate.model: Poisson(rate_per_s=rate.per_s) for rate in wanted.rates}
        return given, "poisson, as given"
    rows = store.read(newest_telemetry, wanted.device, [RowKind.TASK_COUNTERS], round(wanted.last_s * 1e6))[0]
    try:
        found = counted_arrivals(rows, names)
    except InputError as error:
        raise InputError(
            f"{wanted.device} counted no task of these models in its last {wanted.last_s:g} s of telemetry",
            remedy="say what arrives with --rate MODEL=PER_S for each model",
        ) from error
    return found, f"as counted in {found[names[0]].length_s:.0f} s"
