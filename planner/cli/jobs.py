"""Jobs from the command line: a line that shows how far one is, and Ctrl-C, which ends it."""

import os
import re
import sys
import time
from typing import Final, TypeVar

from stageloom.planner.api.client import result
from stageloom.planner.api.route import Route
from stageloom.planner.cli.connection import Caller, connected
from stageloom.planner.cli.output import progress
from stageloom.planner.schema.base import Request
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")

_BAR: Final = 30
_NUMBERS: Final = re.compile(r"\d+")


def run_job(route: Route[Q, R], request: Q) -> R:
    """Have the planner do something that takes long, show how far it is, and return its result.

    Ctrl-C ends the job. What ends well even then (a tournament has its best so far) returns its result.

    Raises:
        StageloomError: the planner said no, is not there, or the job failed.
        KeyboardInterrupt: Ctrl-C, and the job has no result.
    """
    with connected(live=not route.offline) as caller:
        line = ProgressLine()
        job = caller.start(route, request)
        try:
            end = _followed(caller, job, line)
        except KeyboardInterrupt:
            line.end()
            progress("ending it; Ctrl-C again leaves it to the planner")
            caller.cancel(job.job)
            end = _followed(caller, job, line)
            if end.state is not JobState.DONE:
                raise
        return result(route, end)


def _followed(caller: Caller, job: JobInfo, line: "ProgressLine") -> JobInfo:
    try:
        for info in caller.follow(job.job):
            if info.state is JobState.RUNNING:
                line.show(info.progress)
        return info
    finally:
        line.end()


_USUAL_COLUMNS: Final = 80
_PAUSE_S: Final = 1.0
"""Between two lines that differ in numbers: a tournament may count hundreds of plans."""


def _columns() -> int:
    """Of the terminal that stderr is; some tell of none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


class ProgressLine:
    """One line that is redrawn on a terminal; elsewhere a line for each new text, but for numbers that change
    faster than `_PAUSE_S`."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""
        self._words, self._told_s = "", 0.0
        self._began_s = time.monotonic()

    def show(self, told: JobProgress) -> None:
        """Show how far something is; nothing where that has no text."""
        if not told.text:
            return
        figures = ", ".join(f"{name} {value:.4g}" for name, value in told.figures.items())
        text = f"{told.text}: {figures}" if figures else told.text
        if self._live:
            filled = round(_BAR * min(told.done / told.size, 1.0)) if told.size else 0
            bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] {told.done} of {told.size}, " if told.size else ""
            # What wraps would be redrawn from its last row on, and leave the others behind.
            sys.stderr.write(f"\r\x1b[K{f'{bar}{text}'[: _columns() - 1]}")
            sys.stderr.flush()
        elif text != self._shown:
            words = _NUMBERS.sub("", told.text)
            if words == self._words and told.elapsed_s < self._told_s + _PAUSE_S:
                return
            self._words, self._told_s = words, told.elapsed_s
            count = f"{told.done} of {told.size}, " if told.size else ""
            progress(f"{told.elapsed_s:.1f} s, {count}{text}")
        self._shown = text

    def end(self) -> None:
        """Leave the line."""
        if self._live and self._shown:
            sys.stderr.write("\n")
        self._shown = ""
