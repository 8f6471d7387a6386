"""`stageloom plan compare`: the two plans of a device's trial, side by side."""

from collections.abc import Iterator
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import LONG_S, call
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import compared, emit, pair, show
from stageloom.planner.schema.outputs import OutputsInfo
from stageloom.planner.schema.trial import BlockPair, TrialCompareRequest, TrialComparison
from stageloom.shared.ids import DeviceId


def compare(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="The device whose trial to show.")],
    generation: Annotated[
        int | None, typer.Option(metavar="N", help="The generation tried. Default: the newest trial.")
    ] = None,
) -> None:
    """Compare the two plans of a trial. One ran on the device, the other was tried against it.

    A line that begins with `-` is the control's, with `+` the candidate's; others are common to both. The
    ratio is above 1 where the candidate is better. Drift is measured over planned time of a stage.

    \b
    stageloom plan compare shop-7
    stageloom plan compare shop-7 --generation 4
    """
    request = TrialCompareRequest(device=DeviceId(device), generation=generation)
    comparison = call(routes.TRIAL_COMPARE, checked(request), timeout_s=LONG_S)
    show(comparison, lambda: emit("\n".join(_lines(comparison))))


def _lines(comparison: TrialComparison) -> Iterator[str]:
    trial = comparison.trial
    yield f"control   {(trial.control or '')[:12] or 'none'}"
    yield f"candidate {trial.candidate[:12]}  generation {pair(trial.epoch, trial.generation)}"
    yield f"verdict   {trial.verdict} by {trial.how}" + (f": {trial.reason}" if trial.reason else "")
    if trial.outputs is not None:
        yield from _outputs(trial.outputs)
    ratio = compared(trial.figure, trial.ratio, trial.ratio_low, trial.ratio_high)
    yield (
        f"ratio     {ratio or 'not measured'}, "
        f"{trial.pairs} pairs in {(trial.decided_us - trial.began_us) / 1e6:.1f} s"
    )
    for figure, beside in (("latency", trial.latency_ratio), ("busy", trial.busy_ratio)):
        if beside is not None and figure != trial.figure:
            yield f"beside    {figure} {beside:.3f}"
    if comparison.predicted_ratio is not None:
        yield f"predicted {comparison.predicted_ratio:.3f}"
    for block in comparison.blocks:
        yield from _block(block)
    for stage in comparison.drift:
        if stage.measured_s is not None and stage.drift is not None:
            yield (
                f"drift     block {stage.combined_block} stage {stage.stage}: planned "
                f"{1e6 * stage.planned_s:.0f} us, measured {1e6 * stage.measured_s:.0f} us over "
                f"{stage.samples} steps ({stage.drift:.2f})"
            )


def _outputs(found: OutputsInfo) -> Iterator[str]:
    """What two versions gave, and the output that differs most."""
    yield f"outputs   compared on {found.inputs} inputs within {found.tolerance:g}"
    if not found.output:
        return
    figures = ", ".join(
        f"{name} {'infinite' if value is None else format(value, '.3g')}"
        for name, value in (
            ("difference", found.difference),
            ("absolute", found.max_abs),
            ("relative", found.max_rel),
        )
    )
    yield f"largest   {found.model} {found.output}: {figures}; {found.agreement:.2%} of its elements agree"
    at = list(found.index)
    yield f"there     {at if at else 'its shape'}: {found.old} became {found.new}"


def _block(block: BlockPair) -> Iterator[str]:
    if block.same:
        yield f"  {block.members}  {block.control}"
        return
    for sign, text in (("-", block.control), ("+", block.candidate)):
        if text:
            yield f"{sign} {block.members}  {text}"
