"""Settings of the engine process, handed over as one JSON argument."""

import msgspec

from stageloom.shared.errors import SettingError


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unreadable value stops the start."""

    stats_interval_s: float = 1.0  # how often a Stats report leaves
    glance_interval_s: float = 0.0  # how often a Glance leaves; 0: never
    memory_bytes: int = 0  # what plans may take together; 0: what the machine has
    switch_interval_s: float = 0.0002  # Python's default of 5 ms would be added to a step by any busy thread
    log_level: str = "WARNING"


def encode_config(config: WorkerConfig) -> str:
    """For the command line."""
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
    if not config.stats_interval_s > 0 or not config.switch_interval_s > 0 or config.glance_interval_s < 0:
        raise SettingError("the engine's intervals are not above zero")
    return config
