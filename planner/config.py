"""The planner's settings: one typed object. Command line over environment over file over default.

A file is TOML with a table `[planner]`; the environment has `STAGELOOM_PLANNER_` and the name in capitals.
A setting that is unknown or cannot be read stops start-up.
"""

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import tomllib

from stageloom.planner.dispatch.quotas import DEFAULT_QUOTAS, Quota, Rate
from stageloom.shared.errors import SettingError

ENVIRONMENT_PREFIX: Final = "STAGELOOM_PLANNER_"
HOME_VARIABLE: Final = "STAGELOOM_HOME"
CONFIG_VARIABLE: Final = "STAGELOOM_PLANNER_CONFIG"
DEFAULT_PORT: Final = 7420
DEFAULT_API_PORT: Final = 7424
_HOST_CHARS: Final = 116  # of the 128 that an endpoint in a join token may have
_HOST_NAME: Final = re.compile(r"([A-Za-z0-9_-]+\.)*(?![0-9]+\.?\Z)[A-Za-z0-9_-]+\.?")
_RATE: Final = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?)/([0-9]+)")
_HOME: Final = "~home~"  # replaced when the object is made, since the environment decides


_QUOTA: Final = "quota_"


def _default(quota: Quota) -> str:
    """As it is written in a setting."""
    rate = DEFAULT_QUOTAS[quota]
    return f"{rate.per_s:g}/{rate.burst:.0f}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a person needs to know of one setting; `low` and `high` bound a number."""

    unit: str
    reason: str
    low: float = 0.0
    high: float = 1e9


SETTINGS: Final[Mapping[str, Setting]] = {
    "data_dir": Setting("path", "where the database, the artifacts, the keys and the API's socket lie"),
    "database_url": Setting("URL", "empty: SQLite in data_dir; postgresql+psycopg://... for a server"),
    "listen": Setting("HOST[:PORT]", "four consecutive ports from PORT on; 0 takes any free ones"),
    "advertise": Setting("host", "the host that join tokens name, no port; empty: the one listened on"),
    "api": Setting("HOST[:PORT]", "where the API listens for other machines, with TLS; empty: nowhere"),
    "api_certificate": Setting("path", "PEM file of the API's certificate; empty: the planner makes its own"),
    "api_key": Setting("path", "PEM file of its key; empty: it is in the certificate's file"),
    "api_rate": Setting("A_SECOND/AT_ONCE", "requests of one access token; more are refused"),
    "heartbeat_interval_s": Setting("seconds", "how often devices say that they live", 0.05, 60.0),
    "dead_after_s": Setting("seconds", "silence after which a device counts as offline", 0.2, 600.0),
    "bulk_credits": Setting("chunks", "artifact chunks that one device may have on their way", 1, 64),
    "backlog_rows": Setting("rows", "telemetry taken in and not committed, before devices wait", 1, 1e7),
    "device_queue_bytes": Setting(
        "bytes", "messages of one device that wait for the store, before it waits", 1, 1e9
    ),
    "max_devices": Setting(
        "devices",
        "what open files are asked of the system for, four each; 0: as many as it allows",
        0,
        100_000,
    ),
    "search": Setting("ray|local", "where searches run: Ray, or processes of this machine alone"),
    "search_workers": Setting("searches", "how many run at once; 0: one less than the cores", 0, 1024),
    "ray_address": Setting("host:port", "a Ray cluster to join; empty: a Ray of its own, on loopback"),
    "telemetry_rows_keep_s": Setting("seconds", "age at which rows become minutes; 0 keeps them", 0.0, 1e9),
    "telemetry_minutes_keep_s": Setting(
        "seconds", "age at which minutes become hours; 0 keeps them", 0.0, 1e9
    ),
    "telemetry_hours_keep_s": Setting("seconds", "age at which hours are deleted; 0 keeps them", 0.0, 1e9),
    "history_rows_keep": Setting(
        "rows", "generations, alarms, re-plans, trials and events kept of each device; 0 keeps all", 0, 1e9
    ),
    **{
        _QUOTA + quota.value: Setting("A_SECOND/AT_ONCE", f"{quota.value} of one device; more are dropped")
        for quota in Quota
    },
}


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """All settings; `SETTINGS` says what each is for."""

    data_dir: Path = Path(_HOME)
    database_url: str = ""
    listen: str = f"127.0.0.1:{DEFAULT_PORT}"
    advertise: str = ""
    api: str = ""
    api_certificate: str = ""
    api_key: str = ""
    api_rate: str = "50/200"
    heartbeat_interval_s: float = 1.0
    dead_after_s: float = 4.0
    bulk_credits: int = 4
    backlog_rows: int = 100_000
    device_queue_bytes: int = 1 << 20
    max_devices: int = 0
    search: str = "ray"
    search_workers: int = 0
    ray_address: str = ""
    telemetry_rows_keep_s: float = 2 * 86_400.0
    telemetry_minutes_keep_s: float = 14 * 86_400.0
    telemetry_hours_keep_s: float = 400 * 86_400.0
    history_rows_keep: int = 1_000
    quota_connections: str = _default(Quota.CONNECTIONS)
    quota_control: str = _default(Quota.CONTROL)
    quota_batches: str = _default(Quota.BATCHES)
    quota_chunks: str = _default(Quota.CHUNKS)
    quota_hellos: str = _default(Quota.HELLOS)
    quota_reports: str = _default(Quota.REPORTS)
    quota_alarms: str = _default(Quota.ALARMS)
    quota_local_plans: str = _default(Quota.LOCAL_PLANS)
    quota_generations: str = _default(Quota.GENERATIONS)
    quota_telemetry_bytes: str = _default(Quota.TELEMETRY_BYTES)
    quota_single_rows: str = _default(Quota.SINGLE_ROWS)
    quota_ledgers: str = _default(Quota.LEDGERS)

    def __post_init__(self) -> None:
        if str(self.data_dir) == _HOME:
            object.__setattr__(self, "data_dir", default_data_dir(os.environ))
        if self.dead_after_s < 2 * self.heartbeat_interval_s:
            raise SettingError(
                f"dead_after_s = {self.dead_after_s:g} is less than two heartbeats of "
                f"{self.heartbeat_interval_s:g} s, so devices would flap",
                remedy="raise dead_after_s",
            )
        ages_s = (self.telemetry_rows_keep_s, self.telemetry_minutes_keep_s, self.telemetry_hours_keep_s)
        kept_s = [age_s or math.inf for age_s in ages_s]
        if kept_s != sorted(kept_s):
            raise SettingError(
                "telemetry is kept for a shorter time where it is coarser",
                remedy="order telemetry_rows_keep_s <= telemetry_minutes_keep_s <= telemetry_hours_keep_s",
            )
        if self.search not in ("ray", "local"):
            raise SettingError(f"search = {self.search!r} is unknown", remedy="use ray or local")
        if self.advertise and not _is_host(self.advertise):
            raise SettingError(
                f"advertise = {self.advertise[:80]!r} is neither a host's name nor an IP address",
                remedy="use one as devices see it, such as planner.example, without a port: "
                "ports are those of listen",
            )
        self.listen_address  # noqa: B018  (parsed for its errors)
        self.api_address  # noqa: B018  (likewise)
        self.api_requests  # noqa: B018  (likewise)
        self.quotas  # noqa: B018  (likewise)

    @property
    def quotas(self) -> dict[Quota, Rate]:
        """What each device may do over time.

        Raises:
            SettingError: a `quota_` setting is no A_SECOND/AT_ONCE of two positive numbers.
        """
        return {quota: _rate(_QUOTA + quota.value, getattr(self, _QUOTA + quota.value)) for quota in Quota}

    @property
    def advertised(self) -> str:
        """`advertise` as addresses with a port hold it: one of IPv6 in brackets."""
        bare = ":" in self.advertise and self.advertise[0] != "["
        return f"[{self.advertise}]" if bare else self.advertise

    @property
    def listen_address(self) -> tuple[str, int]:
        """(host, first port).

        Raises:
            SettingError: `listen` is no HOST, HOST:PORT or [IPV6]:PORT.
        """
        return _address("listen", self.listen, DEFAULT_PORT)

    @property
    def api_address(self) -> tuple[str, int] | None:
        """(host, port) of the API for other machines; None where there is none.

        Raises:
            SettingError: `api` is no HOST, HOST:PORT or [IPV6]:PORT.
        """
        return _address("api", self.api, DEFAULT_API_PORT) if self.api else None

    @property
    def api_requests(self) -> Rate:
        """What one access token may ask over time.

        Raises:
            SettingError: `api_rate` is no A_SECOND/AT_ONCE of two positive numbers.
        """
        return _rate("api_rate", self.api_rate)


def _address(name: str, text: str, default_port: int) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or int(port) > 65_532 or (":" in host and host[0] != "["):
        raise SettingError(
            f"{name} = {text!r} is no address",
            remedy=f"use HOST or HOST:PORT, for example 0.0.0.0:{default_port}",
        )
    return host, int(port)


def _rate(name: str, text: str) -> Rate:
    """A quota from its setting, such as `0.2/20`: 0.2 a second, 20 at once."""
    match = _RATE.fullmatch(text)
    rate = Rate(float(match[1]), float(match[2])) if match else Rate(0.0, 0.0)
    if not (0.0 < rate.per_s <= 1e12 and 1.0 <= rate.burst <= 1e12):
        raise SettingError(
            f"{name} = {text[:80]!r} is no quota",
            remedy="use A_SECOND/AT_ONCE, the second at least 1, for example 0.2/20",
        )
    return rate


def _is_host(text: str) -> bool:
    """Whether this is a host's name or an IPv4 or IPv6 address, the last with or without brackets."""
    if len(text) > _HOST_CHARS:
        return False
    inner = text[1:-1] if text[0] == "[" and text[-1] == "]" else text
    try:
        address = ipaddress.ip_address(inner)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return "%" not in inner and (inner == text or address.version == 6)  # tokens carry no zone


def default_data_dir(environment: Mapping[str, str]) -> Path:
    """`$STAGELOOM_HOME`, else `var/planner`."""
    return Path(environment.get(HOME_VARIABLE) or "var/planner")


def data_dir_in_force(environment: Mapping[str, str]) -> Path:
    """Where a planner that is started in this environment keeps its data, unless its command line says.

    Raises:
        SettingError: it is set and empty, or the file that the environment names cannot be read.
    """
    variable = f"{ENVIRONMENT_PREFIX}DATA_DIR"
    if variable in environment:
        return Path(_checked("data_dir", environment[variable], variable))
    file = environment.get(CONFIG_VARIABLE)
    named = _read(Path(file)).get("data_dir") if file else None
    return default_data_dir(environment) if named is None else Path(_checked("data_dir", named, str(file)))


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PlannerConfig:
    """The settings in force. `overrides` come from the command line; None in it means not given.

    Raises:
        SettingError: the file cannot be read, or a setting is unknown, of the wrong type or out of bounds.
    """
    variables = os.environ if environment is None else environment
    if file is None and variables.get(CONFIG_VARIABLE):
        file = Path(variables[CONFIG_VARIABLE])
    values: dict[str, Any] = {"data_dir": default_data_dir(variables)}
    if file is not None:
        values |= {name: _checked(name, value, str(file)) for name, value in _read(file).items()}
    for variable, text in variables.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_VARIABLE:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = _checked(name, _parsed(name, text, variable), variable)
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name] = _checked(name, value, f"--{name.replace('_', '-')}")
    return PlannerConfig(**values)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            parsed = tomllib.load(opened)
    except OSError as error:
        raise SettingError(f"{file}: {error.strerror}", remedy="name a readable file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file}: {error}", remedy="correct the file") from error
    table = parsed.get("planner", {})
    if not isinstance(table, dict) or set(parsed) - {"planner"}:
        raise SettingError(f"{file} holds something other than the table [planner]", remedy="remove the rest")
    return table


def _kind(name: str, source: str) -> type:
    for field in fields(PlannerConfig):
        if field.name == name:
            assert isinstance(field.type, type)
            return field.type
    raise SettingError(
        f"{source}: there is no setting {name!r}", remedy=f"choose one of {', '.join(sorted(SETTINGS))}"
    )


def _parsed(name: str, text: str, source: str) -> Any:
    """A setting's value from text, by its type."""
    kind = _kind(name, source)
    if kind in (str, Path):
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError as error:
        raise _unreadable(name, text, source) from error


def _checked(name: str, value: Any, source: str) -> Any:
    kind = _kind(name, source)
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and type(value) in ((int,) if kind is int else (int, float)):
        setting = SETTINGS[name]
        if setting.low <= value <= setting.high:  # false for NaN too
            return kind(value)
        raise SettingError(
            f"{source}: {name} = {value} is outside {setting.low:g}..{setting.high:g} {setting.unit}",
            remedy=setting.reason,
        )
    raise _unreadable(name, value, source)


def _unreadable(name: str, value: Any, source: str) -> SettingError:
    setting = SETTINGS[name]
    return SettingError(
        f"{source}: {name} = {str(value)[:80]!r} cannot be read",
        remedy=f"{name} is {setting.reason} ({setting.unit})",
    )
