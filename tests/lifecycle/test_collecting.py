"""Which artifacts and downloads leave the store, and when."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.engine_view import Supervisor
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.shell import LifecycleShell, NoLink
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages.control import (
    ArtifactNeed,
    DeviceState,
    Origin,
    PolicyNeed,
    ProfileRequest,
    StageProfileRequest,
)
from tests.lifecycle.driver import desired


def need(name: str) -> ArtifactNeed:
    return ArtifactNeed(name, digest_bytes([name.encode()]), len(name))


class Device:
    """An agent that runs `good`, with files in its store; plans are neither checked nor loaded."""

    def __init__(self, folder: Path, *, whole: tuple[str, ...] = (), begun: tuple[str, ...] = ()) -> None:
        self.store = ArtifactStore(folder)
        for name in whole:
            self.store.path(need(name).digest).write_bytes(name.encode())
        for name in begun:
            self.store.append(need(name).digest, 0, name[:1].encode())
        good = RunnablePlan(PlanRef(digest_bytes([b"plan"]), Origin.PLANNER), b"plan", (need("good"),))
        core = Lifecycle(
            LinkState(last_good=good), config=LinkConfig(boot=1), plans=PlanManager(Supervisor(Random(0)))
        )
        self.shell = _Shell(
            core, NoLink("", ""), None, environment="", present=self.store.present(), now=lambda: 1.0
        )
        nothing: Any = SimpleNamespace(needed=set)
        parts: Any = SimpleNamespace(artifacts=self.store, profiles=nothing, local=nothing)
        self.shell.start(parts)

    def desires(self, generation: int, *artifacts: str, **fields: Any) -> None:
        value = desired(generation, b"plan %d" % generation, artifacts=tuple(map(need, artifacts)), **fields)
        self.shell.handle(ev.Received(value))

    def has(self, *names: str) -> list[bool]:
        """Which of these lie in the store, whole or begun."""
        files = {path.name.removesuffix(".part") for path in self.store.directory.iterdir()}
        return [need(name).digest in files for name in names]


class _Shell(LifecycleShell):
    def carry_on(self, action: ev.Action) -> None:
        if isinstance(action, ev.CollectArtifacts):
            super().carry_on(action)


def test_what_waits_for_the_desired_plan_outlives_an_engine_process(tmp_path: Path) -> None:
    """1. Half of a plan's artifacts are here. 2. The engine process ends, and the store is tidied up."""
    names = ("good", "here", "profiled", "staged", "policy")
    device = Device(tmp_path, whole=(*names, "stray"))
    stages = StageProfileRequest(
        request=2, plan_digest=need("p").digest, plan=b"p", artifacts=(need("staged"),)
    )
    policy = PolicyNeed(need("policy").digest, 6)
    profiles = (ProfileRequest(1, need("profiled")),)
    device.desires(1, "here", "to come", profiles=profiles, stage_profile=stages, policy=policy)
    device.shell.do([ev.CollectArtifacts()])
    device.shell.collect()
    assert device.has(*names) == [True] * 5
    assert device.has("stray") == [False]


def test_a_newer_desired_value_frees_what_was_fetched_for_the_one_before(tmp_path: Path) -> None:
    """Else the agent would wait for room that its own download takes."""
    device = Device(tmp_path, whole=("good", "done"), begun=("half", "shared"))
    device.desires(1, "done", "half", "shared")
    assert device.has("good", "done", "half", "shared") == [True] * 4
    device.desires(2, "shared", "new")
    assert device.has("good", "done", "half", "shared") == [True, False, False, True]


def test_a_fetch_that_finds_no_room_frees_what_nothing_names(tmp_path: Path) -> None:
    """A download of an older value may have gone on while the newer one came."""
    device = Device(tmp_path, whole=("good",), begun=("wanted",))
    device.desires(1, "wanted", "new")
    assert device.shell.core.state.state is DeviceState.WAITING
    device.store.append(need("superseded").digest, 0, b"s")
    device.shell.handle(ev.FetchFailed(need("new").digest, "cannot be stored: No space left on device"))
    assert device.has("good", "wanted", "superseded") == [True, True, False]
    assert "No space left" in device.shell.core.report().reason


def test_what_a_rejected_plan_brought_goes_and_last_known_good_keeps_what_it_needs(tmp_path: Path) -> None:
    device = Device(tmp_path, whole=("good", "brought"), begun=("half",))
    device.desires(1, "good", "brought")
    device.shell.do(device.shell.core.failed((1, 1), "illegal"))
    assert device.shell.core.state.state is DeviceState.REJECTED
    device.shell.collect(downloads=True)
    assert device.has("good", "brought", "half") == [True, False, False]
