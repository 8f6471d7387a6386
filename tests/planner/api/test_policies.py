"""Learned policies over the API: a file becomes a policy that the next re-plan asks, and a file again."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.handlers import trainings
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli.app import execute
from stageloom.planner.learning.messages import Checked
from stageloom.planner.replan.policy_file import provenance_of
from stageloom.planner.schema.policy import PolicyExportRequest, PolicyInfo, PolicyListRequest
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.policies import fitting_policy, policy_infos, store_policy
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import ExitCode, NotFoundError
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.search.gpg import packaged_checkpoint
from tests.planner.api.conftest import Callers
from tests.planner.processes import ok
from tests.planner.world import World
from tests.policy.maddpg.cases import network, saying
from tests.store.helpers import NANO, verdict_on

TRAINED_FOR = "twin nano"
FILE = "maddpg.checkpoint"


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
    file = folder / FILE
    file.write_bytes(encode(found))
    return str(file)


def imported(world: World, folder: Path, found: MaddpgCheckpoint, *more: str) -> dict[str, Any]:
    """What an import prints; the policy may plan without a check."""
    wanted = ("policy", "import", written(folder, found), "--unchecked", "--json", *more)
    printed: dict[str, Any] = json.loads(ok(world.home, *wanted))
    return printed


def kept(world: World, digest: str) -> PolicyInfo:
    """A policy of the store, as a list has it."""
    (info,) = (info for info in world.store.read(policy_infos) if info.digest == digest)
    return info


@pytest.mark.promise("policy-was-trained-elsewhere")
def test_with_a_device_it_is_adopted_for_that_devices_class(world: World, tmp_path: Path) -> None:
    there = world.store.read(device_info, NANO).device_class
    assert world.store.read(fitting_policy, "maddpg", there, [world.digest]) == (b"", "")
    printed = imported(world, tmp_path, checkpoint(world), "--device", NANO)
    own = decode(world.store.read(fitting_policy, "maddpg", there, [world.digest]).body)
    assert own.space == replace(checkpoint(world).space, device_class=there)
    assert own.provenance["adopted"]["device_class"] == TRAINED_FOR == printed["trained_for"]
    info = kept(world, printed["policy"])
    assert (info.device_class, info.artifacts) == (there, {world.digest: "diamond"})
    assert (info.steps, info.ratio) == (70, 0.8)


def test_without_one_it_stays_for_the_class_that_it_names(world: World, tmp_path: Path) -> None:
    found = checkpoint(world, transitions=71)
    printed = imported(world, tmp_path, found)
    assert printed == {
        "policy": digest_bytes([encode(found)]),
        "device_class": TRAINED_FOR,
        "trained_for": TRAINED_FOR,
        "models": [world.digest],
        "verdict": None,
    }
    assert world.store.read(fitting_policy, "maddpg", TRAINED_FOR, [world.digest]).body == encode(found)


def test_kept_policies_are_listed_in_pages_with_and_without_a_planner(
    callers: Callers, world: World, tmp_path: Path
) -> None:
    for transitions in (72, 73):
        imported(world, tmp_path, checkpoint(world, transitions))
    digests = [digest_bytes([encode(checkpoint(world, transitions))]) for transitions in (73, 72)]
    first = callers.call(routes.POLICY_LIST, PolicyListRequest(limit=1))
    second = callers.call(routes.POLICY_LIST, PolicyListRequest(limit=1, after=first.next))
    assert [first.items[0].digest, second.items[0].digest] == digests
    found = {info["digest"]: info for info in json.loads(ok(world.home, "policy", "list", "--json"))}
    info = found[digests[0]]
    assert (info["policy"], info["device_class"]) == ("maddpg", TRAINED_FOR)
    assert (info["artifacts"], info["steps"], info["ratio"]) == ({world.digest: "diamond"}, 73, 0.8)
    row = ok(world.home, "policy", "list").splitlines()[1].split("\t")
    assert row[:5] == [digests[0][:12], "maddpg", "diamond", "73", "0.800"]
    assert row[6:] == [TRAINED_FOR, "not checked, may plan"]


def test_a_policy_leaves_as_the_file_that_it_came_from(
    callers: Callers, world: World, tmp_path: Path
) -> None:
    file = tmp_path / FILE
    digest = imported(world, tmp_path, checkpoint(world, transitions=74))["policy"]
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
    imported(world, tmp_path, checkpoint(world), "--device", NANO)
    given = json.loads(ok(world.home, "policy", "attach", NANO, "maddpg", "--json"))
    taken = json.loads(ok(world.home, "policy", "attach", NANO, "none", "--json"))
    assert given["device"] == NANO and taken["generation"] == given["generation"] + 1


@pytest.mark.promise("policy-published-through-gate")
def test_what_is_imported_has_no_say_before_its_check_which_says_what_it_lacks(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing tells the rates that this one was trained at."""
    file = written(tmp_path, checkpoint(world, transitions=75))
    assert execute(["policy", "import", file, "--device", NANO, "--data-dir", str(world.home)]) == ExitCode.OK
    said = capsys.readouterr()
    digest = said.out.strip()
    assert f"policy {digest[:12]} has no say before it is checked" in said.err
    assert "nothing says how often tasks of diamond arrive" in said.err
    assert f"policy {digest[:12]} was not checked" in kept(world, digest).withheld
    refused = ["policy", "attach", NANO, digest[:12], "--data-dir", str(world.home)]
    assert execute(refused) == ExitCode.DENIED and "was not checked" in capsys.readouterr().err
    assert execute([*refused, "--unchecked"]) == ExitCode.OK


@pytest.mark.promise("policy-published-through-gate")
@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        ("", ExitCode.OK, "passed its check"),
        ("it is behind", ExitCode.FAILED, "did not pass its check: it is behind"),
    ],
)
def test_a_checks_exit_code_is_its_verdict(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    code: ExitCode,
    said: str,
) -> None:
    """The process that judges tells this verdict; planner and command are the real ones."""
    body = encode(checkpoint(world, transitions=77))
    digest = world.store.write(
        store_policy,
        body,
        policy="maddpg",
        device_class=TRAINED_FOR,
        provenance=provenance_of(decode(body)),
        curves=(),
        trained_at_us=1,
    )
    verdict = verdict_on(body, reason)
    told = msgspec.json.encode(Checked(verdict=verdict)).decode()
    child = (sys.executable, "-c", f"import sys; sys.stdin.readline(); print({told!r})")
    monkeypatch.setattr(trainings, "_COMMAND", child)
    command = ["policy", "check", digest[:12], "--twin", "nano", "--data-dir", str(world.home)]
    assert execute(command) == code
    assert f"policy {digest[:12]} {said}" in capsys.readouterr().err
    info = kept(world, digest)
    assert info.verdict == verdict and (info.withheld == "") is (code == ExitCode.OK)


@pytest.mark.promise("policy-published-through-gate")
@pytest.mark.full  # minutes of the twin
@pytest.mark.timeout(900)  # the first time it compiles the twin, on however loaded a machine
def test_a_check_tells_its_verdict_keeps_it_and_ends_with_1_where_the_policy_did_not_pass(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that says one thing always, on a device file and at rates that are given."""
    space = Space.of(world.plan("sequential"), TRAINED_FOR, samples=2)
    constant = MaddpgCheckpoint(space, saying(space, (0.5, 0.5)))
    digest = digest_bytes([encode(constant)])
    file = written(tmp_path, constant)
    assert execute(["policy", "import", file, "--unchecked", "--data-dir", str(world.home)]) == ExitCode.OK
    capsys.readouterr()
    on = ["--twin", "nano", "--rate", "diamond=200", "--data-dir", str(world.home)]
    assert execute(["policy", "check", digest[:12], *on, "--json"]) == ExitCode.FAILED
    said = capsys.readouterr()
    verdict = json.loads(said.out)
    assert [one["passed"] for one in verdict["criteria"]][:2] == [False, False]
    assert "its actions spread by 0.000 and give 1 combination of blocks" in verdict["reason"]
    assert "checking under rates x0.5" in said.err
    assert {load["load"] for load in verdict["loads"]} >= {"rates x0.5", "rates x1.5", "bursts"}
    info = kept(world, digest)
    assert info.verdict is not None and info.verdict.reason == verdict["reason"]
    assert info.withheld == "", "it may plan unchecked"
    assert ok(world.home, "policy", "list").splitlines()[1].endswith("not passed, may plan")


@pytest.mark.more
def test_what_cannot_be_checked_says_why(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = imported(world, tmp_path, checkpoint(world, transitions=76))["policy"]
    for more, why in (
        (["00000000"], "there is no policy '00000000'"),
        ([digest, "--device", "nobody"], "nobody"),
        ([digest], f"no device of the policy's class {TRAINED_FOR!r} is known"),
        ([digest, "--device", NANO], f"the policy is for the device class {TRAINED_FOR!r}, and {NANO} is of"),
        ([digest, "--twin", "nano", "--rate", "other=3"], "the policy has no model 'other'"),
    ):
        assert execute(["policy", "check", *more, "--data-dir", str(world.home)]) == ExitCode.USAGE
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("content", "more", "code", "why"),
    [
        (None, [], ExitCode.USAGE, "cannot be read"),
        (b"no policy", [], ExitCode.USAGE, "not a checkpoint of maddpg"),
        (packaged_checkpoint(), [], ExitCode.USAGE, "not a checkpoint of maddpg: format 1 of kind gpg"),
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
