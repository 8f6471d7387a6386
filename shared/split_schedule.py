"""How a model that is split runs on two resources: the halves side by side, all else in the model's order."""

from collections.abc import Mapping, Sequence

from stageloom.shared.schedule import OWN_RESOURCE, StageSchedule, stage_of
from stageloom.shared.split_graph import SplitOrigin, SplitRole


def split_schedule(
    origins: Sequence[SplitOrigin],
    resources: tuple[int, int] = (0, 1),
    elsewhere: Mapping[int, int] | None = None,
) -> StageSchedule:
    """One operator after another, the two halves of a split as one stage on `resources`.

    `origins` are those of the combined block's operators, in its order. `elsewhere` has the resources of
    operators that are not split, by their number in the artifact's graph: others run on their lane's own.
    """
    placed = elsewhere or {}
    stages = []
    for op, origin in enumerate(origins):
        if origin.role is SplitRole.FIRST:
            stages.append(stage_of(((op,), (op + 1,)), False, resources))
        elif origin.role is SplitRole.WHOLE:
            stages.append(stage_of(((op,),), False, [placed.get(origin.ops[0], OWN_RESOURCE)]))
        elif origin.role is SplitRole.JOIN:
            stages.append(stage_of(((op,),), False, [OWN_RESOURCE]))
    return StageSchedule(tuple(stages))
