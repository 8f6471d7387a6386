"""What the state found on disk means when the agent starts: an attempt that was going on is over. Pure."""

from typing import Final

from msgspec import structs

from stageloom.edge_agent.link import local, trials
from stageloom.edge_agent.link.events import LinkState
from stageloom.edge_agent.link.states import UNDONE, Cause
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.messages.telemetry import TrialEnded

HELD_MOST: Final = 64
"""Fewer changes than these of what is reported are not on disk: a start counts that many on, so that
`revision` rises over the device's life."""


def at_boot(found: LinkState, now_us: int) -> trials.Changed:
    """The state to go on from, and the rows of trials that the stop has ended.

    A trial may be what stopped the agent, so its candidate is rejected. So may a plan under probation; it
    gets a second chance, since power cuts are more frequent than plans that take the agent down.
    """
    good = found.last_good
    active = good.ref if good is not None else None
    state, local_rows = local.at_boot(structs.replace(found, active=active), now_us)
    rows: tuple[TrialEnded, ...] = ()
    if found.state in UNDONE:
        state = structs.replace(state, revision=state.revision + HELD_MOST)
    if found.state is DeviceState.PROBATION and found.probation_boots:
        state = state.moved(Cause.BOOT_AGAIN, "the agent stopped twice while it was under probation")
    elif found.state is DeviceState.PROBATION:
        state = state.moved(Cause.BOOT, "the agent stopped while it was under probation")
        state = structs.replace(state, probation_boots=1)
    elif found.state is DeviceState.TRIAL:
        state, rows = trials.found_in_trial(state, now_us)
    elif found.state is not None:
        state = state.moved(Cause.BOOT, found.reason)
    return trials.Changed(structs.replace(state, abandoned=0, trial=None), (*rows, *local_rows))
