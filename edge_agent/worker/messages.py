"""What passes between the agent's link process and the engine process: commands one way, reports the other.

Both ends run the same code from the same installation and trust each other, so the messages carry no
version; task contents are still checked, since a wrong offset must fail one task and not the process.
Times are seconds on CLOCK_MONOTONIC, which both processes share.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.engine.steps import Outcome, PlanKey
from stageloom.shared.errors import SettingError
from stageloom.shared.ids import TaskId
from stageloom.shared.messages.outputs import OutputsVerdict

MAX_MESSAGE_BYTES = 64 << 10
"""A message larger than this is a mistake; bulk data travels as file descriptors."""

MAX_GROUPS = 128
"""Groups of a step that a trace tells: as many as a row of telemetry holds."""

MAX_TIMES = 2048
"""Operator times per report: at most 24 bytes each, so that they fit a message."""

Place: TypeAlias = tuple[str, int, int]
"""A tensor's name, the arena it lies in, and its offset there in bytes.

The name is the graph's. In a layout that names several models it may be `MODEL/TENSOR`; an input without
the prefix goes to every model that has an input of that name.
"""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base: encoded as a list that begins with the tag."""


# Commands


class LoadPlan(_Message, frozen=True, tag=1):
    """Load a plan beside whatever runs; its canonical bytes lie in the memory file sent along."""

    key: int
    artifacts: dict[str, str]  # digest to path


class SwitchPlan(_Message, frozen=True, tag=2):
    """Send new launches to this plan. With `keep` the one before stays loaded: it will be active again."""

    key: int
    keep: bool = False


class Unload(_Message, frozen=True, tag=3):
    """Free a loaded plan that is not active."""

    key: int


class AddArena(_Message, frozen=True, tag=4):
    """Map a client's memory file, which is sent along."""

    arena: int
    size_bytes: int


class AddApplication(_Message, frozen=True, tag=24):
    """An application's socket, sent along: ends of its tasks are told there, and to the agent afterwards."""

    application: int


class DropApplication(_Message, frozen=True, tag=25):
    """The application is gone: ends of its tasks are told to the agent alone."""

    application: int


class DropArena(_Message, frozen=True, tag=5):
    """Forget an arena; tasks that lie in it end as cancelled."""

    arena: int


class AddLayout(_Message, frozen=True, tag=20):
    """A layout: the models of tasks to come, and where their tensors lie."""

    layout: int
    models: tuple[str, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    application: int = 0  # whose tasks they are; 0: the agent tells their ends
    shapes: tuple[tuple[int, ...], ...] = ()  # of the inputs, for models with open dimensions; [] or [inputs]


class DropLayout(_Message, frozen=True, tag=21):
    """Forget a layout; tasks that lie in it end as they would have."""

    layout: int


class RunTask(_Message, frozen=True, tag=6):
    """One task. Inputs are read in place, outputs are written in place before TaskDone says `completed`."""

    task: TaskId
    layout: int
    priority: int = 0
    deadline_s: float | None = None
    owner_task: int = 0  # its number at the application
    received_at_s: float = 0.0  # when the agent read it


class CancelTask(_Message, frozen=True, tag=7):
    """End a task early if it has not ended."""

    task: TaskId


class Profile(_Message, frozen=True, tag=8):
    """Time an artifact as a whole, and every operator of it, while the queues are empty.

    `parts`: and of operators that may be split the parts of so many extents per axis; 0: none.
    """

    request: int
    artifact: str
    path: str
    executor: str = "onnx"
    timing: TimingRequest = TimingRequest()
    parts: int = 0


class ProfileStages(_Message, frozen=True, tag=12):
    """Time the stages of a plan beside what runs; its canonical bytes lie in the memory file sent along.

    Of all its combined blocks, or of those named. `repeats` of each, and more until steps took `at_least_s`
    together. At most `limit_s` of work, in pauses of the queues, within `wall_s`. Answered by `StageTimes`.
    """

    request: int
    artifacts: dict[str, str]  # digest to path
    repeats: int = 9
    limit_s: float = 10.0
    wall_s: float = 600.0
    combined_blocks: tuple[int, ...] = ()
    at_least_s: float = 0.0


class TraceSteps(_Message, frozen=True, tag=9):
    """Report every step with the times of its groups, or stop."""

    on: bool


class PauseLaunches(_Message, frozen=True, tag=10):
    """Launch nothing more, until the next `SwitchPlan`; report `Drained` when nothing is in flight.

    With `refuse` queued tasks and those still to come are refused (shutting down); without, they wait.
    """

    refuse: bool = True


class Stop(_Message, frozen=True, tag=11):
    """End the process now; tasks in flight are lost."""


class OpenWindow(_Message, frozen=True, tag=22):
    """Report `WindowMeasured` with what happens between these instants; one measures at a time, the newest.

    It ends early once a task has waited for `brake_age_s`.
    """

    number: int
    from_s: float
    to_s: float
    brake_age_s: float = math.inf


class StartRecording(_Message, frozen=True, tag=23):
    """Record everything for a while into the file sent along; answered by `RecordingEnded`."""

    number: int
    seconds: float


class CompareOutputs(_Message, frozen=True, tag=26):
    """Run the models of two loaded plans on inputs of tasks that come, and compare their outputs.

    On `inputs` of each model, within `limit_s`; answered by `OutputsCompared`. A newer order ends it early.
    """

    number: int
    control: int
    candidate: int
    models: tuple[str, ...]
    tolerance: float
    inputs: int
    limit_s: float


Command: TypeAlias = (
    LoadPlan
    | SwitchPlan
    | Unload
    | AddApplication
    | DropApplication
    | AddArena
    | DropArena
    | AddLayout
    | DropLayout
    | RunTask
    | CancelTask
    | Profile
    | ProfileStages
    | TraceSteps
    | PauseLaunches
    | Stop
    | OpenWindow
    | StartRecording
    | CompareOutputs
)

Handlers: TypeAlias = dict[type[Any], Callable[[Any, list[int]], None]]
"""Per command the function that carries it out in the engine process; it does not keep the descriptors."""

# Reports


class Ready(_Message, frozen=True, tag=1):
    """The process is up and listens."""

    pid: int


class PlanLoaded(_Message, frozen=True, tag=2):
    """The plan can be activated. Without `prepared` some programs are still missing and run as a fallback."""

    key: int
    prepared: bool
    stated_bytes: int  # what it added
    memory_bytes: int  # what all loaded plans may take together


class PlanFailed(_Message, frozen=True, tag=3):
    """The plan could not be loaded or activated; whatever ran before still runs."""

    key: int
    reason: str


class PlanActive(_Message, frozen=True, tag=4):
    """New launches go to this plan; `paused_s`: after nothing had been launched for so long (a drain)."""

    key: int
    paused_s: float = 0.0


class PlanReleased(_Message, frozen=True, tag=5):
    """The plan's last instance has left; it is freed."""

    key: int


class TaskDone(_Message, frozen=True, tag=6):
    """How and when a task ended."""

    task: TaskId
    outcome: Outcome
    code: str
    reason: str
    queued_s: float
    started_s: float | None  # when its first step began to run; None: it never did
    ended_s: float
    parts: tuple[tuple[str, Outcome], ...] = ()  # of a task for several models: how it ended in each
    plan: PlanKey | None = None  # whose step ended it; None: no step did
    told: bool = False  # the engine process tells the application itself
    shapes: tuple[tuple[int, ...], ...] = ()  # of the layout's outputs, where a model has open dimensions


class PassOn(_Message, frozen=True, tag=23):
    """An application that does not take the end of its task now: the packet is for it."""

    application: int
    packet: bytes


class QueueStats(_Message, frozen=True):
    """One model at one instant."""

    name: str
    queue_length: int
    oldest_age_s: float  # 0 when the queue is empty
    outcomes: dict[str, int]  # since the process started


class StepStats(msgspec.Struct, array_like=True):
    """Steps of one combined block under one mask since the last `Stats`."""

    key: int
    combined: int
    mask: int
    steps: int = 0
    tasks: int = 0
    busy_s: float = 0.0
    shortest_s: float = math.inf
    longest_s: float = 0.0


class Stats(_Message, frozen=True, tag=7):
    """What the engine did, every `stats_interval_s`."""

    at_s: float
    key: int | None  # the active plan
    busy_s: float  # seconds in which at least one step ran, since the process started
    models: tuple[QueueStats, ...]
    combined: tuple[StepStats, ...]
    sign: bool = False  # only of life, every `sign_interval_s`: it says nothing else


class OperatorTimes(_Message, frozen=True, tag=8):
    """Every operator's median and spread in microseconds and its runs; no runs: the time limit came first.

    A model of more than MAX_TIMES operators takes several reports: `first` is the operator that this one
    begins with, `operators` how many there are in all.
    """

    request: int
    artifact: str
    batch: int
    times: tuple[tuple[float, float, int], ...]
    reason: str = ""  # why there are no times, or not all, or none of the model as a whole
    first: int = 0
    operators: int = 0


class WholeTime(_Message, frozen=True, tag=24):
    """One run of the whole artifact that a `Profile` is about; None: it cannot run, for the `reason`."""

    request: int
    time_us: float | None
    runs: int
    reason: str = ""


class PartsTimed(_Message, frozen=True, tag=26):
    """Parts of operators of the artifact that a `Profile` is about: (operator, axis, extent, median and
    spread in microseconds, runs). Comes before the last `OperatorTimes`.

    `handover_us` and `copy_bytes_per_s`: see `stageloom.shared.messages.telemetry.PartProfileResult`.
    """

    request: int
    times: tuple[tuple[int, str, int, float, float, int], ...]
    handover_us: float | None = None
    copy_bytes_per_s: float | None = None
    reason: str = ""


class Profiling(_Message, frozen=True, tag=28):
    """From now on the process works on this `Profile` or `ProfileStages`; 0: on none, or it waits to go on.

    What ends the process meanwhile is the request, and no plan but one that is loaded or compared: as soon as
    the request can, it waits for that to end.
    """

    request: int


class StepTraced(_Message, frozen=True, tag=9):
    """One step's groups on their streams, at most MAX_GROUPS of them.

    `whole`: all members active, each at its largest batch, by a prepared program, and every group is here.
    """

    step: int
    lane: int
    key: int
    combined: int
    mask: int
    started_s: float
    ended_s: float
    groups: tuple[tuple[int, int, float, float], ...]  # launch-list item, stream, started_s, ended_s
    whole: bool = False


class Drained(_Message, frozen=True, tag=10):
    """Nothing is in flight."""


class Settled(_Message, frozen=True, tag=27):
    """Nothing is in flight but on this plan, which took the place of one that is kept."""

    key: int


class Exited(_Message, frozen=True, tag=11):
    """The process is gone; made by `EngineClient`, never sent. Negative: the signal that ended it."""

    returncode: int


class ArenaRefused(_Message, frozen=True, tag=12):
    """The arena cannot be used; tasks that name it are refused."""

    arena: int
    reason: str


class PlanTooLarge(_Message, frozen=True, tag=20):
    """The plan was not loaded: what it states does not fit beside what is loaded, or not at all."""

    key: int
    added_bytes: int  # it would take beyond what is loaded
    room_bytes: int  # there is beyond what is loaded
    alone_bytes: int  # it takes with nothing else loaded
    memory_bytes: int  # there is with nothing loaded


class ModelFigures(msgspec.Struct, array_like=True):
    """One model in a measured window."""

    name: str
    completed: int = 0  # tasks
    busy_s: float = 0.0  # its share of the steps that it ran in
    instances: int = 0  # that ended
    instance_s: float = 0.0  # what they took from begin to end, summed
    ended: int = 0  # tasks, in whatever way
    judged: int = 0  # tasks whose latency counts
    log_latency: float = 0.0  # their natural logarithms of seconds, summed


class WindowMeasured(_Message, frozen=True, tag=21):
    """What happened between the instants of a `OpenWindow`; see
    `stageloom.shared.engine.windows.WindowFigures`."""

    number: int
    key: int | None  # the plan that was active when it began
    measured_s: float
    busy_s: float
    saturated: bool
    failed: int
    p99_s: float
    oldest_age_s: float
    models: tuple[ModelFigures, ...]
    due: int = 0
    in_time: int = 0


class RecordingEnded(_Message, frozen=True, tag=22):
    """A recording is complete in its file; with a reason there is none."""

    number: int
    reason: str = ""


class OutputsCompared(_Message, frozen=True, tag=25):
    """What a `CompareOutputs` found; a reason says why nothing, or beside a verdict what was left out.
    `failed`: the candidate is to blame."""

    number: int
    verdict: OutputsVerdict | None
    reason: str = ""
    failed: bool = False


class StageTimes(_Message, frozen=True, tag=14):
    """Stages of one combined block, run alone: (stage, median, spread, runs, stages) in microseconds.

    `stages` more than 1: that many from this one on, which ran as one.

    `last` ends the answer; `reason` says why stages are missing. `refused`: the executor cannot run the plan,
    so that asking again is of no use. A want of memory or of a device is no refusal, nor is a step that
    failed. A block of more than MAX_TIMES stages takes several reports.
    """

    request: int
    plan: str  # digest; empty if the plan could not be read
    combined: int
    times: tuple[tuple[int, float, float, int, int], ...]
    step_us: float
    last: bool
    reason: str = ""
    refused: bool = False


Report: TypeAlias = (
    Ready
    | PlanLoaded
    | PlanFailed
    | PlanActive
    | PlanReleased
    | TaskDone
    | PassOn
    | Stats
    | OperatorTimes
    | WholeTime
    | PartsTimed
    | Profiling
    | StepTraced
    | Drained
    | Settled
    | Exited
    | ArenaRefused
    | QueueSnapshot
    | StageTimes
    | PlanTooLarge
    | WindowMeasured
    | RecordingEnded
    | OutputsCompared
)

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unreadable value stops the start."""

    stats_interval_s: float = 1.0  # how often a Stats report leaves
    sign_interval_s: float = 0.0  # how often a sign of life leaves; 0: never, the reports are enough
    sample_interval_s: float = 0.0  # how often a QueueSnapshot leaves; 0: never
    memory_bytes: int = 0  # what plans may take together; 0: what the machine has
    switch_interval_s: float = 0.0002  # Python's default of 5 ms would be added to a step by any busy thread
    log_level: str = "WARNING"


def encode_config(config: WorkerConfig) -> str:
    return msgspec.json.encode(config).decode()


def decode_config(text: str) -> WorkerConfig:
    """Read the command line's argument.

    Raises:
        SettingError: a field is unknown or has the wrong type or range.
    """
    try:
        config = msgspec.json.decode(text, type=WorkerConfig)
    except msgspec.MsgspecError as error:
        raise SettingError(f"the engine's settings cannot be read: {error}") from error
    least_s = min(config.stats_interval_s, config.switch_interval_s)
    if not least_s > 0 or min(config.sample_interval_s, config.sign_interval_s) < 0:
        raise SettingError("the engine's intervals are not above zero")
    return config
