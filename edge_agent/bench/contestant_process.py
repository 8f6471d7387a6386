"""A contestant in a process of its own: asked over a pipe, and stopped while others have their turn.

Its process leads a process group, which is suspended as a whole (SIGSTOP): runtimes whose threads spin while
they wait, and agents that look after themselves, take no processor time outside their own windows.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from stageloom.edge_agent.bench.contestant import Contestant, ContestantSetting, ReportingContestant
from stageloom.edge_agent.bench.load import Array, ArrivalWindow, WindowResult, judge
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.window_run import Carried, WindowRunner
from stageloom.shared.errors import ExecutorError, StageloomError

_START_S: Final = 300.0  # for one that measures nothing; others end themselves when they get nowhere
_ANSWER_S: Final = 180.0  # beyond what was asked for
_STOP_S: Final = 20.0
_INPUTS: Final = 4  # different ones for each model
_WARM_UP_S: Final = 0.1
_SWITCH_INTERVAL_S: Final = 0.0005  # the thread that hands tasks over waits no 5 ms for Python's lock


class ContestantError(ExecutorError):
    """A contestant cannot serve these models, or has died."""


@dataclass(frozen=True)
class ClosedLoop:
    """Ask what is carried with some tasks always open; `models` are the tasks' models, over and over."""

    models: tuple[int, ...]
    outstanding: int
    seconds: float


class ContestantProcess:
    """The handle of one contestant's process, which begins to start.

    Once it is ready it is suspended but for its own windows.
    """

    def __init__(self, setting: ContestantSetting, models: Sequence[ModelUnderTest]) -> None:
        self.name = setting.name
        self._start_s = start_limit_s(setting)
        self.problem = self.plan = ""  # as in `ReportingContestant`
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, setting, tuple(models)))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            ContestantError: it cannot serve the models, or was killed; it has ended.
        """
        try:
            self._receive(self._start_s)
        except BaseException:
            self.stop()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def group(self) -> int:
        """The process group of everything that it runs."""
        assert self._process.pid is not None
        return self._process.pid

    def window(self, window: ArrivalWindow) -> WindowResult:
        """Run one window and judge it.

        Raises:
            ContestantError: the contestant has died.
        """
        ended_s: Array = self._ask(window, window.last_s)
        return judge(window, ended_s)

    def saturated(self, wanted: ClosedLoop) -> Carried:
        """What it carries with some tasks always open.

        Raises:
            ContestantError: the contestant has died.
        """
        carried: Carried = self._ask(wanted, wanted.seconds)
        return carried

    def stop(self) -> None:
        """End it, and whatever it has started: at once where the wait for that is interrupted."""
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(_STOP_S)
        finally:
            self.kill()
            self._process.join()
            self._pipe.close()

    def kill(self) -> None:
        """End it and whatever it has started without a wait, suspended or not; from any thread."""
        self._process.kill()  # it may not lead its group yet
        self._signal(signal.SIGKILL)

    def _ask(self, request: object, takes_s: float) -> Any:
        self._signal(signal.SIGCONT)
        try:
            self._pipe.send(request)
            return self._receive(takes_s + _ANSWER_S)
        except OSError as error:
            raise ContestantError(f"{self.name} has died: {error}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def _receive(self, within_s: float | None) -> Any:
        if not self._pipe.poll(within_s):
            raise ContestantError(f"{self.name} does not answer within {within_s:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError as error:
            raise ContestantError(f"{self.name} has died") from error
        if isinstance(answer, _Failure):
            raise ContestantError(f"{self.name}: {answer.text}")
        value, self.problem, self.plan = answer
        return value

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


def start_limit_s(setting: ContestantSetting) -> float | None:
    """How long a contestant may take to start. One that measures takes as long as its models and executors
    need: it has limits of its own, for each step."""
    return None if setting.measures else _START_S


@dataclass(frozen=True)
class _Failure:
    text: str


def why_it_cannot_serve(contestant: Contestant, runner: WindowRunner, models: Sequence[int]) -> str:
    """Start a contestant and warm it up: why that failed, or that none of these models' tasks had a result;
    empty where one had."""
    try:
        contestant.start(runner.ended)
        runner.keep_open(contestant, models, 1, _WARM_UP_S)
    except Exception as error:  # runtimes' exceptions share no base class
        return f"{type(error).__name__}: {str(error)[:300]}"
    if runner.completed:
        return ""
    return problem_and_plan(contestant)[0] or "none of its first tasks had a result"


def problem_and_plan(contestant: Contestant) -> tuple[str, str]:
    """As in `ReportingContestant`; of many contestants there is nothing to tell."""
    if isinstance(contestant, ReportingContestant):
        return contestant.problem, contestant.plan
    return "", ""


def _live(pipe: Connection, setting: ContestantSetting, models: tuple[ModelUnderTest, ...]) -> None:
    """The contestant's process: start, then a window for each request, until the pipe closes or says None."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    runner = WindowRunner([model.feeds(_INPUTS) for model in models])
    contestant = setting.make(models)
    everything = range(len(models))
    if failure := why_it_cannot_serve(contestant, runner, everything):
        pipe.send(_Failure(failure))
        contestant.stop()
        return
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would fall on any window
    pipe.send((None, *problem_and_plan(contestant)))
    try:
        while (request := pipe.recv()) is not None:
            runner.keep_open(contestant, everything, 1, _WARM_UP_S)
            value: object
            if isinstance(request, ClosedLoop):
                value = runner.closed_loop(contestant, request.models, request.outstanding, request.seconds)
            else:
                value = runner.open_loop(contestant, request)
            pipe.send((value, *problem_and_plan(contestant)))
            gc.collect(0)
    except (EOFError, BrokenPipeError):
        pass  # whoever compares is gone
    except StageloomError as error:
        with contextlib.suppress(OSError):
            pipe.send(_Failure(str(error)))
    finally:
        contestant.stop()
