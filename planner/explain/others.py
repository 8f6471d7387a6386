"""Plans over the same models that were looked at: what was predicted of each, and what came of it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stageloom.planner.replan.predict import PlanEvaluation
from stageloom.planner.store.considered import KeptConsidered
from stageloom.shared.ids import Digest
from stageloom.shared.messages.admin import TrialInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """One plan, this one included.

    `now_ms`: busy device milliseconds for one task of each model, predicted from today's costs; None where
    the plan was not kept. `steps_ms`: the same as a device measured it, block by block; None where not all
    blocks were. `last`: how it was looked at last. `trial`: the newest in which it was the candidate.
    """

    digest: Digest
    name: str
    this: bool
    times: int  # it was looked at
    last: PlanEvaluation
    at_us: int
    now_ms: float | None
    steps_ms: float | None
    trial: TrialInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of plans beside their being looked at, by digest; a plan that is not there is unknown."""

    names: Mapping[Digest, str]
    now_s: Mapping[Digest, float]
    steps_s: Mapping[Digest, float]
    trials: Sequence[TrialInfo]  # newest first


def others(this: Digest, looked_at: Iterable[KeptConsidered], known: Evidence) -> list[Other]:
    """Each plan once, the cheapest under today's costs first, then those that were not kept.

    `looked_at` comes newest first.
    """
    rows: dict[Digest, list[KeptConsidered]] = {}
    for one in looked_at:
        rows.setdefault(one.considered.plan, []).append(one)
    trials: dict[str, TrialInfo] = {}
    for trial in known.trials:
        trials.setdefault(trial.candidate, trial)
    found = [
        Other(
            digest=digest,
            name=known.names.get(digest, ""),
            this=digest == this,
            times=len(seen),
            last=seen[0].considered,
            at_us=seen[0].at_us,
            now_ms=_ms(known.now_s.get(digest)),
            steps_ms=_ms(known.steps_s.get(digest)),
            trial=trials.get(digest),
        )
        for digest, seen in rows.items()
    ]
    return sorted(found, key=lambda one: (one.now_ms is None, one.now_ms or 0.0, -one.at_us))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
