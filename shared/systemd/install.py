"""Making this machine run one of our services under systemd, and undoing it.

The unit is the one that the package ships; what differs from machine to machine (interpreter, state
directory, account, groups) is put in its place. Installing twice changes nothing the second time.
"""

import contextlib
import grp
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from shutil import which

from stageloom.shared.errors import SettingError, StorageError, UnavailableError
from stageloom.shared.systemd.unit import command_line, hidden_from_service, state_settings, with_settings

UNIT_DIRECTORY = Path("/etc/systemd/system")
PACKAGED_UNIT_DIRECTORY = Path("/usr/lib/systemd/system")  # one of the same name above hides its unit
_RUNNING = Path("/run/systemd/system")  # exists where systemd is process 1 (sd_booted(3))

_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")

Say = Callable[[str], None]
Run = Callable[[Sequence[str]], None]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service as the command line wants it: `program` with `arguments`."""

    name: str  # of the unit, without its suffix
    package: str  # that ships it
    program: str  # a console script of this distribution
    arguments: tuple[str, ...]
    home: Path
    user: str
    groups: tuple[str, ...] = ()  # supplementary ones, of which those are taken that exist
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The unit's file."""
        return f"{self.name}.service"


def installed_program(name: str) -> str:
    """The absolute path of one of our console scripts, beside this interpreter.

    Raises:
        SettingError: there is none, so that no service could run it.
    """
    path = Path(sys.executable).with_name(name)
    if not os.access(path, os.X_OK):
        raise SettingError(
            f"{path} is missing", remedy=f"install Stageloom with pip for {sys.executable}, then try again"
        )
    return str(path)


def run_command(words: Sequence[str]) -> None:
    """Run one of the system's tools.

    Raises:
        UnavailableError: it is missing or fails; the error carries what it said.
    """
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise UnavailableError(
            f"{words[0]} is missing", remedy="install it, or run the step by hand"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"`{' '.join(words)}` failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"`{' '.join(words)}` does not end") from error


def unit_text(service: Service) -> str:
    """The unit for this machine.

    Raises:
        SettingError: the home is no absolute path, home or user cannot stand in a unit file, or the
            program is missing.
    """
    home = service.home
    if not _USER_NAME.fullmatch(service.user):
        raise SettingError(
            f"{service.user!r} cannot be an account's name", remedy="use letters, digits, - and _"
        )
    if not home.is_absolute():
        raise SettingError(f"the state directory {home} is no absolute path", remedy="name it from / on")
    shipped = files(service.package).joinpath(service.file_name).read_text(encoding="utf-8")
    groups = " ".join(name for name in service.groups if _known(grp.getgrnam, name))
    settings: dict[str, Sequence[str]] = {
        "ExecStart": (command_line([installed_program(service.program), *service.arguments]),),
        "User": (service.user,),
        "Group": (_group_of(service.user),),
        **({"SupplementaryGroups": (groups,) if groups else ()} if service.groups else {}),
        **state_settings(home),
        **service.settings,
    }
    return with_settings(shipped, settings)


def install(
    service: Service,
    say: Say,
    *,
    unit_directory: Path = UNIT_DIRECTORY,
    run: Run = run_command,
    code: Sequence[Path] | None = None,
) -> None:
    """Make the account and the state directory if missing, write the unit, tell systemd.

    `code`: where interpreter and packages lie; by default where this process has them from.

    Raises:
        SettingError: code or state lie where the service could not reach them, or the state is another's.
        StorageError: not root, or the unit cannot be written.
        UnavailableError: one of the system's tools fails.
    """
    text = unit_text(service)
    if hidden := hidden_from_service(_own_code(service) if code is None else code):
        raise SettingError(
            f"{hidden} is out of the service's sight (ProtectHome, PrivateTmp)",
            remedy="use `/usr/bin/python3 -m venv /opt/stageloom`, put Stageloom there and run its `install`",
        )
    if hidden := hidden_from_service([service.home]):
        raise SettingError(
            f"{hidden} is out of the service's sight (ProtectHome, PrivateTmp)",
            remedy="choose a state directory such as one below /var/lib",
        )
    _need_root("installing a service", ", or use --dry-run")
    if not _known(pwd.getpwnam, service.user):
        shell = "/usr/sbin/nologin"
        run(["useradd", "--system", "--user-group", "--home-dir", str(service.home),
             "--no-create-home", "--shell", shell, service.user])  # fmt: skip
        say(f"made the account {service.user}")
    _make_home(service)
    path = unit_directory / service.file_name
    if _written(path, text):
        say(f"wrote {path}")
        _reload(run, say)
    else:
        say(f"{path} is as it should be")


def uninstall(
    service_name: str, say: Say, *, unit_directory: Path = UNIT_DIRECTORY, run: Run = run_command
) -> bool:
    """Stop the service and remove its unit; state and account stay. False if there was none.

    Raises:
        StorageError: not root, or the unit cannot be removed.
        UnavailableError: one of the system's tools fails.
    """
    path = unit_directory / f"{service_name}.service"
    if not path.exists():
        say(f"there is no {path}")
        return False
    _need_root("removing a service")
    if _RUNNING.exists():
        run(["systemctl", "disable", "--now", path.name])
    elif which("systemctl"):
        run(["systemctl", "disable", path.name])  # for the next boot
    path.unlink()
    say(f"removed {path}")
    _reload(run, say)
    return True


def _need_root(what: str, instead: str = "") -> None:
    if os.geteuid() != 0:
        raise StorageError(f"{what} needs root", remedy=f"run `sudo {shlex.join(sys.orig_argv)}`{instead}")


def _known(look_up: Callable[[str], object], name: str) -> bool:
    with contextlib.suppress(KeyError):
        look_up(name)
        return True
    return False


def _group_of(user: str) -> str:
    """The account's own group; `useradd --user-group` makes one of the same name."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    return user


def _own_code(service: Service) -> list[Path]:
    return [Path(sys.prefix), Path(sys.base_prefix), Path(str(files(service.package))).resolve()]


def _make_home(service: Service) -> None:
    """Before the first start, since `join` already writes a key there."""
    home, account = service.home, pwd.getpwnam(service.user)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_uid == account.pw_uid:
            return
        if any(home.iterdir()):
            raise SettingError(
                f"{home} is not {service.user}'s and not empty", remedy=f"chown -R {service.user}: {home}"
            )
        os.chown(home, account.pw_uid, account.pw_gid)
    except OSError as error:
        raise StorageError(f"{home} cannot be made: {error.strerror}", remedy="choose another") from error


def _written(path: Path, text: str) -> bool:
    """Whether the file had to be written; a reader sees the old one or the new one."""
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return False
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}", remedy="mend it") from error
    return True


def _reload(run: Run, say: Say) -> None:
    if _RUNNING.exists():
        run(["systemctl", "daemon-reload"])
    else:
        say("systemd does not run here: the unit takes effect once it does")
