"""How bad a simulated world is, and what really happened in it."""

import random
from dataclasses import dataclass

FAULTS_END_S = 25.0
"""From then on nothing goes wrong any more."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances and sizes; all zero is a world without faults."""

    loss: float = 0.0  # of a message
    repeat: float = 0.0  # of a message
    delay_s: float = 0.01  # the longest of a message; what overtakes is reordered
    cut: float = 0.0  # per second: the network splits, both ways or one way
    agent_crash: float = 0.0  # per action and failpoint: the agent's main process stops there
    engine_crash: float = 0.0  # per command: the engine process stops there
    planner_crash: float = 0.0  # per action: the planner stops there
    torn: float = 0.0  # of a crash: what was written last is cut off
    disk: float = 0.0  # of a write: the agent's disk is full
    store: float = 0.0  # of a commit: it fails; some of those did take place
    slow_store_s: float = 0.2  # the longest that a commit takes
    restore: float = 0.0  # of a planner crash: it comes back with an older copy of its database
    corrupt: float = 0.0  # per second: a byte of an artifact on the agent's disk changes
    wall_jump: float = 0.0  # per second: the wall clock jumps, by up to years
    environment: float = 0.0  # per second: power mode or versions change
    alarm: float = 0.0  # per second: a trigger fires, and a plan made on the device is offered
    clone: float = 0.0  # that a second agent with the same key appears for a while

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        """Some of everything: each kind is off in half of the worlds."""

        def some(most: float) -> float:
            return rng.choice((0.0, rng.random() * most))

        return cls(
            loss=some(0.4),
            repeat=some(0.3),
            delay_s=rng.choice((0.01, 0.2, 1.5)),
            cut=some(0.1),
            agent_crash=some(0.03),
            engine_crash=some(0.08),
            planner_crash=some(0.03),
            torn=some(0.5),
            disk=some(0.2),
            store=some(0.3),
            slow_store_s=rng.choice((0.05, 0.2, 4.0)),
            restore=some(0.5),
            corrupt=some(0.03),
            wall_jump=some(0.1),
            environment=some(0.02),
            clone=some(0.3),
            alarm=some(0.2),
        )
