"""`stageloom policy import`: a checkpoint file becomes a policy that the next re-plan asks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.policies import fitting_policy, kept_policies
from stageloom.shared.errors import ExitCode
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.space import Space
from tests.planner.world import World
from tests.policy.maddpg.cases import network
from tests.store.helpers import NANO

TRAINED_FOR = "twin nano"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "home")


def checkpoint(world: World) -> MaddpgCheckpoint:
    """A policy over the world's model, for another class; it tells its training's figures."""
    space = Space.of(world.plan("sequential"), TRAINED_FOR, samples=2)
    about = {
        "models": {"diamond": world.digest},
        "transitions": 70,
        "policy": {"throughput_per_s": 50.0},
        "rivals": {"alone, fast": {"throughput_per_s": 40.0}},
    }
    return MaddpgCheckpoint(space, network(space), provenance=about)


def written(folder: Path, found: MaddpgCheckpoint) -> str:
    file = folder / "maddpg.checkpoint"
    file.write_bytes(encode(found))
    return str(file)


def command(world: World, *more: str) -> list[str]:
    return ["policy", "import", "--data-dir", str(world.home), "--json", *more]


@pytest.mark.promise("policy-was-trained-elsewhere")
def test_with_a_device_it_is_adopted_for_that_devices_class(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = world.store.read(device_info, NANO).device_class
    assert world.store.read(fitting_policy, "maddpg", there, [world.digest]) == b""
    assert execute(command(world, written(tmp_path, checkpoint(world)), "--device", NANO)) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    body = world.store.read(fitting_policy, "maddpg", there, [world.digest])
    own = decode(body)
    assert own.space == replace(checkpoint(world).space, device_class=there)
    assert own.provenance["adopted"]["device_class"] == TRAINED_FOR == printed["trained_for"]
    with world.store.database.read() as session:
        (kept,) = kept_policies(session, "maddpg")
    assert (kept.digest, kept.device_class) == (printed["policy"], there)
    assert (kept.artifacts, kept.steps, kept.ratio) == ({world.digest: "diamond"}, 70, 0.8)


def test_without_one_it_stays_for_the_class_that_it_names(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = world.store.read(device_info, NANO).device_class
    assert execute(command(world, written(tmp_path, checkpoint(world)))) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["device_class"] == TRAINED_FOR
    body = world.store.read(fitting_policy, "maddpg", TRAINED_FOR, [world.digest])
    assert body == encode(checkpoint(world))
    assert world.store.read(fitting_policy, "maddpg", there, [world.digest]) == b""


def test_a_kept_policy_is_listed_with_its_models(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = ["policy", "list", "--data-dir", str(world.home)]
    assert execute([*listed, "--json"]) == ExitCode.OK and capsys.readouterr().out == "[]\n"
    assert execute(command(world, written(tmp_path, checkpoint(world)))) == ExitCode.OK
    digest = json.loads(capsys.readouterr().out)["policy"]
    assert execute([*listed, "--json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["digest"], found["policy"], found["device_class"]) == (digest, "maddpg", TRAINED_FOR)
    assert (found["artifacts"], found["steps"], found["ratio"]) == ({world.digest: "diamond"}, 70, 0.8)
    assert execute(listed) == ExitCode.OK
    row = capsys.readouterr().out.splitlines()[1].split("\t")
    assert row[:5] == [digest[:12], "maddpg", "diamond", "70", "0.800"] and row[6] == TRAINED_FOR


@pytest.mark.parametrize(
    ("content", "more", "code", "why"),
    [
        (None, [], ExitCode.USAGE, "cannot be read"),
        (b"no policy", [], None, "not a checkpoint of maddpg"),
        (b"", ["--device", "nobody"], ExitCode.USAGE, "nobody"),
    ],
)
def test_what_cannot_be_imported_says_why(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    more: list[str],
    code: ExitCode | None,
    why: str,
) -> None:
    file = tmp_path / "policy"
    if content is not None:
        file.write_bytes(content or encode(checkpoint(world)))
    found = execute(command(world, str(file), *more))
    assert found != ExitCode.OK and (code is None or found == code)
    assert why in capsys.readouterr().err
