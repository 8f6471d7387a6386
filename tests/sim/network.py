"""A simulated network: every message may be lost, late, repeated or overtaken by others."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stageloom.planner.dispatch.events import Lane
from stageloom.shared.codec import Codec
from stageloom.shared.messages import bulk, control, telemetry

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.world import World

CODECS: dict[Lane, tuple[Codec[Any], Codec[Any]]] = {
    Lane.CONTROL: (control.TO_PLANNER, control.TO_DEVICE),
    Lane.TELEMETRY: (telemetry.TO_PLANNER, telemetry.TO_DEVICE),
    Lane.BULK: (bulk.TO_PLANNER, bulk.TO_DEVICE),
}
UP, DOWN = 0, 1
_HALF_OPEN_S = 4.0  # until heartbeats tell the planner's sockets that a connection is gone


class Network:
    """Connections by their routing ids, as the planner's ROUTERs and the agents' DEALERs see them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._cut_until_s = [0.0, 0.0]  # up, down
        self._agents: dict[bytes, Agent] = {}
        self._router: set[bytes] = set()

    @property
    def open(self) -> bool:
        """A connection can be made."""
        return self._world.planner is not None and self._world.now_s >= max(self._cut_until_s)

    def cut(self, directions: tuple[int, ...], length_s: float) -> None:
        """Nothing passes in these directions for a while."""
        for one in directions:
            self._cut_until_s[one] = self._world.now_s + length_s

    def connect(self, agent: "Agent") -> bytes:
        """A new connection's routing id."""
        route = self._world.rng.randbytes(5)
        self._agents[route] = agent
        self._router.add(route)
        return route

    def closed(self, route: bytes) -> None:
        """An agent's end is gone; the planner's sockets learn of it at once, or only by heartbeats."""
        if self._agents.pop(route, None) is None:
            return
        half_open = self._world.now_s < self._cut_until_s[UP] or self._world.chance(0.3)
        delay_s = _HALF_OPEN_S if half_open else 0.01
        self._world.later(delay_s, lambda: self._router.discard(route))

    def planner_stopped(self) -> None:
        """Every connection breaks; most agents notice, the others hear nothing any more."""
        world = self._world
        self._router.clear()
        for route, agent in self._agents.items():
            if not world.chance(0.2):
                world.later(0.05, lambda a=agent, r=route: a.lost() if a.route == r else None)  # type: ignore[misc]

    def up(self, agent: "Agent", lane: Lane, message: Any) -> None:
        """From an agent to the planner."""
        route, codec = agent.route, CODECS[lane][UP]
        frame = codec.encode(message)
        self._world.note(agent.name, "-> %s", message)

        def arrive() -> None:
            planner = self._world.planner
            if planner is not None and route in self._router:
                planner.receive(lane, route, agent.key, codec.decode(frame))

        self._carry(UP, arrive)

    def down(self, lane: Lane, route: bytes, message: Any) -> bool:
        """From the planner to whoever is behind a route; False: its sockets know of none."""
        if route not in self._router:
            return False
        codec = CODECS[lane][DOWN]
        frame = codec.encode(message)
        self._world.note("planner", "-> %s", message)

        def arrive() -> None:
            agent = self._agents.get(route)
            if agent is not None and agent.up and agent.route == route:
                agent.receive(lane, codec.decode(frame))

        self._carry(DOWN, arrive)
        return True

    def _carry(self, direction: int, arrive: Callable[[], None]) -> None:
        world = self._world
        if world.now_s < self._cut_until_s[direction] or world.chance(world.faults.loss):
            world.happened["lost"] += 1
            return
        delay_s = 0.001 + (0.0 if world.calm else world.rng.random() * world.faults.delay_s)
        world.later(delay_s, arrive)
        if world.chance(world.faults.repeat):
            world.happened["repeated"] += 1
            world.later(delay_s + world.rng.random(), arrive)
