"""The executor that computes nothing and honours order: for the engine's own tests and its budget.

It checks what a real backend would rely on, and answers zeros of the right shapes.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct

from stageloom.edge_agent.executor.base import (
    BlockTap,
    GroupTime,
    OperatorTime,
    Rows,
    StepResult,
    TimingRequest,
    require_pinned,
)
from stageloom.edge_agent.executor.threads import StepOrder
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, MoveInstance, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest, StepId

HISTORY = 4096
_NONE = StepId(-1)


class NullRecord(Struct, frozen=True, gc=False):
    """What one step did: the operators in the order they would have run, as (position, operators)."""

    step: StepId
    items: tuple[tuple[int, tuple[int, ...]], ...]


class NullExecutor:
    """Keeps the last HISTORY steps in `history`."""

    name = "null"

    def __init__(self) -> None:
        self.tracing = False
        self.tap: BlockTap | None = None
        self.pause: Callable[[], None] | None = None
        self.history: deque[NullRecord] = deque(maxlen=HISTORY)
        self._order = StepOrder()
        self._plans: dict[PlanKey, BoundPlan] = {}
        self._does: dict[tuple[PlanKey, int, int], tuple[tuple[int, tuple[int, ...]], ...]] = {}
        self._zeros: dict[tuple[PlanKey, int, int], dict[str, np.ndarray]] = {}  # by model and block border
        self._issued: dict[StepId, Step] = {}
        self._last_issued: dict[int, StepId] = {}  # by lane
        self._next_block: dict[InstanceId, int] = {}
        self._moves: dict[InstanceId, list[MoveInstance]] = {}  # until the first step on the new plan

    def stated_bytes(self, bound: BoundPlan, *, alone: bool = False) -> int:
        return 0

    @property
    def held_bytes(self) -> int:
        return 0

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Lower every full mask, so that a broken schedule fails here."""
        require_pinned(bound, self.name)
        self._plans[key] = bound
        for index, combined in enumerate(bound.combined):
            self._program(key, index, combined.full_mask)
        for index, model in enumerate(bound.models):
            for block in model.blocks:
                tensors = [model.graph.tensors[t] for t in block.live_out]
                self._zeros[key, index, block.index] = {
                    t.name: np.zeros(t.shape, t.dtype) for t in tensors if t.dtype != "bfloat16"
                }

    def prepare(self, program: ProgramKey) -> None:
        """Lower the schedule under the program's mask."""
        self._program(program.plan, program.combined, program.mask)

    def _program(self, key: PlanKey, combined: int, mask: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What a program does, see `NullRecord.items`; it obeys its waits when it runs in order."""
        known = self._does.get((key, combined, mask))
        if known is None:
            launches = self._plans[key].launches(combined, mask)
            for index, item in enumerate(launches):
                if any(before >= index for before in item.waits):
                    raise ExecutorError(f"item {index} of combined block {combined} waits for a later item")
            known = self._does[key, combined, mask] = tuple((item.member, item.ops) for item in launches)
        return known

    def issue(self, step: Step, feeds: Mapping[InstanceId, Rows]) -> None:
        """Check that ids rise within the lane and that `after` names earlier steps."""
        step_id, lane, after = step.id, step.lane, step.after
        if step_id <= self._last_issued.get(lane, _NONE):
            raise ExecutorError(f"step {step_id} was issued out of order on lane {lane}")
        if after and max(after) >= step_id:
            raise ExecutorError(f"step {step_id} waits for a step that comes later")
        self._last_issued[lane] = step_id
        for member in step.members:
            if member.member.block == 0 and len(feeds.get(member.instance, ())) != len(member.tasks):
                raise ExecutorError(f"step {step.id} begins instance {member.instance} without its inputs")
        self._order.issue(step)
        self._issued[step_id] = step

    def wait(self, step: StepId) -> StepResult:
        """Check that every active member is where it should be, then that the items obey their waits."""
        issued = self._issued.pop(step)
        if issued.after:
            self._order.begin(issued)
        started_s = time.monotonic()
        try:
            outputs: dict[InstanceId, Rows] = {}
            for member in issued.members:
                self._advance(issued.program.plan, member)
                if member.last:
                    outputs[member.instance] = self._outputs(issued, member)
            groups = self._run(issued)
        finally:
            self._order.end(issued)
        return StepResult(started_s, time.monotonic(), outputs, groups)

    def _advance(self, plan: PlanKey, member: StepMember) -> None:
        instance, block = member.instance, member.member.block
        reached = self._next_block.get(instance, 0)
        moves = self._moves.get(instance) if self._moves else None
        while moves and moves[0].old[0] != plan:
            move = moves.pop(0)
            if move.old[1].block != reached:
                raise ExecutorError(f"instance {instance} was moved from where it was not")
            reached = move.new[1].block
        if reached != block:
            raise ExecutorError(f"instance {instance} is before block {reached}, not {block}")
        if member.last:
            self.drop(instance)
        else:
            self._next_block[instance] = reached + 1

    def _run(self, step: Step) -> tuple[GroupTime, ...]:
        key = step.program
        if not step.fallback:
            does = self._program(key.plan, key.combined, key.mask)
        else:
            alone = [self._program(key.plan, key.combined, 1 << m.position) for m in step.members]
            does = tuple(run for program in alone for run in program)
        self.history.append(NullRecord(step.id, does))
        if self.pause is None and not self.tracing:
            return ()
        masks = [1 << m.position for m in step.members] if step.fallback else [key.mask]
        groups: list[GroupTime] = []
        for mask in masks:
            for index, item in enumerate(self._plans[key.plan].launches(key.combined, mask)):
                if self.pause is not None:
                    self.pause()
                now_s = time.monotonic()
                groups.append(GroupTime(index, item.stream, now_s, now_s))
        return tuple(groups) if self.tracing else ()

    def _outputs(self, step: Step, member: StepMember) -> list[dict[str, np.ndarray]]:
        border = self._zeros[step.program.plan, member.member.model, member.member.block]
        return [border for _ in member.tasks]

    def move(self, action: MoveInstance) -> None:
        """Remember it; steps on the old plan may still be running."""
        self._moves.setdefault(action.instance, []).append(action)

    def drop(self, instance: InstanceId) -> None:
        self._next_block.pop(instance, None)
        self._moves.pop(instance, None)

    def time_operators(
        self, artifact: Artifact, request: TimingRequest, idle: Callable[[], bool]
    ) -> tuple[OperatorTime, ...]:
        """Nothing runs, so nothing takes time."""
        return (OperatorTime(0.0, 0.0, request.repeats),) * len(artifact.graph.operators)

    def unload(self, key: PlanKey) -> None:
        self._plans.pop(key, None)
        for program in [program for program in list(self._does) if program[0] == key]:
            del self._does[program]
        for border in [border for border in list(self._zeros) if border[0] == key]:
            del self._zeros[border]

    def drop_idle(self) -> None: ...

    def close(self) -> None:
        for key in list(self._plans):
            self.unload(key)
