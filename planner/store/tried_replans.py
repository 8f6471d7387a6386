"""What becomes of a re-plan whose plan is being tried when something newer is desired of its device."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from sqlalchemy import Connection

from stageloom.planner.store.rows import run_on_rows
from stageloom.shared.ids import DeviceId

PENDING: Final = "pending"
"""The outcome of a re-plan under way."""

_TELL: Final = f"""
WITH given (whose, in_epoch, in_generation, now_epoch, now_generation, ended_as, why) AS (VALUES {{rows}})
UPDATE replans SET epoch = now_epoch, generation = now_generation, outcome = ended_as, reason = why
FROM given WHERE device = whose AND epoch = in_epoch AND generation = in_generation AND outcome = '{PENDING}'
"""


Succession: TypeAlias = tuple[tuple[int, int], tuple[int, int], bool]
"""(epoch, generation) that was desired of a device and that is now; whether both desire the same plan."""


def tell_replans(connection: Connection, successions: Mapping[DeviceId, Succession]) -> None:
    """A re-plan goes on under a generation that desires its plan, too; another plan ends it.

    A device that is to measure something, or to take a policy, begins the trial anew under that number.
    """
    rows = []
    for device, (was, now, same_plan) in successions.items():
        if same_plan:
            rows.append((device, *was, *now, PENDING, ""))
        else:
            rows.append((device, *was, *was, "no_gain", f"overtaken by generation {now[0]}.{now[1]}"))
    if rows:
        run_on_rows(connection, _TELL, rows)
