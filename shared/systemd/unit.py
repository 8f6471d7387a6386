"""A unit file as text: a few settings replaced, everything else kept as a person wrote it. Pure."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from stageloom.shared.errors import SettingError

STATE_ROOT = PurePath("/var/lib")
"""Below it systemd makes a service's state directory itself."""

_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome and PrivateTmp take from the service's sight."""


def with_settings(text: str, settings: Mapping[str, Sequence[str]]) -> str:
    """`text` with each named setting given these values, one line each; none removes the setting.

    A setting keeps its place; one that the text lacks goes below the section's head `[Service]`.
    """
    lines: list[str] = []
    placed: set[str] = set()
    for line in text.splitlines():
        name, equals, _ = line.partition("=")
        if not equals or name not in settings:
            lines.append(line)
        elif name not in placed:
            placed.add(name)
            lines += [f"{name}={value}" for value in settings[name]]
    at = lines.index("[Service]") + 1
    lines[at:at] = [
        f"{name}={value}" for name, values in settings.items() if name not in placed for value in values
    ]
    return "\n".join(lines) + "\n"


def state_settings(home: PurePath) -> dict[str, Sequence[str]]:
    """How the unit names its state directory: systemd's own below /var/lib, else one that may be written."""
    if STATE_ROOT in home.parents:
        return {"StateDirectory": (quoted(str(home.relative_to(STATE_ROOT))),)}
    return {"StateDirectory": (), "StateDirectoryMode": (), "ReadWritePaths": (quoted(str(home)),)}


def command_line(words: Sequence[str]) -> str:
    """A command as `ExecStart=` wants it. In the program systemd replaces no variables, so `$` is itself."""
    program, *arguments = words
    return " ".join(map(quoted, [program, *(word.replace("$", "$$") for word in arguments)]))


def words_of(command: str) -> list[str]:
    """The words of which `command_line` made a command."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', command)
    words = [(re.sub(r"\\(.)", r"\1", inside) + plain).replace("%%", "%") for inside, plain in found]
    return words[:1] + [word.replace("$$", "$") for word in words[1:]]


def quoted(word: str) -> str:
    """One word of a unit file: `%` and, where it must be quoted, quotes and backslashes are escaped.

    Raises:
        SettingError: it holds a line break or another control character.
    """
    if not word.isprintable():
        raise SettingError(f"{word!r} cannot stand in a unit file", remedy="leave out control characters")
    word = word.replace("%", "%%")
    if word and not set(word) & set(" \"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def hidden_from_service(paths: Sequence[PurePath]) -> PurePath | None:
    """The first of `paths` that a service with the shipped hardening could not read."""
    for path in paths:
        if any(PurePath(hidden) in (path, *path.parents) for hidden in _HIDDEN):
            return path
    return None
