"""`stageloom plan explain`: what a plan does, what that costs and how it is known, what else there was."""

import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli.connection import LONG_S, Caller, connected
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import compared, emit, emit_table, pair, progress, show, when
from stageloom.planner.schema.device import DeviceInfo, DeviceShowRequest
from stageloom.planner.schema.explanation import (
    AlternativeSchedule,
    BlockExplanation,
    PlanDecision,
    PlanEvaluation,
    PlanExplainRequest,
    PlanExplanation,
    RelatedPlan,
    StageExplanation,
)
from stageloom.planner.schema.replan import TrialInfo
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import DeviceId
from stageloom.shared.text import counted

_SHOWN = 8
"""Plans that are listed for their predicted cost; a tournament looks at two dozen."""
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86_400.0


def explain(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|DEVICE",
            help="A plan's name, or 8 or more characters of its digest; or a device, for the plan it has. A "
            "device goes before a plan of the same name, unless --device is given.",
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="With a PLAN: use this device's costs. Default: the last it was made for or given to.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="List every plan over the same models, not the best and those tried."),
    ] = False,
) -> None:
    """Say why a plan is as it is. Its schedules in words, what they cost, and what else was tried.

    Of each combined block its stages, or its streams: `|` stands between what runs side by side, `+` between
    what runs as one launch. Then what each is predicted to take and how that is known, the best first:

    \b
    measured    this stage was measured as a whole
    fitted      its operators were; what they cost together is fitted to other measured stages, nine of ten
                of which take no more and no less than the share behind +-
    operators   its operators were; side by side they are taken to hinder each other fully
    analytic    estimated from shapes, some operator at least or a launch that merges several, or from what
                it took at another batch
    unsure      worth measuring, or measured too long ago

    Then how far that is above what no schedule can beat (the bound), and above the cheapest stages there are
    (the optimum, where the block is small enough to know); and other schedules of the block under the same
    costs. In the end the plans over the same models that searches found or re-plans looked at: the cheapest,
    and those that a device tried. `--all` and `--json` list the others, too.

    \b
    stageloom plan explain shop-7                 # the plan that shop-7 should run
    stageloom plan explain inception --device shop-7
    stageloom plan explain 3f2a9c01 --json | jq '.others[] | select(.this | not)'
    """
    with connected(live=False) as caller:
        request = PlanExplainRequest(plan=subject, device=None if device is None else DeviceId(device))
        if device is None and (meant := _device(caller, subject)) is not None:
            request = PlanExplainRequest(plan=_plan_of(meant), device=meant.device)
        said = caller.call(routes.PLAN_EXPLAIN, checked(request), timeout_s=LONG_S)
    show(said, lambda: _tell(said, everything=everything))


def _device(caller: Caller, name: str) -> DeviceInfo | None:
    """The device of this name; None where there is none."""
    try:
        return caller.call(routes.DEVICE_SHOW, checked(DeviceShowRequest(device=DeviceId(name)))).device
    except NotFoundError:
        return None
    except ApiRefused as refused:
        if refused.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def _plan_of(device: DeviceInfo) -> str:
    """The plan that a device should run, else the one that it runs."""
    digest = device.desired_plan or device.report.active
    if digest is None:
        raise InputError(f"{device.device} has no plan", remedy="push one with `stageloom plan push`")
    return digest


def _tell(said: PlanExplanation, *, everything: bool) -> None:
    emit("\n".join(_lines(said, time.time())))
    _print_others(said.others if everything else _of_note(said.others), len(said.others))


def _lines(said: PlanExplanation, now_s: float) -> Iterator[str]:
    found = f"found by {said.scheduler} at {when(said.created_at_us)} UTC"
    yield f"plan {said.plan} ({said.digest[:12]}), {found}"
    yield f"serves {', '.join(said.models)}"
    if said.device_class:
        yield (
            f"costs of {said.device} ({said.device_class}): {said.operators_measured} of {said.operators} "
            f"operators and {said.stages_measured} stages measured, a model fitted to {said.fitted_to}"
        )
        if said.calibration is not None and said.calibration.own:
            yield (
                f"these are {said.device}'s own: its steps took {said.calibration.ratio:.2f} of what was "
                f"planned, as was found at {when(said.calibration.at_us)} UTC"
            )
    else:
        yield "costs are estimates: no device was named, and none was asked to run it"
    yield f"predicted {said.predicted_ms:.3f} ms for one task of each model"
    yield from _splits(said)
    for sentence in sentences(said):
        yield f"why: {sentence}"
    for block in said.blocks:
        yield ""
        yield from _block(block, now_s)


def _splits(said: PlanExplanation) -> Iterator[str]:
    """A line per split, and what the plan takes without them."""
    if said.unsplit_ms is not None:
        yield f"without splits {said.unsplit_ms:.3f} ms"
    for one in said.splits:
        ops = str(one.first) if one.first == one.last else f"{one.first}-{one.last}"
        first, second = (f"{taken / 1e3:.3f}" for taken in one.halves_us)
        known = "parts measured" if one.measured else "parts not measured, taken to be linear"
        yield (
            f"split {one.model}:{ops} on {one.axis} at {one.boundary} of {one.extent}: {first} beside "
            f"{second} ms, whole {one.whole_us / 1e3:.3f} ms ({known})"
        )


def sentences(said: PlanExplanation) -> Iterator[str]:
    """Who decided, what was predicted, what the device found."""
    if not said.device:
        yield "nobody decided yet: no device was asked to run it"
        return
    if said.decided is None:
        yield f"nobody decided yet: {said.device} was never asked to run it"
        return
    yield _decision(said.device, said.decided)
    if said.decided.replan is not None and said.decided.replan.remark:
        yield f"it was noted then: {said.decided.replan.remark}"
    if said.decided.trial is not None:
        yield _trial(said.decided.trial)
    if said.active == said.digest:
        yield f"{said.device} runs it now"
    elif said.active is not None:
        yield f"{said.device} now runs {said.active[:12]}"


def _decision(device: str, known: PlanDecision) -> str:
    entry = known.generation
    generation = pair(entry.epoch, entry.generation)
    if known.replan is not None:
        replan = known.replan
        said = (
            f"re-plan {replan.replan} ({replan.cause} {replan.value:.3g}, threshold {replan.threshold:.3g}) "
            f"pushed it to {device} as generation {generation}"
        )
        if replan.predicted is not None:
            said += f", predicted at {replan.predicted:.3f} of the cost of what ran"
        return said + (f"; it looked at {counted(known.left, 'other plan')}, too" if known.left else "")
    who = {"operator": "an operator", "local": f"{device} itself"}.get(entry.decided_by, entry.decided_by)
    state = f"; {entry.state}" + (f" ({entry.reason})" if entry.reason else "") if entry.state else ""
    return f"{who} decided that {device} should run it, generation {generation}{state}"


def _trial(trial: TrialInfo) -> str:
    if trial.how != "trial":
        said = f"{trial.way}; {trial.verdict}"
    else:
        against = f" against {trial.control[:12]}" if trial.control else ""
        ratio = compared(trial.figure, trial.ratio, trial.ratio_low, trial.ratio_high)
        said = f"the device's trial{against}: {trial.verdict}" + (
            f", {ratio} as good over {trial.pairs} pairs" if ratio else ", nothing measured"
        )
    return said + (f" ({trial.reason})" if trial.reason else "")


def _block(block: BlockExplanation, now_s: float) -> Iterator[str]:
    stages = counted(block.lines[-1].last + 1, "stage")
    parts = stages if block.streams is None else counted(block.streams, "stream")
    yield (
        f"combined block {block.index}: {block.members}, {counted(block.operators, 'operator')} in {parts}, "
        f"on {_place(block)}"
    )
    for line in block.lines:
        number = f"{line.first}" if line.first == line.last else f"{line.first}..{line.last}"
        merged = " (one launch)" if line.merge else ""
        yield f"  {number:>9}  {line.predicted_us:10.1f} us  {_source(line, now_s):40}  {line.text}{merged}"
    optimum = "" if block.over_optimum is None else f", {_percent(block.over_optimum)} over the optimum"
    measured = "" if block.step_us is None else f"; measured {block.step_us:.1f} us as a whole"
    gaps = f"{_percent(block.over_bound)} over the bound{optimum}"
    yield f"  predicted {block.predicted_us:.1f} us, {gaps}{measured}"
    yield f"  beside it: {', '.join(_beside(block.beside))}"


def _place(block: BlockExplanation) -> str:
    """What runs a block, and where."""
    threads = f", {block.intra_op_threads} threads" if block.intra_op_threads != 1 else ""
    resources = f", resources {', '.join(map(str, block.resources))}" if block.resources else ""
    cores = f", cores {', '.join(map(str, block.cores))}" if block.cores else ""
    return block.executor + threads + resources + cores


def _source(line: StageExplanation, now_s: float) -> str:
    doubt = "" if line.doubt is None else f" +-{100.0 * line.doubt:.0f} %"
    said = line.source.value + doubt + ("" if line.sure else ", unsure")
    if line.measured_at_us is None or line.runs is None:
        return said
    return f"{said}, {line.runs} runs, {age_text(now_s - line.measured_at_us / 1e6)} ago"


def _beside(others: Sequence[AlternativeSchedule]) -> Iterator[str]:
    """Each schedule once, with all that found it, the cheapest first."""
    by_schedule: dict[str, list[AlternativeSchedule]] = {}
    for one in others:
        by_schedule.setdefault(one.stage_string, []).append(one)
    for same in by_schedule.values():
        one, names = same[0], " = ".join(other.scheduler for other in same)
        sign = "+" if one.over_this >= 0.0 else "-"
        cost = f"{one.predicted_us:.1f} us ({sign}{_percent(abs(one.over_this))})"
        yield f"{names}: {'this one' if one.same else cost}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def age_text(seconds: float) -> str:
    """How long, in the largest unit of which there is one; a device's clock may be ahead."""
    for unit_s, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def _of_note(others: Sequence[RelatedPlan]) -> list[RelatedPlan]:
    """The cheapest, this one, and those that a device tried, in the order they are in."""
    return [one for rank, one in enumerate(others) if rank < _SHOWN or one.this or one.trial or one.steps_ms]


def _print_others(shown: Sequence[RelatedPlan], known: int) -> None:
    progress("\nplans over the same models, the cheapest first; ms of the device for one task of each model:")
    emit_table(
        (
            *("plan", "how", "scheduler", "blocks", "predicted ms", "measured ms", "then"),
            *("under the load", "verdict", "what became of it", "at (UTC)"),
        ),
        [_other(one) for one in shown],
        empty="no search of this planner is on record",
    )
    if len(shown) < known:
        progress(f"and {counted(known - len(shown), 'other plan')}; --all lists every one")


def _under_load(last: PlanEvaluation) -> str:
    """What was predicted of a plan at the arrivals of an alarm; empty where nothing was."""
    if last.p50_s is None or last.p99_s is None or last.share_in_time is None:
        return ""
    said = f"p50 {1e3 * last.p50_s:.3g}, p99 {1e3 * last.p99_s:.3g} ms, {last.share_in_time:.0%} in time"
    return said if last.chance is None else f"{said}; gain {last.chance:.0%} likely"


def _other(one: RelatedPlan) -> tuple[object, ...]:
    last = one.last
    trial = one.trial
    ratio = "" if trial is None else compared(trial.figure, trial.ratio, trial.ratio_low, trial.ratio_high)
    return (
        (one.name or one.digest[:12]) + (" (this)" if one.this else ""),
        last.how,
        last.scheduler,
        f"{last.blocks} of up to {last.members_max}",
        "" if one.now_ms is None else f"{one.now_ms:.3f}",
        "" if one.steps_ms is None else f"{one.steps_ms:.3f}",
        "" if last.predicted is None else f"{last.predicted:.3f} of the incumbent",
        _under_load(last),
        "" if trial is None else f"{trial.verdict} {ratio}".strip(),
        last.verdict.sentence,
        when(one.at_us),
    )
