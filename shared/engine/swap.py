"""Moving an instance in flight over to a new plan.

An instance stands at a cut. It may go over where the new plan has the same cut of the same artifact, every
slot in which its live tensors would lie there is free, and the tensors mean the same: the plans' executors
are the same, and the model's precision and batch bucket. It goes only into plans that never wait for members:
elsewhere its arrival in the middle would break the rounds in which `wait: all` moves the models' instances.
It neither leaves nor enters a plan that places its blocks.
"""

from stageloom.shared.engine.records import Instance
from stageloom.shared.engine.slots import InFlight, PlanState, Touched, Track
from stageloom.shared.engine.steps import MoveInstance
from stageloom.shared.graph import Graph, Tensor
from stageloom.shared.ids import StepId
from stageloom.shared.plan import Wait


def takes_tasks_of(graph: Graph, old: Graph) -> bool:
    """Whether `graph` can run each task that was made for `old`: inputs fit, outputs have their places."""
    return _signature(graph) == _signature(old) and all(
        graph.takes(tensor, old.smallest(before))
        for tensor, before in zip(graph.inputs, old.inputs, strict=True)
    )


def _signature(graph: Graph) -> tuple[list[Tensor], list[Tensor]]:
    tensors = graph.tensors
    return [tensors[t] for t in graph.inputs], [tensors[t] for t in graph.outputs]


def find_place(instance: Instance, plan: PlanState) -> tuple[Track, int] | None:
    """Where in `plan` the instance can go on: a replica and the block to run next there."""
    old = instance.track
    if instance.block >= old.blocks or not instance.live or plan.wait is not Wait.NONE:
        return None
    if old.plan.placement is not None or plan.placement is not None:
        return None  # where its tensors are valid is known to its own plan alone
    theirs, ours = old.plan.bound.plan.executors, plan.bound.plan.executors
    if {one.name for one in theirs} != {one.name for one in ours}:
        return None
    index = plan.bound.model_index.get(old.model.name)
    if index is None:
        return None
    model = plan.models[index]
    same_artifact = model.bound.plan.artifact == old.bound.plan.artifact
    if not same_artifact or instance.bucket not in model.bound.buckets:
        return None
    if plan.bound.precisions[index] != old.plan.bound.precisions[old.model.index]:
        return None
    position = (0, *old.bound.plan.cuts)[
        instance.block
    ]  # as the artifact numbers operators: splits may differ
    starts = (0, *model.bound.plan.cuts)
    if position not in starts:
        return None
    block = starts.index(position)
    for track in model.tracks:
        if all(slot.holder is None for slot in track.slots[block].holds):
            return track, block
    return None


def move_to(
    instance: Instance,
    place: tuple[Track, int],
    in_flight: InFlight,
    touched: Touched,
) -> MoveInstance | None:
    """Move an instance in logical time; the action is None where nothing is on the device yet.

    The move counts as a reader of the slots that it leaves and as the writer of those it enters. It happens
    when the steps in its `after` have ended, so those stand for it in the slots' books.
    """
    old, old_block = instance.track, instance.block
    new, block = place
    after: set[StepId] = set()
    stood, stands = old.slots[old_block], new.slots[block]
    left, taken = stood.holds, stands.holds
    if instance.started:
        for slot in left:
            after.update(step for step in slot.writers if step in in_flight)
        for slot in taken:
            after.update(step for step in slot.readers or slot.writers if step in in_flight)
    stand_ins = sorted(after)
    stood.vacate(touched)
    new.plan.population += 1
    instance.track = new
    if new.room >= block:
        new.newest = instance
    instance.block = block
    instance.passed = block
    for slot in taken:
        slot.occupy(instance)
        if slot.behind is not None:  # the block before it can no longer run another instance
            touched[slot.behind.home] = None
    stands.enter(instance, touched)
    if not instance.started:
        return None
    for slot in left:
        slot.readers.extend(stand_ins)
    for slot in taken:
        slot.writers = list(stand_ins)
        slot.readers = []
    for step in stand_ins:
        for plan in (old.plan, new.plan):
            record = in_flight[step]
            if plan not in record.holds:
                record.holds += (plan,)
                plan.steps += 1
    instance.moved_after = tuple(stand_ins)
    return MoveInstance(
        instance.id,
        (old.plan.key, stood.member),
        (new.plan.key, stands.member),
        tuple(stand_ins),
    )
