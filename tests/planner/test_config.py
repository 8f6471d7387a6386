"""Settings: one list of keys, precedence, refusals."""

from dataclasses import fields
from pathlib import Path

import pytest

from stageloom.planner.config import CONFIG_VARIABLE, SETTINGS, PlannerConfig, data_dir_in_force, load_config
from stageloom.shared.errors import SettingError


def test_defaults_and_schema_list_the_same_keys() -> None:
    assert [field.name for field in fields(PlannerConfig)] == list(SETTINGS)


def test_every_setting_has_a_unit_and_a_reason_and_its_default_is_within_bounds() -> None:
    config = PlannerConfig()
    for name, setting in SETTINGS.items():
        assert setting.unit and len(setting.reason) > 10
        value = getattr(config, name)
        if isinstance(value, int | float):
            assert setting.low <= value <= setting.high


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "stageloom.toml"
    file.write_text("[planner]\nbulk_credits = 5\nmax_devices = 6\ndead_after_s = 7\n")
    environment = {
        "STAGELOOM_PLANNER_MAX_DEVICES": "8",
        "STAGELOOM_PLANNER_DEAD_AFTER_S": "9.5",
        "STAGELOOM_HOME": "/srv/loom",
        CONFIG_VARIABLE: str(file),
        "STAGELOOM_AGENT_LISTEN": "not the planner's",
    }
    config = load_config(environment=environment, overrides={"dead_after_s": 11.0, "listen": None})
    assert (config.bulk_credits, config.max_devices, config.dead_after_s) == (5, 8, 11.0)
    assert (config.data_dir, config.listen) == (Path("/srv/loom"), "127.0.0.1:7420")
    assert load_config(environment={}).data_dir == Path("var/planner")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAX_DEVICES", "-1"),
        ("MAX_DEVICES", "1e3"),
        ("MAX_DEVICES", ""),
        ("DEAD_AFTER_S", "nan"),
        ("HEARTBEAT_INTERVAL_S", "-1"),
        ("COLOUR", "red"),
        ("HEARTBEAT_INTERVAL_S", "3"),  # longer than half of dead_after_s
        ("LISTEN", ":7420"),
        ("LISTEN", "::1:7420"),
        ("LISTEN", "host:65533"),
    ],
)
def test_a_setting_that_cannot_be_stops_start_up(name: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        load_config(environment={f"STAGELOOM_PLANNER_{name}": text})
    assert "; " in str(caught.value) and "\n" not in str(caught.value)


def test_coarser_telemetry_stays_at_least_as_long() -> None:
    PlannerConfig(telemetry_rows_keep_s=5.0, telemetry_minutes_keep_s=5.0, telemetry_hours_keep_s=0.0)
    with pytest.raises(SettingError, match="shorter time where it is coarser"):
        PlannerConfig(telemetry_rows_keep_s=0.0)
    with pytest.raises(SettingError, match="shorter time where it is coarser"):
        PlannerConfig(telemetry_hours_keep_s=3600.0)


@pytest.mark.parametrize("contents", ["listen = 'x'\n", "[planner]\n[agent]\n", "planner = 3\n"])
def test_a_file_with_anything_but_the_planners_table_is_refused(contents: str, tmp_path: Path) -> None:
    file = tmp_path / "stageloom.toml"
    file.write_text(contents)
    with pytest.raises(SettingError, match=r"other than the table \[planner\]"):
        load_config(file=file, environment={})


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("0.0.0.0", ("0.0.0.0", 7420)),
        ("[::1]:0", ("[::1]", 0)),
        ("[::1]", ("[::1]", 7420)),
        ("edge.example:9", ("edge.example", 9)),
    ],
)
def test_listen_is_a_host_with_or_without_a_port(listen: str, address: tuple[str, int]) -> None:
    assert PlannerConfig(listen=listen).listen_address == address


@pytest.mark.parametrize(
    "host",
    ["planner.example", "planner", "planner.example.", "edge_1", "10.0.0.7", "::1", "[::1]", "7up.example"],
)
def test_a_host_name_or_an_address_can_be_advertised(host: str) -> None:
    assert PlannerConfig(advertise=host).advertise == host


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("fd00::5", "[fd00::5]"),
        ("[fd00::5]", "[fd00::5]"),
        ("10.0.0.7", "10.0.0.7"),
        ("planner.example", "planner.example"),
        ("", ""),
    ],
)
def test_what_is_advertised_can_have_a_port_behind_it(advertise: str, told: str) -> None:
    """Clients refuse `https://fd00::5:7424`."""
    assert PlannerConfig(advertise=advertise).advertised == told


@pytest.mark.parametrize(
    "host",
    [
        "planner.example:9999",
        "10.0.0.7:9999",
        "[::1]:9999",
        "[10.0.0.7]",
        "[planner.example]",
        "10.0.0",
        "999.0.0.1",
        "bad host \u00e9",
        "planner\u00e9.example",
        "tcp://planner.example",
        "fe80::1%eth0",
        "planner..example",
        "planner.example\n",
        "*",
        " ",
        "[",
        "a" * 117,
    ],
)
def test_what_no_device_could_connect_to_cannot_be_advertised(host: str) -> None:
    with pytest.raises(SettingError, match="neither a host's name nor an IP address; use one") as caught:
        PlannerConfig(advertise=host)
    assert "\n" not in str(caught.value)


def test_commands_look_for_the_data_where_a_planner_of_the_same_environment_keeps_them(
    tmp_path: Path,
) -> None:
    file = tmp_path / "stageloom.toml"
    file.write_text('[planner]\ndata_dir = "/srv/from-file"\n')
    environment = {
        "STAGELOOM_PLANNER_DATA_DIR": "/srv/named",
        CONFIG_VARIABLE: str(file),
        "STAGELOOM_HOME": "/home",
    }
    for gone in ("STAGELOOM_PLANNER_DATA_DIR", CONFIG_VARIABLE, "STAGELOOM_HOME"):
        assert data_dir_in_force(environment) == load_config(environment=environment).data_dir
        del environment[gone]
    assert data_dir_in_force(environment) == Path("var/planner")
    with pytest.raises(SettingError, match="data_dir = '' cannot be read"):
        data_dir_in_force({"STAGELOOM_PLANNER_DATA_DIR": ""})
