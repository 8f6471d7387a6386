"""The two plans of a trial, side by side."""

from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import LongText, Reply, Request
from stageloom.planner.schema.replan import TrialInfo
from stageloom.shared.messages.base import DeviceName, Generation, Real, Seconds, SmallCount


class TrialCompareRequest(Request, frozen=True, kw_only=True):
    """The plans of a device's newest trial, or of the one in `generation`."""

    device: DeviceName
    generation: Generation | None = None


class BlockPair(Reply, frozen=True, kw_only=True):
    """What one set of members runs as in both plans; an empty text where a plan combines them otherwise."""

    members: LongText
    control: LongText
    candidate: LongText

    @property
    def same(self) -> bool:
        """Whether both plans run it alike."""
        return self.control == self.candidate


class StageDrift(Reply, frozen=True, kw_only=True):
    """A stage's planned seconds against what sampled steps of it took; `measured_s` None: not sampled."""

    combined_block: SmallCount
    stage: SmallCount
    planned_s: Seconds
    measured_s: Seconds | None
    samples: SmallCount

    @property
    def drift(self) -> float | None:
        """Measured over planned."""
        if self.measured_s is None or self.planned_s <= 0.0:
            return None
        return self.measured_s / self.planned_s


class TrialComparison(Reply, frozen=True, kw_only=True):
    """A trial's plans. `predicted_...busy`: busy device seconds for one task of each model a second.

    Those, `predicted_ratio` (above 1 where the candidate is better) and `blocks` are missing where the
    planner does not know the control: the device planned it alone.
    """

    trial: TrialInfo
    blocks: Annotated[tuple[BlockPair, ...], Meta(max_length=1 << 16)] = ()
    predicted_control_busy: Real | None = None
    predicted_candidate_busy: Real | None = None
    predicted_ratio: Real | None = None
    drift: Annotated[tuple[StageDrift, ...], Meta(max_length=1 << 16)] = ()
