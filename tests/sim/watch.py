"""What must hold in every simulated world, after every step: one method per promise. Tests plant defects."""

from collections import Counter
from typing import TYPE_CHECKING

from stageloom.edge_agent.lifecycle.attempts import Way
from stageloom.edge_agent.lifecycle.states import UNDONE, VERDICTS, LinkState
from stageloom.shared.engine.trial import TrialRecord
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import DeviceState, Report

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.world import World

Pair = tuple[int, int]


class Broken(AssertionError):
    """A promise was broken; the first word of the message is its name."""


def require(holds: bool, promise: str, text: str = "") -> None:
    """Break off unless it holds.

    Raises:
        Broken: it does not.
    """
    if not holds:
        raise Broken(f"{promise}: {text}")


class Memory:
    """What was seen of one agent's disk, over all its lives."""

    def __init__(self) -> None:
        self.saved = LinkState()
        self.before = LinkState()  # the copy before that
        self.saving: LinkState | None = None  # under way when the process stopped
        self.newest: Pair = (0, 0)
        self.committed: dict[Pair, Digest | None] = {}
        self.last_commit: Pair = (0, 0)
        self.verdicts: dict[Pair, DeviceState] = {}  # in the present environment
        self.recorded: set[Digest] = set()  # plans whose record was on disk before they ran
        self.trial: TrialRecord | None = None  # the newest that was on disk
        self.found_in_trial: Pair | None = None  # by the start of this life


class Watch:
    """Sees every write, report and commit of a world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._memory: dict[str, Memory] = {}
        self._desired: Pair = (0, 0)
        self._revision = (0, 0)  # boot and revision of the stored report
        self._report: Report | None = None  # the stored one that was checked last
        self._audited: dict[str, tuple[int, int, int]] = {}  # by agent: what its books were checked at
        self.lost: Counter[int] = Counter()  # by boot a mask of rows that an older database has not
        self.states: set[DeviceState] = set()
        self.tasks = 0
        self.checks = 0

    def memory(self, agent: "Agent") -> Memory:
        """What was seen of an agent's disk."""
        return self._memory.setdefault(agent.name, Memory())

    # -- the agent's disk -----------------------------------------------------------------------------------

    def booted(self, agent: "Agent", state: LinkState, problem: str | None) -> None:
        """What a start finds is what was written last, or, where that was cut off, what was before."""
        seen = self.memory(agent)
        possible = [seen.saved, *([seen.saving] if seen.saving is not None else [])]
        if problem:
            possible += [seen.before, LinkState()] if seen.before == LinkState() else [seen.before]
            self._forget(seen, state)
        require(state in possible, "disk", f"a start finds {state}, written was {possible}")
        if state.environment != seen.saved.environment:
            seen.verdicts.clear()
        if problem:
            seen.before = state
        elif state != seen.saved:
            seen.before = seen.saved  # the write was through, though nobody heard of it
        seen.saved, seen.saving = state, None
        seen.found_in_trial = _pair(state) if state.state is DeviceState.TRIAL else None
        self._take_record(seen, state)

    def _forget(self, seen: Memory, state: LinkState) -> None:
        """An older copy is all that is left: what it does not know may happen again."""
        held = _pair(state)
        seen.newest, seen.last_commit = held, min(seen.last_commit, held)
        seen.committed = {pair: plan for pair, plan in seen.committed.items() if pair < held}
        seen.verdicts = {pair: verdict for pair, verdict in seen.verdicts.items() if pair < held}

    def saving(self, agent: "Agent", state: LinkState) -> None:
        """A write begins; the process may stop within."""
        self.memory(agent).saving = state

    def held(self, agent: "Agent", state: LinkState) -> None:
        """A state is believed and was not written: a start must find the same from what is on the disk."""
        seen = self.memory(agent)
        self.states.update([state.state] if state.state is not None else [])
        require(state.state in UNDONE and seen.saved.state in UNDONE, "held", f"{state} over {seen.saved}")
        require(_pair(state) == _pair(seen.saved), "held", f"{_pair(state)} over {_pair(seen.saved)}")
        require(state.active == seen.saved.active, "held", "what runs is not on the disk")

    def saved(self, agent: "Agent", state: LinkState) -> None:
        """A state has reached the disk."""
        seen = self.memory(agent)
        seen.before, seen.saved, seen.saving = seen.saved, state, None
        if state.environment != seen.before.environment:
            seen.verdicts.clear()  # a verdict holds until the environment changes
        pair = _pair(state)
        require(pair >= seen.newest, "generation", f"{agent.name} had {seen.newest}, now {pair}")
        seen.newest = pair
        if state.state is not None:
            self.states.add(state.state)
        if seen.found_in_trial == pair:
            rejected = state.state is DeviceState.REJECTED
            require(rejected, "trial", f"{agent.name} found a trial at its start, and is {state.state}")
        seen.found_in_trial = None
        self._take_record(seen, state)
        if state.state is DeviceState.COMMITTED:
            self._committed(agent, seen, state)
        elif state.state in VERDICTS:
            seen.verdicts[pair] = state.state

    def _take_record(self, seen: Memory, state: LinkState) -> None:
        """A plan that is about to run is named on the disk."""
        if state.state in (DeviceState.PROBATION, DeviceState.TRIAL) and state.desired is not None:
            seen.recorded.add(state.desired.plan_digest or Digest(""))
        if state.local is not None and state.local.state in (DeviceState.PROBATION, DeviceState.TRIAL):
            seen.recorded.add(state.local.plan.ref.digest)
        seen.trial = state.trial or seen.trial

    def _committed(self, agent: "Agent", seen: Memory, state: LinkState) -> None:
        """At most one plan is ever committed in a generation, in rising order, and never after a verdict."""
        pair = _pair(state)
        plan = state.desired.plan_digest if state.desired else None
        require(seen.committed.setdefault(pair, plan) == plan, "committed", f"two plans in {pair}")
        require(pair >= seen.last_commit, "committed", f"{pair} after {seen.last_commit}")
        seen.last_commit = pair
        verdict = seen.verdicts.get(pair)
        require(verdict is None, "verdict", f"{agent.name} commits {pair} after it was {verdict}")
        good = state.last_good.ref.digest if state.last_good else None
        if state.planned is None:  # else last-known-good was planned here, beside the desired one
            require(plan in (None, good), "committed", f"{plan} is, {good} is last-known-good")
        nature = self._world.natures.get(plan) if plan else None
        require(nature is None or nature.sound, "committed", f"{agent.name} commits a plan that is {nature}")
        if state.way == Way.TRIAL.value and seen.trial is not None and seen.trial.candidate == plan:
            control = self._world.natures.get(seen.trial.control)
            better = nature is None or control is None or nature.speed > control.speed
            require(better, "committed", f"{agent.name} prefers {nature} to {control}")

    def plan_runs(self, agent: "Agent", digest: Digest) -> None:
        """A plan runs only after its record is on disk, so that a crash under it is known to be its fault."""
        seen = self.memory(agent)
        good = seen.saved.last_good
        known = digest in seen.recorded or (good is not None and good.ref.digest == digest)
        require(known, "record", f"{agent.name} runs {digest[:8]} without a record of it on its disk")

    def tasks_ended(self, agent: "Agent", number: int) -> None:
        """Tasks ended, each once: the agent forgets a task when it ends and knows no other."""
        self.tasks += number

    # -- after every step -----------------------------------------------------------------------------------

    def check(self) -> None:
        """All that can be asked of the present moment."""
        self.checks += 1
        self._check_planner()
        for agent in self._world.agents:
            if agent.up:
                self._check_report(agent)
                self._check_books(agent)
        self._check_ledgers()

    def restored(self) -> None:
        """The planner's database is an older one."""
        self._audited.clear()
        self._desired = (0, 0)
        self._revision = (0, 0)

    def _check_planner(self) -> None:
        """What the planner desires, and what it has on record, never falls."""
        member = self._world.member
        if member.desired is not None:
            pair = (member.desired.epoch, member.desired.generation)
            if pair < self._desired:
                raise Broken(f"generation: the planner desires {pair} after {self._desired}")
            self._desired = pair
        if member.report is not None and member.report is not self._report:
            self._report = member.report
            boot, before = self._revision
            if member.boot == boot and member.report.revision < before:
                raise Broken(f"revision: {member.report.revision} is stored after {before}")
            self._revision = member.boot, member.report.revision
            self._check_up_to_date(member.report)

    def _check_up_to_date(self, report: Report) -> None:
        """Who reports a plan as committed and running has found it sound: one that rolled back never does."""
        if report.state is DeviceState.COMMITTED and report.seen is not None and report.active == report.seen:
            nature = self._world.natures[report.seen]
            if not nature.sound:
                raise Broken(f"up-to-date: with a plan that is {nature}")

    def _check_report(self, agent: "Agent") -> None:
        """An agent reports its state and no other, whatever it hopes for."""
        report, state = agent.core.report(), agent.core.state
        if (report.epoch, report.generation) != _pair(state) or report.state is not state.state:
            raise Broken(f"report: {report} of {state}")
        self._check_up_to_date(report)

    def _check_books(self, agent: "Agent") -> None:
        """produced = stored + dropped + spooled, row by row; what an older database lost is named as such."""
        masks = self._world.store.masks
        books = (agent.life, agent.spool.changes, self._world.store.written)
        if self._audited.get(agent.name) == books:
            return
        self._audited[agent.name] = books
        for boot, (produced, dropped, spooled) in agent.spool.masks().items():
            kept = masks.get(boot, 0) | spooled
            if kept & dropped:
                raise Broken(f"books: boot {boot:x}: rows are dropped and kept as well")
            if produced != kept | dropped | self.lost[boot]:
                raise Broken(
                    f"books: boot {boot:x}: produced {produced:b}, dropped {dropped:b}, spooled {spooled:b}, "
                    f"stored {masks.get(boot, 0):b}, lost with a database {self.lost[boot]:b}"
                )

    def _check_ledgers(self) -> None:
        """The planner's own figures balance after every commit: produced = stored + dropped + lost."""
        store = self._world.store
        if store.written == store.audited:
            return
        store.audited = store.written
        for (_, boot), book in store.books.items():
            below = (1 << book.produced) - 1
            kept = store.masks.get(boot, 0)
            gone = self.lost[boot] & ~kept & below
            if book.produced != (kept & below).bit_count() + book.dropped + gone.bit_count():
                raise Broken(f"books: the planner counts {book} and has {kept.bit_count()}")
            if book.lost > gone.bit_count() or book.stored != kept.bit_count():
                raise Broken(f"books: the planner counts {book}, {gone.bit_count()} rows are lost")


def _pair(state: LinkState) -> Pair:
    return (state.desired.epoch, state.desired.generation) if state.desired else (0, 0)
