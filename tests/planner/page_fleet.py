"""A planner with a fleet of fifty devices that only talk, and the pictures of its page for the documentation.

python -m tests.planner.page_fleet docs/pictures
"""

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.config import PlannerConfig
from stageloom.planner.dispatch.events import DesiredChanged
from stageloom.planner.dispatch.ports import EnrolAttempt, StoredRow, TelemetryWrite
from stageloom.planner.labels import parse_changes
from stageloom.planner.replan.predict import evaluation_of, predict
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.schema.device import DeviceTokenRequest
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.service import Planner
from stageloom.planner.store.desired import Push, newest_desired, push
from stageloom.planner.store.devices import enrol_device
from stageloom.planner.store.labels import change_labels
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.predictions import keep_considered
from stageloom.planner.store.profiles import request_profile
from stageloom.planner.store.replan_pushes import push_replan
from stageloom.shared.artifact import pack_artifact
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Alarm, DeviceState, ModelLoad, Origin, Report
from stageloom.shared.messages.telemetry import (
    LatencyHistogram,
    Ledger,
    OperatorTiming,
    ProfileResult,
    QueueSample,
    Row,
    RowData,
    RowKind,
    TaskCounters,
    TrialEnded,
    encode_row,
    histogram_of,
)
from stageloom.shared.plan import Plan
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from tests.planner.fake_device import BOOT, FakeDevice
from tests.search.graphs import model
from tests.store.migrated import begin_migrated

SIZE: Final = 50
BROWSER: Final = "/usr/bin/chromium"
WATCHED: Final = DeviceId("shop-07")
CLASS: Final = "jetson-orin-nano-15w"
REASON: Final = "the lower bound of the gain is above 2 %"

_KINDS: Final = {
    QueueSample: RowKind.QUEUE_SAMPLE,
    LatencyHistogram: RowKind.LATENCY_HISTOGRAM,
    TaskCounters: RowKind.TASK_COUNTERS,
    ProfileResult: RowKind.PROFILE_RESULT,
    TrialEnded: RowKind.TRIAL_ENDED,
}
_MINUTES: Final = 118


@dataclass(frozen=True)
class PageFleet:
    """A running planner, tokens by role, and the plan that the watched device came to run."""

    planner: Planner
    tokens: dict[Role, str]
    plan: str


@contextmanager
def page_fleet(folder: Path) -> Iterator[PageFleet]:
    """The fleet until the block ends.

    Of `WATCHED` there are two hours of telemetry, an alarm, the re-plan that answers it, and its trial.
    """
    config = PlannerConfig(
        data_dir=folder / "home",
        listen="127.0.0.1:0",
        api="127.0.0.1:0",
        heartbeat_interval_s=60.0,  # a device that has said hello stays for the test
        dead_after_s=600.0,
        search="local",
        search_workers=1,
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner, ExitStack() as devices:
        with PlannerClient(data_dir=config.data_dir) as client:
            tokens = {
                role: client.call(
                    routes.ACCESS_CREATE, AccessCreateRequest(name=f"ada-{role.value}", role=role)
                ).token
                for role in Role
            }
            told = _Told(planner, folder)
            plan = told.plans()
            for number in range(1, SIZE + 1):
                token = client.call(routes.DEVICE_TOKEN, DeviceTokenRequest()).token
                kind = CLASS if number % 3 else "cpu-8-core"
                device = devices.enter_context(FakeDevice(token, f"shop-{number:02d}", kind))
                _enrol(planner, device)
                history = told.decided(device.name) if device.name == WATCHED else told.first(device.name)
                site = f"site={('berlin', 'lyon', 'porto')[number % 3]}"
                planner.store.write(change_labels, device.name, parse_changes([site]))
                if number % 10:  # the others are away
                    device.hello(history)
        yield PageFleet(planner, tokens, plan)


def _enrol(planner: Planner, device: FakeDevice) -> None:
    """As the enrolment's desk does it, which takes a few strangers a second."""
    attempt = EnrolAttempt(
        digest_bytes([device.token.secret]), device.public_key, device.name, "0.1.0", device.device_class
    )
    planner.store.write(enrol_device, attempt)
    planner.server.admit(device.name, device.public_key)


class _Told:
    """What the planner's store is told, by the ways in which devices and operators tell it."""

    def __init__(self, planner: Planner, folder: Path) -> None:
        self._server, self._store = planner.server, planner.store
        self._folder, self._rows = folder, 0
        self._plans: dict[str, Plan] = {}
        self._graphs: dict[str, tuple[Digest, Graph]] = {}
        self._now_us = round(1e6 * time.time())

    def plans(self) -> str:
        """Three versions of two models, and three plans of the newest; the name of the best one."""
        self._model("detector", _inception(2))
        self._model("detector", _inception(3))
        self._model("classifier", _inception(1))
        for scheduler in ("sequential", "greedy", "ios"):
            choices = [
                ModelChoice(name=name, artifact=digest, graph=graph)
                for name, (digest, graph) in sorted(self._graphs.items())
            ]
            self._plans[scheduler] = plan = compose(choices, scheduler=scheduler)
            self._store.write(add_plan, f"shop-{scheduler}", plan, scheduler)
            graphs = dict(self._graphs.values())
            looked_at = evaluation_of(
                plan,
                EvaluationVerdict.FOUND,
                scheduler=scheduler,
                how="operator",
                prediction=predict(plan, graphs, CostTable(), ()),
                search_s=0.5,
            )
            self._store.write(keep_considered, [looked_at], device_class=CLASS, device=WATCHED)
        return "shop-greedy"

    def _model(self, name: str, predecessors: Sequence[Sequence[int]]) -> None:
        _, graph = model(name, predecessors)
        digest, blob = pack_artifact(graph, name.encode())
        path = self._folder / f"{name}.artifact"
        path.write_bytes(blob)
        self._store.add_model(name, path, digest)
        self._graphs[name] = digest, graph

    def first(self, device: DeviceId) -> Report:
        """It runs what an operator pushed."""
        desired = self._store.write(push, Push(device=device, plan="shop-sequential", decided_by="operator"))
        self._server.post(DesiredChanged(device, desired))
        return self._report(desired.epoch, desired.generation, "sequential", DeviceState.COMMITTED)

    def _report(self, epoch: int, generation: int, plan: str, state: DeviceState) -> Report:
        digest = self._plans[plan].digest
        return Report(
            revision=generation,
            epoch=epoch,
            generation=generation,
            seen=digest,
            active=digest,
            origin=Origin.PLANNER,
            state=state,
        )

    def decided(self, device: DeviceId) -> Report:
        """A plan by hand, an alarm half an hour ago, and the plan that won its trial since."""
        self.first(device)
        self._measured(device)
        fired_us = self._now_us - 30 * 60_000_000
        alarm = Alarm(
            boot=BOOT,
            number=1,
            at_us=fired_us,
            cause="oldest_age",
            value=1.84,
            threshold=0.5,
            plan=self._plans["sequential"].digest,
            loads=(
                ModelLoad("detector", 31.0, 21_000.0, 24, 1_840_000),
                ModelLoad("classifier", 12.0, 7_000.0, 2, 90_000),
            ),
            samples=(),
        )
        replan = LinkStore(self._store).record_alarm(device, alarm)
        assert replan is not None
        above = self._store.read(newest_desired, device)
        desired = self._store.write(
            push_replan,
            device,
            replan,
            self._plans["greedy"],
            scheduler="greedy",
            above=above,
            how="search",
            predicted=0.78,
        )
        assert desired is not None
        self._server.post(DesiredChanged(device, desired))
        self._tell(
            device,
            fired_us + 40_000_000,
            TrialEnded(
                epoch=desired.epoch,
                generation=desired.generation,
                origin=Origin.PLANNER,
                how="trial",
                verdict="commit",
                candidate=self._plans["greedy"].digest,
                control=self._plans["sequential"].digest,
                ratio=1.21,
                ratio_low=1.17,
                ratio_high=1.26,
                pairs=12,
                began_us=fired_us + 2_000_000,
                decided_us=fired_us + 40_000_000,
                reason=REASON,
                figure="latency",
            ),
        )
        return self._report(desired.epoch, desired.generation, "greedy", DeviceState.COMMITTED)

    def _measured(self, device: DeviceId) -> None:
        """Operators' times, and two hours of queues and latency that grew before the alarm."""
        for name, (digest, graph) in sorted(self._graphs.items()):
            (request,), _ = self._store.write(request_profile, device, [name])
            times = tuple(
                OperatorTiming(op, 400.0 + 90 * (op % 7), 4.0, 30) for op in range(len(graph.operators))
            )
            self._tell(device, self._now_us, ProfileResult(request, digest, 1, "", times, True))
        for minute in range(_MINUTES, -1, -1):
            at_us = self._now_us - minute * 60_000_000
            busy = max(0.0, 1 - abs(minute - 32) / 14)
            for place, name in enumerate(("detector", "classifier")):
                wave = 1 + 0.25 * math.sin(minute / 5 + place)
                latency_us = round((22_000 - 12_000 * place) * wave * (1 + 30 * busy * (1 - 0.8 * place)))
                self._tell(
                    device,
                    at_us,
                    QueueSample(name, round(2 * wave + 22 * busy * (1 - 0.9 * place)), 40_000, 90_000),
                    histogram_of(name, [round(latency_us * (0.6 + 0.01 * i)) for i in range(50)]),
                    TaskCounters(name, 1_000_000, 31, 31 - 19 * place, 0, 0, 0, 0),
                )

    def _tell(self, device: DeviceId, at_us: int, *data: RowData) -> None:
        rows = []
        for one in data:
            body = encode_row(Row(at_us, one))
            rows.append(StoredRow(BOOT, self._rows, at_us, _KINDS[type(one)], body, one))
            self._rows += 1
        told = TelemetryWrite(device, tuple(rows), (Ledger(BOOT, self._rows, 0),))
        LinkStore(self._store).append_telemetry([told])


def _inception(modules: int) -> list[list[int]]:
    """A stem, and modules of four branches that a concatenation joins."""
    rows: list[list[int]] = [[], [0]]
    for _ in range(modules):
        before = len(rows) - 1
        for length in (1, 2, 3, 1):
            for step in range(length):
                rows.append([before] if step == 0 else [len(rows) - 1])
        ends = [before + 1, before + 3, before + 6, before + 7]
        rows.append(ends)
    return rows


# -- pictures ---------------------------------------------------------------------------------------------


def sign_in(page: Any, fleet: PageFleet, role: Role) -> None:
    """Fill the first page's form in."""
    page.goto(f"{fleet.planner.api_url}/ui")
    page.get_by_label("Access token").fill(fleet.tokens[role])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Fleet").wait_for()


def _pictures(folder: Path) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, page_fleet(Path(home)) as fleet, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shown = browser.new_context(ignore_https_errors=True, viewport={"width": 1200, "height": 860})
        page = shown.new_page()
        sign_in(page, fleet, Role.ADMIN)
        page.screenshot(path=folder / "fleet.png")
        page.goto(f"{fleet.planner.api_url}/ui/devices/{WATCHED}")
        page.locator(".chart canvas").first.wait_for()
        page.screenshot(path=folder / "device.png", full_page=True)
        page.goto(f"{fleet.planner.api_url}/ui/plans/{fleet.plan}?device={WATCHED}")
        page.locator("svg.timeline").wait_for()
        page.get_by_text("Plans for the same models").wait_for()
        page.screenshot(path=folder / "plan.png")
        browser.close()
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.quantize(96).save(path, optimize=True)


if __name__ == "__main__":
    _pictures(Path(sys.argv[1]))
