"""The text of a unit: what is replaced, and that nothing of what is put in can mean something else."""

from pathlib import PurePath

import pytest

from stageloom.shared.errors import SettingError
from stageloom.shared.systemd.unit import (
    command_line,
    hidden_from_service,
    quoted,
    state_settings,
    with_settings,
    words_of,
)

UNIT = (
    "# note\n[Unit]\nDescription=x\n\n[Service]\n# why\nUser=a\nDeviceAllow=one\nDeviceAllow=two\n[Install]\n"
)


def test_a_setting_is_replaced_in_its_place_and_the_rest_stays() -> None:
    assert with_settings(UNIT, {"User": ("b",)}) == UNIT.replace("User=a", "User=b")


def test_a_setting_of_several_lines_is_replaced_as_a_whole() -> None:
    changed = with_settings(UNIT, {"DeviceAllow": ("three",)})
    assert changed == UNIT.replace("DeviceAllow=one\nDeviceAllow=two", "DeviceAllow=three")


def test_a_setting_without_values_is_removed_and_a_new_one_goes_into_the_service_section() -> None:
    changed = with_settings(UNIT, {"User": (), "ReadWritePaths": ("/data",)})
    assert changed == UNIT.replace("User=a\n", "").replace("[Service]\n", "[Service]\nReadWritePaths=/data\n")


def test_replacing_again_changes_nothing() -> None:
    settings = {"User": ("b",), "ReadWritePaths": ("/data",), "DeviceAllow": ("x", "y")}
    once = with_settings(UNIT, settings)
    assert with_settings(once, settings) == once


def test_commands_keep_their_words_whatever_they_hold() -> None:
    words = ["/opt/$a b/python", "run", "--home", '/var/100%/"q"\\', "$HOME", ""]
    assert command_line(words) == r'"/opt/$a b/python" run --home "/var/100%%/\"q\"\\" $$HOME ""'
    assert words_of(command_line(words)) == words


def test_a_line_break_cannot_smuggle_in_a_setting() -> None:
    with pytest.raises(SettingError, match="control characters"):
        quoted("/var/lib/x\nUser=root")


def test_systemd_makes_a_home_below_var_lib_and_may_write_another() -> None:
    assert state_settings(PurePath("/var/lib/stageloom/edge")) == {"StateDirectory": ("stageloom/edge",)}
    assert state_settings(PurePath("/data/edge")) == {
        "StateDirectory": (),
        "StateDirectoryMode": (),
        "ReadWritePaths": ("/data/edge",),
    }


@pytest.mark.parametrize("path", ["/home/me/venv", "/root", "/tmp/x", "/var/tmp/x", "/run/user/1000"])
def test_what_the_hardening_hides_is_known(path: str) -> None:
    assert hidden_from_service([PurePath("/opt/x"), PurePath(path)]) == PurePath(path)


def test_other_places_are_in_sight() -> None:
    assert hidden_from_service([PurePath(p) for p in ("/opt/x", "/homes", "/usr", "/var/lib/x")]) is None
