"""Device files: those that come with the twin, and what is refused."""

from pathlib import Path

import pytest
import tomllib

from stageloom.planner.twin.device_file import (
    FIGURES,
    Kind,
    device_names,
    device_toml,
    load_device,
    parse_device,
)
from stageloom.shared.errors import InputError


@pytest.mark.promise("calibration-finds-synthetic-device")
@pytest.mark.parametrize("name", device_names())
def test_a_device_that_comes_with_the_twin_cites_every_figure(name: str) -> None:
    found = load_device(name)
    assert found.name == name
    assert found.kind is Kind.DERIVED
    assert {"fp32_flop_per_s", "bytes_per_s", "groups_interference", "lanes_interference"} <= set(
        found.sources
    )
    assert all(len(text) > 10 for text in found.sources.values())
    assert parse_device(device_toml(found), name) == found


def test_the_paper_devices_are_there_and_in_the_paper_order_of_strength() -> None:
    order = ["nano", "tx2", "xavier_nx", "orin_nx", "a100", "h100"]
    assert set(order) | {"i7_7700", "rtx_2060", "xavier_nx_cpu"} == set(device_names())
    for precision in ("fp32", "fp16"):
        speeds = [load_device(name).rates(precision).flop_per_s for name in order]
        assert speeds == sorted(speeds)
    assert load_device("a100").rates().threads == 108 * 2048


def test_half_precision_moves_half_the_bytes() -> None:
    found = load_device("tx2")
    assert found.rates("fp16").bytes_per_s == 2 * found.rates().bytes_per_s
    with pytest.raises(InputError, match="no figures for int8"):
        found.rates("int8")


def test_a_measured_file_comes_back_by_its_path(tmp_path: Path) -> None:
    text = device_toml(load_device("nano")).replace('"derived"', '"measured"')
    text = text.replace(
        "[sources]", 'noise = [[0, 0.9], [0.5, 1.0], [1, 1.3]]\n[sources]\nnoise = "steps of a run"'
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    found = load_device(str(path))
    assert found.kind is Kind.MEASURED
    assert found.noise == ((0.0, 0.9), (0.5, 1.0), (1.0, 1.3))
    assert parse_device(device_toml(found), "again") == found


def nano(**changes: object) -> str:
    """The Nano's file with some lines changed or, by None, left out, in the figures and their sources."""
    lines = device_toml(load_device("nano")).splitlines()
    kept = [line for line in lines if line.split(" =")[0] not in changes]
    at = kept.index("[sources]")
    values = [f"{name} = {value}" for name, value in changes.items() if value is not None]
    cited = [f'{name} = "somewhere"' for name in changes if changes[name] is not None and name in FIGURES]
    return "\n".join([*values, *kept[:at], "[sources]", *cited, *kept[at + 1 :]])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = [", "is no TOML"),
        (nano(launch_s=None), "launch_s is missing"),
        (nano(kind='"guessed"'), "neither 'derived' nor 'measured'"),
        (nano(title=None), "title is no text"),
        (nano(bytes_per_s="0"), "bytes_per_s is 0"),
        (nano(step_s="-1.0"), "no number of 0 or more"),
        (nano(step_s="nan"), "no number of 0 or more"),
        (nano(step_s="true"), "no number of 0 or more"),
        (nano(multiprocessors="1.5"), "no whole number"),
        (nano(noise="[[0, 1.2], [1, 0.9]]"), "not ascending"),
        (nano(noise="[1.0, 1.1]"), "noise is no list"),
        (nano(noise="[[0, 0.0], [1, 1.0]]"), "noise is no list"),
        (nano(noise="[[0, 1.0], [0.5, 1.0]]"), "does not reach"),
        (nano(surprise="1.0"), "unknown field 'surprise'"),
        (nano() + '\ncores = "nowhere"', "cores has no source, or only a source"),
        (nano().replace("[sources]", "cores = 2\n[sources]"), "cores has no source"),
        (nano().replace("[sources]", "sources = 3\n[other]"), "no table of texts"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_device(text, "the file")


def test_the_helper_above_leaves_a_good_file() -> None:
    assert tomllib.loads(nano())["name"] == "nano"
    assert parse_device(nano(step_s="0.5"), "x").step_s == 0.5


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no device file 'tx3'.*tx2"):
        load_device("tx3")
    with pytest.raises(InputError, match="cannot be read"):
        load_device("/nowhere/x.toml")
