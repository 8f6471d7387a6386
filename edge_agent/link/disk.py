"""Which states the link core may believe: those on disk, or that a start would make of what is. Pure."""

from stageloom.edge_agent.link.boot import HELD_MOST
from stageloom.edge_agent.link.events import Hold, LinkState, Persist


class Disk:
    """Follows states on their way to the disk, and says which one is left after a failure."""

    def __init__(self, found: LinkState) -> None:
        self.error: str | None = None  # why the last write failed
        self.settled = False  # what the state found at boot means is decided
        self._believed = found
        self._settled_durably = False
        self._on_disk = found
        self._written = found  # will be on disk once the actions handed out are carried out
        self._blocked_until_s = 0.0

    def blocked(self, now_s: float) -> bool:
        """A write failed a moment ago: nothing new is begun until the next may succeed."""
        return now_s < self._blocked_until_s

    def keep(self, state: LinkState) -> Hold | Persist:
        """How to take over a state: on disk first, unless a start would find the same anyway."""
        held = state.revision < self._written.revision + HELD_MOST
        if held and state.same_at_start(self._written):
            return Hold(state)
        self._written = state
        return Persist(state)

    def persisted(self, state: LinkState) -> None:
        """A `Persist` reached the disk."""
        self._on_disk, self.error = state, None
        self.held(state)

    def held(self, state: LinkState) -> None:
        """The shell came to a `Hold`, and whatever was before it is done."""
        self._believed, self._settled_durably = state, self.settled

    def failed(self, reason: str, again_s: float) -> LinkState:
        """A write failed; the state to go back to. `again_s`: when to try again."""
        self._written, self.settled = self._on_disk, self._settled_durably
        self.error, self._blocked_until_s = reason, again_s
        return self._believed
