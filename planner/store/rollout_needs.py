"""What rollouts that have not ended need: versions that they bring, and plans that they may give back."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import and_, exists, or_, select
from sqlalchemy.orm import Session

from stageloom.planner.rollout.machine import LIVE
from stageloom.planner.schema.rollout import AskState, RolloutState
from stageloom.planner.store.tables import DesiredRow, RolloutDeviceRow, RolloutRow
from stageloom.shared.ids import DeviceId, Digest

REVERSIBLE: Final = tuple(state.value for state in (*LIVE, RolloutState.STOPPED))
"""States in which a rollout may still give devices their old plans back."""


def rollout_that_needs(session: Session, artifacts: Collection[Digest], plans: Collection[str]) -> str | None:
    """A rollout that brings one of these artifacts, or may give a device one of these plans back."""
    brings = and_(RolloutRow.state.in_(REVERSIBLE), RolloutRow.artifact.in_(list(artifacts)))
    gives = and_(
        RolloutRow.state.in_(REVERSIBLE),
        RolloutRow.name.in_(
            select(RolloutDeviceRow.rollout).where(
                RolloutDeviceRow.old_plan.in_(list(plans)),
                RolloutDeviceRow.state.in_([AskState.ASKED.value, AskState.DONE.value]),
            )
        ),
    )
    return session.scalar(
        select(RolloutRow.name).where(or_(brings, gives)).order_by(RolloutRow.name).limit(1)
    )


def is_asked(session: Session, device: DeviceId) -> bool:
    """Whether a rollout has asked a device to run what is desired of it, and waits for its verdict."""
    asked = exists().where(
        RolloutDeviceRow.device == device,
        RolloutDeviceRow.state == AskState.ASKED.value,
        DesiredRow.device == device,
        DesiredRow.plan == RolloutDeviceRow.new_plan,
    )
    return bool(session.scalar(select(asked)))
