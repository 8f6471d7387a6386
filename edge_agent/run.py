"""The process behind `stageloom-agent run`: settings in, the agent's main loop, an exit code out.

`python -m stageloom.edge_agent.run SETTINGS` with the settings as JSON. The command line replaces itself with
this, so that neither it nor what it prints with stays in the memory of a process that runs for months.
"""

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from stageloom.edge_agent.config import AUTO, AgentConfig, decode_config
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.shell import LifecycleShell, alone
from stageloom.edge_agent.loop import READ
from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.metrics.settings import check_metrics
from stageloom.edge_agent.parts import LifecycleFactory
from stageloom.edge_agent.service import Agent
from stageloom.edge_agent.serving.settings import check_settings
from stageloom.edge_agent.store import ArtifactStore, HomeLock, StateFile
from stageloom.shared.errors import ExitCode, NotNow, SettingError, StageloomError
from stageloom.shared.session_nice import leads_session, make_session_nice
from stageloom.shared.systemd.notify import manager_of
from stageloom.shared.version import __version__

_log = logging.getLogger("stageloom.edge_agent.run")  # not __main__, whatever started it

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms is what a task would wait while the link's thread decodes a plan."""

BESIDE_IMPORT_S: Final = 300.0
"""What an import may take beyond its own limit: its artifact is hashed and written."""


def main() -> int:
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_open_files()
    faulthandler.enable(2)  # systemd ends a process that hangs by SIGABRT: the log shows where
    try:
        if len(sys.argv) != 2:
            raise SettingError(
                "this process is started by the command line", remedy="use `stageloom-agent run`"
            )
        config = decode_config(sys.argv[1])
        logging.basicConfig(
            level=config.log_level,
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        return run_agent(config)
    except StageloomError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.UNAVAILABLE if isinstance(error, NotNow) else error.exit_code  # 2 ends a service
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def allow_open_files() -> None:
    """As many as the system lets this process have: applications and arenas take some in the engine process,
    too, and the usual soft limit is for programs that use `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_agent(config: AgentConfig, make_lifecycle: LifecycleFactory | None = None) -> ExitCode:
    """Until a signal asks it to end; `make_lifecycle` is for a plan that the settings do not tell.

    Raises:
        StageloomError: it cannot start.
    """
    check_settings(config.serving)
    check_metrics(config.metrics)
    lock = HomeLock(config.home_path)
    if leads_session():
        make_session_nice(config.niceness)
    if make_lifecycle is not None:
        agent = Agent(config, make_lifecycle)
    elif config.models:
        agent = _serving_alone(config)
    else:
        agent = Agent(config, partial(_connected, config))
    with _signals(agent):
        _log.info("agent %s runs in %s; Ctrl-C stops it", __version__, config.home_path.absolute())
        agent.run()
    lock.release()
    return ExitCode.OK


def _serving_alone(config: AgentConfig) -> Agent:
    from stageloom.edge_agent.executor_choice import (
        TIMES_NAME,
        ExecutorChoice,
        ExecutorTimes,
        installed,
        ways,
    )
    from stageloom.edge_agent.lifecycle.alone import first_plan, own_models
    from stageloom.shared.importer.process import limits_in_force

    manager = manager_of(os.environ)
    longest_us = round((limits_in_force(os.environ).wall_s + BESIDE_IMPORT_S) * 1e6)

    def progress(line: str) -> None:
        _log.info(line)
        manager.send(EXTEND_TIMEOUT_USEC=str(longest_us), STATUS=line)

    models = own_models(config, ArtifactStore(config.home_path / "artifacts"), progress)
    times = ExecutorTimes(StateFile(config.home_path / TIMES_NAME), device_class())
    plan = first_plan(config, models, times, progress)
    manager.close()
    wanted = ways(installed(), len(models.cores), config.precision) if config.executor == AUTO else []
    choice = ExecutorChoice(models, times, plan, wanted) if wanted else None
    return Agent(config, lambda plans: (alone(models.runnable(plan, 1), plans), ()), choice)


def _connected(config: AgentConfig, plans: PlanManager) -> tuple[LifecycleShell, Sequence[str]]:
    from stageloom.edge_agent.link.factory import connect_planner

    return connect_planner(config, plans)


@contextlib.contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    """SIGTERM and SIGINT end the agent politely, the second one at once."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def on_signal(events: int) -> None:
        os.read(read, 16)
        _log.info("stopping")
        agent.request_stop()

    agent.loop.watch(read, READ, on_signal)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


if __name__ == "__main__":
    sys.exit(main())
