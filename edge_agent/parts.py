"""The parts of an agent, made once at its start; `stageloom.edge_agent.service` connects them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from stageloom.edge_agent.config import AUTO, AgentConfig
from stageloom.edge_agent.executor_choice import FIRST_CHOICE
from stageloom.edge_agent.lifecycle.check import PlanChecker
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.probation import ProbationConfig
from stageloom.edge_agent.lifecycle.shell import LifecycleShell
from stageloom.edge_agent.lifecycle.statefile import FallbackFile
from stageloom.edge_agent.lifecycle.waiting import WaitingLog
from stageloom.edge_agent.loop import Background, Loop
from stageloom.edge_agent.machine.device import MachineWatch
from stageloom.edge_agent.machine.utilisation import this_machine
from stageloom.edge_agent.replan.policy import LocalPlanner, PolicyRunner
from stageloom.edge_agent.reporting.profiles import ProfileQueue
from stageloom.edge_agent.reporting.telemetry import Journal
from stageloom.edge_agent.store import ArtifactStore
from stageloom.edge_agent.worker.client import EngineClient
from stageloom.edge_agent.worker.messages import Report, WorkerConfig

LifecycleFactory: TypeAlias = Callable[[PlanManager], tuple[LifecycleShell, Sequence[str]]]
"""Makes the lifecycle over the plan manager; also returns what was wrong with the state it found."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that more than one other part needs."""

    config: AgentConfig
    loop: Loop
    engine: EngineClient
    lifecycle: LifecycleShell
    journal: Journal
    artifacts: ArtifactStore
    fallback: FallbackFile
    supervisor: Supervisor
    waiting: WaitingLog
    plans: PlanManager
    background: Background
    checker: PlanChecker  # used on the background's thread only
    machine: MachineWatch
    local: LocalPlanner
    profiles: ProfileQueue
    found: tuple[str, ...]  # what was wrong with the state on disk


def make_parts(
    config: AgentConfig, loop: Loop, make_lifecycle: LifecycleFactory, on_report: Callable[[Report], None]
) -> Parts:
    """Start the engine process, then make the lifecycle: the two take their time side by side.

    Raises:
        StageloomError: the lifecycle cannot be made; nothing is left running.
    """
    artifacts = ArtifactStore(config.home_path / "artifacts")
    fallback = FallbackFile(config.home_path / "fallback")
    before_good, problem = fallback.load()
    supervisor, waiting = Supervisor(Random()), WaitingLog()
    plans = PlanManager(
        supervisor,
        before_good,
        waiting=waiting,
        rng=Random(),
        probation=ProbationConfig(length_s=config.probation_s, guard=config.guard),
        trial=config.trial,
        load_limit_s=config.load_limit_s,
    )
    engine = EngineClient(loop, _worker_config(config), on_report)
    engine.start()
    try:
        lifecycle, problems = make_lifecycle(plans)
    except BaseException:
        engine.shut_down()
        raise
    journal, machine = Journal(lifecycle.record), MachineWatch(this_machine())
    background, checker = Background(loop), PlanChecker(artifacts)
    return Parts(
        config=config,
        loop=loop,
        engine=engine,
        lifecycle=lifecycle,
        journal=journal,
        artifacts=artifacts,
        fallback=fallback,
        supervisor=supervisor,
        waiting=waiting,
        plans=plans,
        background=background,
        checker=checker,
        machine=machine,
        local=LocalPlanner(
            background,
            PolicyRunner(checker.graph, machine.environment),
            lifecycle.handle,
            journal.note,
            Path(config.policy) if config.policy else None,
        ),
        profiles=ProfileQueue(
            engine.send,
            artifacts.path,
            journal.record,
            lifecycle.handle,
            environment=machine.environment,
            clocks=machine.clocks,
            executor=FIRST_CHOICE.name if config.executor == AUTO else config.executor,
            intra_op_threads=config.intra_op_threads,
            wall_s=config.profile_wall_s,
        ),
        found=(*([problem] if problem else []), *problems),
    )


def _worker_config(config: AgentConfig) -> WorkerConfig:
    sign_s = config.silent_engine_s / 3.0  # one may be late
    return WorkerConfig(
        stats_interval_s=config.stats_interval_s,
        sign_interval_s=sign_s if config.stats_interval_s > sign_s else 0.0,
        sample_interval_s=config.alarm_interval_s if config.alarms else 0.0,
        memory_bytes=config.memory_bytes,
        log_level=config.log_level,
    )
