"""Learned policies over the API: a file becomes a policy that the next re-plan asks, and a file again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli.app import execute
from stageloom.planner.schema.policy import PolicyExportRequest, PolicyInfo, PolicyListRequest
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.policies import fitting_policy, policy_infos
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import ExitCode, NotFoundError
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.space import Space
from tests.planner.api.conftest import Callers
from tests.planner.processes import ok
from tests.planner.world import World
from tests.policy.maddpg.cases import network
from tests.store.helpers import NANO

TRAINED_FOR = "twin nano"


def checkpoint(world: World, transitions: object = 70) -> MaddpgCheckpoint:
    """A policy over the world's model, for another class; it tells its training's figures."""
    space = Space.of(world.plan("sequential"), TRAINED_FOR, samples=2)
    about = {
        "models": {"diamond": world.digest},
        "transitions": transitions,
        "policy": {"throughput_per_s": 50.0},
        "rivals": {"alone, fast": {"throughput_per_s": 40.0}},
    }
    return MaddpgCheckpoint(space, network(space), provenance=about)


def written(folder: Path, found: MaddpgCheckpoint) -> str:
    file = folder / "maddpg.checkpoint"
    file.write_bytes(encode(found))
    return str(file)


def kept(world: World, digest: str) -> PolicyInfo:
    """A policy of the store, as a list has it."""
    (info,) = (info for info in world.store.read(policy_infos) if info.digest == digest)
    return info


@pytest.mark.promise("policy-was-trained-elsewhere")
def test_with_a_device_it_is_adopted_for_that_devices_class(world: World, tmp_path: Path) -> None:
    there = world.store.read(device_info, NANO).device_class
    assert world.store.read(fitting_policy, "maddpg", there, [world.digest]) == b""
    file = written(tmp_path, checkpoint(world))
    printed = json.loads(ok(world.home, "policy", "import", file, "--device", NANO, "--json"))
    own = decode(world.store.read(fitting_policy, "maddpg", there, [world.digest]))
    assert own.space == replace(checkpoint(world).space, device_class=there)
    assert own.provenance["adopted"]["device_class"] == TRAINED_FOR == printed["trained_for"]
    info = kept(world, printed["policy"])
    assert (info.device_class, info.artifacts) == (there, {world.digest: "diamond"})
    assert (info.steps, info.ratio) == (70, 0.8)


def test_without_one_it_stays_for_the_class_that_it_names(world: World, tmp_path: Path) -> None:
    found = checkpoint(world, transitions=71)
    printed = json.loads(ok(world.home, "policy", "import", written(tmp_path, found), "--json"))
    assert printed == {
        "policy": digest_bytes([encode(found)]),
        "device_class": TRAINED_FOR,
        "trained_for": TRAINED_FOR,
        "models": [world.digest],
    }
    assert world.store.read(fitting_policy, "maddpg", TRAINED_FOR, [world.digest]) == encode(found)


def test_kept_policies_are_listed_in_pages_with_and_without_a_planner(
    callers: Callers, world: World, tmp_path: Path
) -> None:
    for transitions in (72, 73):
        ok(world.home, "policy", "import", written(tmp_path, checkpoint(world, transitions)))
    digests = [digest_bytes([encode(checkpoint(world, transitions))]) for transitions in (73, 72)]
    first = callers.call(routes.POLICY_LIST, PolicyListRequest(limit=1))
    second = callers.call(routes.POLICY_LIST, PolicyListRequest(limit=1, after=first.next))
    assert [first.items[0].digest, second.items[0].digest] == digests
    found = {info["digest"]: info for info in json.loads(ok(world.home, "policy", "list", "--json"))}
    info = found[digests[0]]
    assert (info["policy"], info["device_class"]) == ("maddpg", TRAINED_FOR)
    assert (info["artifacts"], info["steps"], info["ratio"]) == ({world.digest: "diamond"}, 73, 0.8)
    row = ok(world.home, "policy", "list").splitlines()[1].split("\t")
    assert row[:5] == [digests[0][:12], "maddpg", "diamond", "73", "0.800"] and row[6] == TRAINED_FOR


def test_a_policy_leaves_as_the_file_that_it_came_from(
    callers: Callers, world: World, tmp_path: Path
) -> None:
    file = Path(written(tmp_path, checkpoint(world, transitions=74)))
    digest = json.loads(ok(world.home, "policy", "import", str(file), "--json"))["policy"]
    ok(world.home, "policy", "export", digest[:12], str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    request = PolicyExportRequest(policy=digest)
    size = callers.store_client.download(routes.POLICY_EXPORT, request, tmp_path / "once more")
    assert (tmp_path / "once more").read_bytes() == file.read_bytes() and size == file.stat().st_size
    nothing = PolicyExportRequest(policy="00000000")
    with pytest.raises(ApiRefused, match="there is no policy '00000000'"):
        callers.client.download(routes.POLICY_EXPORT, nothing, tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="there is no policy '00000000'"):
        callers.store_client.download(routes.POLICY_EXPORT, nothing, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_policy_is_attached_to_a_device_and_taken_away(world: World, tmp_path: Path) -> None:
    ok(world.home, "policy", "import", written(tmp_path, checkpoint(world)), "--device", NANO)
    given = json.loads(ok(world.home, "policy", "attach", NANO, "maddpg", "--json"))
    taken = json.loads(ok(world.home, "policy", "attach", NANO, "none", "--json"))
    assert given["device"] == NANO and taken["generation"] == given["generation"] + 1


@pytest.mark.parametrize(
    ("content", "more", "code", "why"),
    [
        (None, [], ExitCode.USAGE, "cannot be read"),
        (b"no policy", [], ExitCode.USAGE, "not a checkpoint of maddpg"),
        (b"", ["--device", "nobody"], ExitCode.USAGE, "nobody"),
    ],
)
def test_what_cannot_be_imported_says_why(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    more: list[str],
    code: ExitCode,
    why: str,
) -> None:
    file = tmp_path / "policy"
    if content is not None:
        file.write_bytes(content or encode(checkpoint(world)))
    assert execute(["policy", "import", str(file), *more, "--data-dir", str(world.home)]) == code
    assert why in capsys.readouterr().err


def test_a_policy_that_tells_nonsense_of_its_training_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, checkpoint(world, transitions="many"))
    assert execute(["policy", "import", file, "--data-dir", str(world.home)]) == ExitCode.USAGE
    assert "what the policy says of its training cannot be read" in capsys.readouterr().err
