"""Settings of the agent. Command line over environment over file over default, as the planner has it.

The file is `agent.toml` in its home, with a table `[agent]`; the environment has `STAGELOOM_AGENT_` and the
name in capitals. `agent.json`, which version 0.1.0 had, is read where `agent.toml` is missing or empty.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from stageloom.edge_agent.ingest.channel import HOME_VARIABLE, SOCKET_VARIABLE, default_home
from stageloom.edge_agent.metrics.settings import MetricsSettings
from stageloom.edge_agent.serving.settings import ServingSettings
from stageloom.shared.engine.interval_guard import GuardConfig, Seconds
from stageloom.shared.engine.trial import TrialConfig
from stageloom.shared.errors import SettingError
from stageloom.shared.messages.base import ModelVersion
from stageloom.shared.policy.queues import QueueMeasure

SETTINGS_NAME = "agent.toml"
OLD_SETTINGS_NAME = "agent.json"
TABLE = "agent"
ENVIRONMENT_PREFIX = "STAGELOOM_AGENT_"
_NO_SETTINGS = (HOME_VARIABLE, SOCKET_VARIABLE)
"""Where the agent is, which applications read, too."""

_MAX_SETTINGS_BYTES = 1 << 20

Limit = Annotated[int, Meta(ge=1, le=1 << 20)]
Precision = Literal["fp32", "bf16", "tf32", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Variance = Annotated[float, Meta(gt=0.0, le=1e15)]


class ModelFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ONNX file to serve without a planner; `name` is what applications call it, `version` what clients of
    the Open Inference Protocol see."""

    path: str
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
    version: ModelVersion = 1
    shapes: dict[str, tuple[int, ...]] = {}  # of inputs whose dimensions the file leaves open
    smallest: dict[str, tuple[int, ...]] = {}  # of those that stay open, up to `shapes`


AUTO: Final = "auto"
"""As executor: the device finds out which one runs each model fastest, and plans for that."""


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent. Times in seconds, sizes in bytes."""

    home: str = ""  # state directory; empty: $STAGELOOM_AGENT_HOME, else var/agent
    models: tuple[ModelFile, ...] = ()  # served alone; empty: what the planner desires, or last-known-good
    executor: str = AUTO  # for plans made here; auto: measured per model, the settings below are unused
    precision: Precision = "fp32"  # for plans made here; auto: fp32, or this where it is there
    scheduler: str = "greedy"  # for plans made here
    intra_op_threads: Annotated[int, Meta(ge=1, le=256)] = 1  # for plans made here
    replicas: Annotated[int, Meta(ge=1, le=64)] = 2  # for plans made here: two callers hide each other's gaps
    probation_s: Seconds = 5.0  # how long a new plan is watched before it is committed
    trial: TrialConfig = TrialConfig()
    guard: GuardConfig = GuardConfig()  # of plans that are proven, or change launch intervals only
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0  # for plans; 0: what the machine has
    load_limit_s: Seconds = 120.0  # a plan that loads for longer hangs: it is rejected, the engine restarted
    stats_interval_s: Seconds = 1.0  # how often telemetry is taken
    machine_interval_s: Seconds = 5.0  # how often load, clocks and power mode are looked at
    trace_interval_s: Seconds = 2.0  # how often a short window of steps is traced as telemetry
    trace_window_s: Seconds = 0.1  # how long such a window is
    alarms: bool = True  # watch the queues: tell the planner when they diverge, re-plan where it allows that
    alarm_interval_s: Annotated[float, Meta(ge=0.01, le=10.0)] = 0.1  # how often the queues are looked at
    alarm_measure: QueueMeasure = QueueMeasure.WORK  # queues count in seconds of work, or in tasks as in TOP
    alarm_threshold: Variance | None = None  # none: by deadlines
    alarm_regime: Annotated[float, Meta(ge=1.1, le=1000.0)] = 2.0  # by what factor arrivals must move
    alarm_cooldown_s: Seconds = 10.0  # between two alarms, at least, and after a change of plan
    local_wait_s: Seconds = 5.0  # for a connected planner's answer to an alarm, before a local plan is tried
    policy: str = ""  # a checkpoint of `policy train maddpg` to re-plan with alone; empty: the planner's
    profile_wall_s: Seconds = 600.0  # for a measurement in pauses, before a busy device gives it up
    silent_engine_s: Seconds = 30.0  # an engine process that reports nothing for so long is killed
    drain_s: Seconds = 5.0  # how long tasks may finish when the agent is told to stop
    niceness: Annotated[int, Meta(ge=0, le=19)] = 0  # of the session that it leads; see shared/session_nice
    max_tasks: Limit = 1024  # open tasks per application
    max_arena_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 44)] = 1 << 30  # shared memory per application
    spool_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 64 << 20  # telemetry kept for the planner
    spool_age_s: Annotated[float, Meta(ge=60.0, le=1e9)] = 7 * 86_400.0  # older telemetry is dropped
    serving: ServingSettings = ServingSettings()  # over HTTP and gRPC, by the Open Inference Protocol
    metrics: MetricsSettings = MetricsSettings()  # for Prometheus
    log_level: Annotated[str, Meta(pattern=r"^(DEBUG|INFO|WARNING|ERROR)\Z")] = "INFO"

    @property
    def home_path(self) -> Path:
        return Path(self.home) if self.home else default_home()


def load_config(
    home: Path | None = None, *, environment: Mapping[str, str] | None = None, **given: Any
) -> AgentConfig:
    """The settings in force: `given` ones (not None) over the environment's over the file's.

    Raises:
        SettingError: the file cannot be read, or a value is unknown, of the wrong type or out of range.
    """
    directory = home or default_home()
    values, _ = set_values(directory, os.environ if environment is None else environment)
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            values[name] = values[name] | value  # of a table: the rest of it stays
        elif value is not None:
            values[name] = value
    values["home"] = str(directory)
    return _converted(values, str(settings_file(directory)))


def settings_file(home: Path) -> Path:
    """The file that holds the settings of this state directory: of agent.toml and agent.json, which version
    0.1.0 had, the one that is there.

    An empty agent.toml gives way: for `config show --toml > agent.toml` a shell makes it before the other
    was read.
    """
    old = home / OLD_SETTINGS_NAME
    new = home / SETTINGS_NAME
    # Unlike `Path.exists` this is no error in a directory that is not ours; reading the file will be one.
    has_new = os.path.exists(new) and os.path.getsize(new) > 0
    return old if os.path.exists(old) and not has_new else new


def set_values(home: Path, environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What somebody set: values by name, and where each is from.

    Raises:
        SettingError: the file or a variable cannot be read.
    """
    file = settings_file(home)
    values = _read(file)
    sources = dict.fromkeys(values, str(file))
    for variable, text in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NO_SETTINGS:
            continue
        if name not in AgentConfig.__struct_fields__:
            raise SettingError(
                f"{variable}: there is no setting {name!r}", remedy="see `stageloom-agent config show`"
            )
        values[name], sources[name] = _parsed(text), variable
    return values, sources


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            body = opened.read(_MAX_SETTINGS_BYTES)
        values = msgspec.json.decode(body) if file.name == OLD_SETTINGS_NAME else msgspec.toml.decode(body)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = "run as its owner" if isinstance(error, PermissionError) else "mend or remove it"
        raise SettingError(f"{file} cannot be read: {error}", remedy=remedy) from error
    if file.name == OLD_SETTINGS_NAME:
        if not isinstance(values, dict):
            raise SettingError(f"{file} is not a JSON object", remedy="mend or remove it")
        return values
    table = values.get(TABLE, {})
    if set(values) - {TABLE} or not isinstance(table, dict):
        raise SettingError(f"{file} holds something other than the table [{TABLE}]", remedy="remove the rest")
    return table


def _parsed(text: str) -> Any:
    """A variable's value as TOML writes it, such as 2.5, true or [1, 2]; anything else is text."""
    try:
        return msgspec.toml.decode(f"value = {text}")["value"]
    except msgspec.DecodeError:
        return text


def encode_config(config: AgentConfig) -> str:
    """For the command line of the process that runs.

    Raises:
        SettingError: a path among the settings is not UTF-8.
    """
    try:
        return msgspec.json.encode(config).decode()
    except UnicodeEncodeError as error:
        raise SettingError(f"{error.object!r} is not UTF-8", remedy="rename what it names") from error


def decode_config(text: str) -> AgentConfig:
    """What `encode_config` made.

    Raises:
        SettingError: it is something else.
    """
    try:
        return msgspec.json.decode(text, type=AgentConfig)
    except msgspec.MsgspecError as error:
        raise SettingError(f"the agent's settings cannot be read: {error}") from error


def _converted(values: dict[str, Any], where: str) -> AgentConfig:
    try:
        return msgspec.convert(values, AgentConfig)
    except msgspec.ValidationError as error:
        raise SettingError(
            f"a setting of {where} or of the command line is wrong: {error}", remedy="correct or remove it"
        ) from error
