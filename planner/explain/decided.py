"""Who had a device run a plan, after looking at what, and what the device found. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stageloom.planner.replan.predict import EvaluationVerdict
from stageloom.planner.store.considered import KeptConsidered
from stageloom.shared.ids import Digest
from stageloom.shared.messages.admin import HistoryEntry, ReplanInfo, TrialInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The newest generation of a device that has the plan. `replan` None: no re-plan pushed it.

    `left`: the other plans that the re-plan looked at. `trial`: that generation's, else the plan's newest
    there; None where none is known.
    """

    generation: HistoryEntry
    replan: ReplanInfo | None
    left: int
    trial: TrialInfo | None


def decided(
    plan: Digest,
    history: Sequence[HistoryEntry],
    replans: Sequence[ReplanInfo],
    trials: Sequence[TrialInfo],
    looked_at: Sequence[KeptConsidered],
) -> Decided | None:
    """What is known of one device, each sequence newest first; None: it was never asked to run the plan."""
    entry = next((one for one in history if one.digest == plan), None)
    if entry is None:
        return None
    at = (entry.epoch, entry.generation)
    replan = next((one for one in replans if (one.epoch, one.generation) == at), None)
    trial = next((one for one in trials if (one.epoch, one.generation) == at), None)
    left: set[Digest] = set()
    if replan is not None:
        rows = [one.considered for one in looked_at if one.replan == replan.replan]
        left = {one.plan for one in rows if one.verdict is not EvaluationVerdict.TAKEN} - {plan}
    return Decided(
        generation=entry,
        replan=replan,
        left=len(left),
        trial=trial or next((one for one in trials if one.candidate == plan), None),
    )
