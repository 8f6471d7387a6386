"""Every error that Stageloom raises on purpose.

StageloomError
 |- InputError                 what a person or a file gave us; exit code 2
 |   |- ModelError             an ONNX file that cannot be imported (path, reason)
 |   |   |- UnpinnedShape      dimensions without a number (inputs, each with an example)
 |   |   `- NotNow             no file to read, or an import that was ended; `stageloom-agent run` ends with 4
 |   |- NotFoundError          something is named that does not exist
 |   |- SettingError           an unreadable setting (name, reason)
 |   |- ExtensionError         what another distribution adds, which does not load or work
 |   `- TokenError             a join token that is wrong, used or expired
 |- DecodeError                bytes that are not what they claim to be (what, reason)
 |   |- PlanError              a plan or schedule that does not decode or is not legal
 |   |   `- Unsplittable       operators that cannot be split so (rule)
 |   `- StateError             a state file on disk that does not decode
 |- RefusedError               the other side said no (code, reason)
 |   |- TaskRefused            the agent did not take a task
 |   |- TaskExpired            a deadline passed
 |   |- TaskCancelled          cancelled by its owner, or by a plan that lost its model
 |   |- TaskFailed             the executor failed while running it
 |   |- KeyRevoked             the planner took this device's key away
 |   `- AgentRestarted         the engine restarted while the task was in flight; tasks are at most once
 |- UnavailableError           nothing answered (planner, agent, engine); exit code 4
 |- StorageError               disk full, no permission, a broken database; exit code 5
 `- ExecutorError              a backend that cannot load or run (executor, reason); exit code 6
     `- BackendUnavailable    it cannot now, whatever the plan, and may be able to later

An error carries fields beside its sentence. `str(error)` is one line: the cause, then the remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of both console scripts. A retired number stays reserved."""

    OK = 0
    FAILED = 1  # the command ran and its answer is "no": a comparison differs, a check fails
    USAGE = 2  # wrong arguments or an input that cannot be used
    CANNOT_FAIL = 3  # `verify`: the comparison could not have failed, so it proves nothing
    UNAVAILABLE = 4  # the planner or the agent does not answer, or an agent cannot start yet
    STORAGE = 5  # disk full, no permission, a broken database or state file
    BACKEND = 6  # an executor is missing or does not run
    DENIED = 7  # the other side refused: token, key, revoked device
    INTERRUPTED = 130  # Ctrl-C


class StageloomError(Exception):
    """Base of every error raised on purpose; `exit_code` is what a command ends with."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, cause: str, *, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        sentence = f"{cause}; {remedy}" if remedy else cause
        super().__init__(" ".join(sentence.split()))  # a library's cause may span lines

    def __reduce__(self) -> tuple[object, ...]:
        """By its fields: an exception pickles as a call with its sentence, which not every class takes."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[StageloomError], args: tuple[object, ...], fields: dict[str, object]) -> StageloomError:
    """An error that came from another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class InputError(StageloomError):
    """Something that a person or a file gave us cannot be used."""

    exit_code = ExitCode.USAGE


class ModelError(InputError):
    """An ONNX file that cannot be imported; nothing of it was kept."""


class NotNow(ModelError):
    """There is no file to read at present, or its import was ended: the same may work later."""


@dataclass(frozen=True)
class OpenInput:
    """A graph input of which the file leaves dimensions open."""

    name: str
    claimed: str  # as the file has it: batchx3xheightxwidth, or `no shape`
    example: str  # numbers of the same rank: 1x3x224x224


class UnpinnedShape(ModelError):
    """Graph inputs have dimensions without a number; all of them are named at once, each with an example.

    The remedy is written as `--shape INPUT=DIMS` options; `stageloom.shared.importer.model_argument` writes
    it as a `--model` for the commands that take these.
    """

    def __init__(self, inputs: Sequence[OpenInput]) -> None:
        self.inputs = tuple(inputs)
        claims = ", ".join(f"{found.name!r} {found.claimed}" for found in self.inputs)
        pairs = [f"{found.name}={found.example}" for found in self.inputs]
        options = " ".join(f"--shape {pair}" for pair in pairs)
        super().__init__(
            f"the model leaves dimensions open: {claims}", remedy=f"pin them, for example {options}"
        )


class NotFoundError(InputError):
    """Something is named that does not exist."""


class SettingError(InputError):
    """A setting that cannot be read stops start-up; it is never ignored."""


class ExtensionError(InputError):
    """What another distribution adds by an entry point does not load, or does not do what it must."""


class TokenError(InputError):
    """A join token that is malformed, used or expired."""

    exit_code = ExitCode.DENIED


class DecodeError(StageloomError):
    """Bytes that are not what they claim to be."""

    exit_code = ExitCode.USAGE


class PlanError(DecodeError):
    """A plan or schedule that does not decode, or that is not legal for its graphs."""


class Unsplittable(PlanError):
    """Operators that cannot be split so; `rule` is the word of `stageloom.shared.legality` that is broken."""

    def __init__(self, rule: str, cause: str) -> None:
        self.rule = rule
        super().__init__(cause, remedy="split elsewhere, or leave it whole")


class StateError(DecodeError):
    """A state file on disk that does not decode."""

    exit_code = ExitCode.STORAGE


class RefusedError(StageloomError):
    """The other side said no, and why."""

    exit_code = ExitCode.DENIED


class TaskRefused(RefusedError):
    """The agent did not take the task: `code` says whether the queue, the input or the state refused."""

    def __init__(self, code: str, cause: str, *, remedy: str = "") -> None:
        self.code = code
        super().__init__(cause, remedy=remedy)


class TaskExpired(RefusedError):
    """The task's deadline passed before its result, or was too close for one."""


class TaskCancelled(RefusedError):
    """The task was cancelled before its result."""


class TaskFailed(RefusedError):
    """The executor failed while running the task."""


class KeyRevoked(RefusedError):
    """The planner took this device's key away: it can join again with another one."""


class AgentRestarted(RefusedError):
    """The engine restarted while the task was in flight. Tasks are at most once: submit again if wanted."""


class UnavailableError(StageloomError):
    """Nothing answered in time."""

    exit_code = ExitCode.UNAVAILABLE


class StorageError(StageloomError):
    """The disk, the database or a permission failed."""

    exit_code = ExitCode.STORAGE


class ExecutorError(StageloomError):
    """A backend that is missing, cannot load a model, or failed while running."""

    exit_code = ExitCode.BACKEND


class BackendUnavailable(ExecutorError):
    """A backend that cannot load or run at present: too little memory is free, or its device is not there.

    It says nothing against the plan or its models: the same may work later.
    """
