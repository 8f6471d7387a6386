"""Options that stand before or after any command: which planner it talks to, and how it answers.

--data-dir DIR      the planner of this data directory, over its local socket; where none runs, its store
--planner URL       a planner elsewhere, over TLS, with the token in --token-file
--json              one JSON document on stdout
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stageloom.shared.errors import InputError

PLANNER_VARIABLE: Final = "STAGELOOM_PLANNER"
TOKEN_FILE_VARIABLE: Final = "STAGELOOM_TOKEN_FILE"

GLOBAL_OPTIONS: Final = {
    "--json": "One JSON document on stdout.",
    "--data-dir": "DIR: the planner of this directory. Default: $STAGELOOM_HOME, else var/planner.",
    "--planner": f"URL: a planner elsewhere, such as https://planner:7424. Default: ${PLANNER_VARIABLE}.",
    "--token-file": f"FILE: the access token for --planner; - reads stdin. Default: ${TOKEN_FILE_VARIABLE}.",
}


def _epilog(names: Iterable[str]) -> str:
    lines = (f"  {name:<13} {GLOBAL_OPTIONS[name]}" for name in names)
    return "\n".join(("\b\nWith every command, before or after it:", *lines))


EPILOG: Final = _epilog(GLOBAL_OPTIONS)
EPILOG_WITHOUT_PLANNER: Final = _epilog(["--json"])
_OWN: Final = (("up",), ("install",), ("planner", "install"))
"""Commands with a --data-dir of their own, since they make it."""
_HERE: Final = (
    *(*_OWN, ("scheduler", "check")),
    *((*noun, verb) for noun in ((), ("planner",)) for verb in ("uninstall", "migrate")),
)
"""Commands about this machine, which no planner elsewhere carries out."""


@dataclass
class Settings:
    """What the options say of this one command line."""

    json: bool = False
    data_dir: str = ""
    planner: str = ""
    token_file: str = ""
    token: str = ""  # what that file holds, once it was read: stdin gives it no second time

    @property
    def folder(self) -> Path:
        """The data directory that was named, or the default one."""
        from stageloom.planner.config import data_dir_in_force

        return Path(self.data_dir) if self.data_dir else data_dir_in_force(os.environ)


settings = Settings()


def take_options(words: Sequence[str]) -> list[str]:
    """A command line without the options that stand anywhere; they are in `settings` from now on.

    Raises:
        InputError: one of them lacks its value, or they do not go together, or not with the command.
    """
    taken = Settings(
        planner=os.environ.get(PLANNER_VARIABLE, ""), token_file=os.environ.get(TOKEN_FILE_VARIABLE, "")
    )
    rest: list[str] = []
    named: set[str] = set()
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *remaining]
        elif word == "--json":
            taken.json = True
        elif name in GLOBAL_OPTIONS and name != "--json":
            given = value if equals else next(remaining, None)
            if not given:
                raise InputError(f"{name} lacks its value", remedy=f"it takes {GLOBAL_OPTIONS[name]}")
            setattr(taken, name[2:].replace("-", "_"), given)
            named.add(name)
        else:
            rest.append(word)
    if taken.data_dir and _is_one_of(rest, _OWN):
        rest += ["--data-dir", taken.data_dir]
    if "--planner" in named and _is_one_of(rest, _HERE):
        raise InputError(
            f"`stageloom {' '.join(rest[:2])}` is about this machine, and --planner names another",
            remedy="leave --planner out, or run it there",
        )
    if {"--data-dir", "--planner"} <= named:
        raise InputError("--data-dir and --planner name two planners", remedy="leave one of them out")
    if taken.data_dir:
        taken.planner = ""  # what is said here goes before the environment
    if "--token-file" in named and not taken.planner:  # else the command has its owner's rights here
        raise InputError(
            "--token-file is for a planner elsewhere, and none is named",
            remedy=f"name it with --planner or ${PLANNER_VARIABLE}, or leave --token-file out",
        )
    settings.__dict__.update(taken.__dict__)
    return rest


def _is_one_of(words: Sequence[str], commands: Iterable[Sequence[str]]) -> bool:
    return any(tuple(words[: len(command)]) == command for command in commands)
