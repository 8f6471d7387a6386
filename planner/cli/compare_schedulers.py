"""Every scheduler on models of the store: what `stageloom scheduler compare` shows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageloom.planner.admin.search import search_job
from stageloom.planner.cli.options import reading
from stageloom.planner.cli.output import emit_json, emit_table, interval, progress
from stageloom.planner.cli.searching import measure_stages, search
from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.replan.predict import block_costs
from stageloom.shared.bound import bind
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import admin
from stageloom.shared.messages.admin import TrialInfo
from stageloom.shared.messages.telemetry import RowKind, StageProfileResult
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.comparison import Measured, Standing, Subject, judged, standing, subject
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.job import SearchJob, run_search
from stageloom.shared.search.registry import reads_costs, schedulers

if TYPE_CHECKING:
    from stageloom.planner.store.store import ReadStore


@dataclass(frozen=True, slots=True)
class ComparedScheduler:
    """One scheduler's plan for the same models, cut and combined alike."""

    standing: Standing
    plan: Digest
    measured: Measured | None
    trial: TrialInfo | None  # the newest on the device in which the plan was the candidate


def compare_schedulers(
    folder: Path,
    database_url: str,
    request: admin.PlanCreateRequest,
    names: Sequence[str],
    measure_s: float | None,
) -> list[ComparedScheduler]:
    """Search with each scheduler; with `measure_s` have the request's device measure what they find.

    Without it everything happens in this process, from what the store has: no planner need run.

    Raises:
        InputError, SettingError: as `plan create`.
        UnavailableError: the planner or the device does not answer.
    """
    with reading(folder, database_url) as store:
        job = search_job(store, request)
        if measure_s is not None and request.device is not None:
            made = _measured_plans(folder, database_url, request, names, request.device, measure_s)
            job = search_job(store, request)  # what was measured meanwhile counts
            of = _subject(job)
            found = {
                name: _known(of, name, plan, job.limits, took_s) for name, (plan, took_s) in made.items()
            }
        else:
            of = _subject(job)
            found = {name: _searched(store, of, name, job, request.device) for name in names}
        outline = run_search(replace(job, scheduler="sequential"), time.monotonic)
        return _rows(store, outline, found, request.device)


def show(rows: Sequence[ComparedScheduler], json: bool) -> None:
    if json:
        emit_json([_plain(row) for row in rows])
        return
    emit_table(
        (
            *("scheduler", "predicted ms", "over bound %", "over optimum %", "search ms", "stages"),
            *("groups at most", "streams at most", "measured ms", "trial", "plan"),
        ),
        [_cells(row) for row in rows],
        empty="no scheduler was compared",
    )


def chosen(names: Sequence[str] | None) -> list[str]:
    """The schedulers that are asked for; all without a name.

    Raises:
        InputError: there is none of that name.
    """
    for name in names or ():
        if name not in schedulers():
            raise InputError(
                f"there is no scheduler {name!r}", remedy=f"choose one of {', '.join(schedulers())}"
            )
    return list(dict.fromkeys(names or schedulers()))


def _subject(job: SearchJob) -> Subject:
    """The combined blocks of the job's models; which blocks those are no scheduler decides."""
    plan = run_search(replace(job, scheduler="sequential", budget_s=None), time.monotonic)
    bound = bind(plan, {choice.artifact: choice.graph for choice in job.models})
    blocks = [
        (combined.graph, block_costs(bound, index, job.costs))
        for index, combined in enumerate(bound.combined)
    ]
    return subject("+".join(choice.name for choice in job.models), blocks, job.limits, Budget())


def _searched(
    store: "ReadStore", of: Subject, name: str, job: SearchJob, device: DeviceId | None
) -> Standing:
    from stageloom.planner.store.devices import device_info

    progress(f"searching with {name}")
    device_class = "" if device is None else store.read(device_info, device).device_class
    checkpoint = trained_policy(store, device_class) if name == "gpg" else b""
    return standing(of, name, job.limits, Budget(), time.perf_counter, checkpoint)


def _measured_plans(
    folder: Path,
    database_url: str,
    request: admin.PlanCreateRequest,
    names: Sequence[str],
    device: DeviceId,
    budget_s: float,
) -> dict[str, tuple[Plan, float]]:
    """Per scheduler the plan that the planner found, and how long it searched; each measured once.

    Those that read no costs come first: what is measured of their plans is then known to the searches.
    """
    import msgspec

    made: dict[str, tuple[Plan, float]] = {}
    measured: set[Digest] = set()
    for name in sorted(names, key=reads_costs):
        progress(f"searching with {name}")
        reply = search(folder, msgspec.structs.replace(request, scheduler=name))
        made[name] = decode_plan(reply.plan.wire, reply.plan.digest), reply.search_s
        if reply.plan.digest not in measured:
            progress(f"{device} measures the plan of {name}")
            measure_stages(folder, database_url, device, reply.plan.plan, budget_s=budget_s)
            measured.add(reply.plan.digest)
    return made


def _known(of: Subject, name: str, plan: Plan, limits: Limits, search_s: float) -> Standing:
    return judged(of, name, tuple(block.schedule for block in plan.combined), limits, search_s)


def _rows(
    store: "ReadStore", outline: Plan, found: Mapping[str, Standing], device: DeviceId | None
) -> list[ComparedScheduler]:
    from stageloom.planner.store.replans import trial_infos
    from stageloom.planner.store.telemetry import telemetry_rows

    steps_us: dict[tuple[Digest, int], float] = {}
    trials: dict[str, TrialInfo] = {}
    if device is not None:
        for row in store.read(telemetry_rows, device, [RowKind.STAGE_PROFILE_RESULT]):
            if isinstance(row.data, StageProfileResult) and row.data.step_us > 0.0:
                steps_us[row.data.plan, row.data.combined_block] = row.data.step_us
        for trial in store.read(trial_infos, device):
            trials.setdefault(trial.candidate, trial)
    rows = []
    for one in found.values():
        plan = _with(outline, one.schedules)
        taken = [steps_us.get((plan.digest, index)) for index in range(len(plan.combined))]
        known = [us for us in taken if us is not None]
        measured = Measured(median_s=sum(known) / 1e6) if len(known) == len(taken) else None
        rows.append(ComparedScheduler(one, plan.digest, measured, trials.get(plan.digest)))
    return sorted(rows, key=lambda row: row.standing.predicted_s)


def _with(outline: Plan, schedules: Sequence[Schedule]) -> Plan:
    """The plan with these schedules, as a search for it would have made it."""
    combined = tuple(
        replace(block, schedule=schedule) for block, schedule in zip(outline.combined, schedules, strict=True)
    )
    return replace(outline, combined=combined)


def _plain(row: ComparedScheduler) -> dict[str, Any]:
    one, shape = row.standing, row.standing.shape
    return {
        "models": one.subject,
        "scheduler": one.scheduler,
        "plan": row.plan,
        "predicted_ms": 1e3 * one.predicted_s,
        "bound_ms": 1e3 * one.bound_s,
        "optimum_ms": None if one.optimum_s is None else 1e3 * one.optimum_s,
        "over_bound": one.over_bound,
        "over_optimum": one.over_optimum,
        "search_ms": 1e3 * one.search_s,
        "stages": shape.stages,
        "groups_max": shape.groups_max,
        "streams_max": shape.streams_max,
        "measured_ms": None if row.measured is None else 1e3 * row.measured.median_s,
        "trial": row.trial,
    }


def _cells(row: ComparedScheduler) -> tuple[object, ...]:
    one, shape, trial = row.standing, row.standing.shape, row.trial
    ratio = "" if trial is None else interval(trial.ratio, trial.ratio_low, trial.ratio_high)
    return (
        one.scheduler,
        f"{1e3 * one.predicted_s:.3f}",
        100.0 * one.over_bound,
        None if one.over_optimum is None else 100.0 * one.over_optimum,
        1e3 * one.search_s,
        shape.stages,
        shape.groups_max,
        shape.streams_max,
        None if row.measured is None else f"{1e3 * row.measured.median_s:.3f}",
        "" if trial is None else f"{trial.verdict} {ratio}".strip(),
        row.plan[:12],
    )
