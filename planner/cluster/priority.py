"""How a process of the planner comes after what is served on the same machine."""

import os
from typing import Final

from stageloom.shared.session_nice import leads_session, make_session_nice

BEHIND_SERVING: Final = 5
"""Niceness: a quarter of a core that somebody else wants as well."""

LOWEST: Final = 19


def come_after(niceness: int) -> None:
    """Add to the niceness of this process and, if it leads its session, have that be as nice.

    Where the kernel shares the processor between sessions first (autogroup), niceness counts within one
    alone: an agent in another session would lose half of a core to the nicest search.
    """
    nice = os.nice(niceness)
    if leads_session():  # else it would be a terminal's, with all that runs there
        make_session_nice(nice)
