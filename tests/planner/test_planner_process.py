"""A real planner, the real command line, and a device that speaks the protocol."""

import json
import signal
import socket
import ssl
import stat
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stageloom.shared.artifact import open_artifact
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control, enrol, telemetry
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.telemetry import (
    Ledger,
    OperatorTiming,
    ProfileResult,
    QueueSample,
    TaskCounters,
    histogram_of,
)
from stageloom.shared.plan import decode_plan
from tests.planner.conftest import add_model
from tests.planner.fake_device import BOOT, FakeDevice
from tests.planner.processes import PlannerProcess, ok, plan_file, stageloom, until

pytestmark = pytest.mark.more


def _json(home: Path, *arguments: str) -> Any:
    return json.loads(ok(home, *arguments, "--json"))


def _device(planner: PlannerProcess, name: str) -> FakeDevice:
    device = FakeDevice(ok(planner.home, "device", "token"), name)
    assert isinstance(device.enrol(), enrol.EnrolReply)
    device.hello()
    return device


def test_a_model_becomes_a_plan_that_a_device_gets_with_its_artifact(
    planner: PlannerProcess, branches: Digest, tmp_path: Path
) -> None:
    """The whole way: import, enrol, plan, push, fetch, report, history."""
    home = planner.home
    with _device(planner, "nano") as device:
        made = _json(
            home,
            *("plan", "create", "--device", "nano", "--model", "branches:replicas=2"),
            *("--scheduler", "greedy", "--name", "first", "--push"),
        )
        pushed = made["pushed"]
        assert (pushed["epoch"], pushed["generation"], pushed["autonomy"]) == (1, 1, "off")
        desired = device.expect("control", control.TO_DEVICE, control.Desired)
        plan = decode_plan(desired.plan, desired.plan_digest)
        assert (plan.digest, plan.models[0].replicas) == (made["digest"], 2)
        blob = tmp_path / "fetched"
        blob.write_bytes(device.fetch(desired.artifacts[0]))
        assert len(open_artifact(blob, branches).graph.operators) == 3
        report = control.Report(
            revision=1,
            epoch=1,
            generation=1,
            seen=plan.digest,
            active=plan.digest,
            origin=control.Origin.PLANNER,
            state=control.DeviceState.COMMITTED,
        )
        device.report(report)
        (entry,) = _json(home, "plan", "history", "nano")
        assert (entry["decided_by"], entry["state"], entry["plan"]) == ("operator", "committed", "first")
        shown = _json(home, "device", "show", "nano")
        assert (shown["online"], shown["report"]["active"]) == (True, plan.digest)
    assert "combined branches#0.0 branches#1.0" not in ok(home, "plan", "show", "first")
    assert "combined branches#1.0" in ok(home, "plan", "show", plan.digest[:8])


@pytest.mark.promise("push-keeps-autonomy-set")
@pytest.mark.usefixtures("branches")
def test_a_push_keeps_the_autonomy_that_is_set_and_says_which_applies(
    planner: PlannerProcess, branches: Digest
) -> None:
    def said(*arguments: str) -> str:
        return stageloom(planner.home, "plan", *arguments).stderr

    ok(planner.home, "plan", "create", "--model", "branches", "--name", "kept")
    with _device(planner, "granted"), _device(planner, "plain"):
        assert ", autonomy off;" in said("push", "granted", "kept")
        assert ", autonomy proven;" in said("push", "granted", "kept", "--autonomy", "proven")
        assert ", autonomy proven;" in said("push", "granted", "kept")
        assert "2 devices, autonomy: 1 off, 1 proven;" in said("push", "granted", "plain", "kept")
        create = ("create", "--device", "granted", "--model", "branches", "--name", "again", "--push")
        assert ", autonomy proven;" in said(*create)
        pushed = _json(planner.home, "plan", "push", "granted", "kept", "--autonomy", "off")
        assert (pushed["generation"], pushed["autonomy"]) == (6, "off")


@pytest.mark.usefixtures("branches")
def test_a_plan_is_searched_by_ios_within_its_limits(planner: PlannerProcess, tmp_path: Path) -> None:
    # Nothing was measured, so groups are taken not to overlap: one group of all, where the limits allow it.
    for name, limits, schedule in (("free", {}, "0-2"), ("bound", {"r": 1, "s": 1}, "0..2")):
        file = plan_file(tmp_path / f"{name}.toml", **limits)
        create = ("plan", "create", "--model", "branches", "--scheduler", "ios", "--name", name)
        assert _json(planner.home, *create, "--from", file)["scheduler"] == "ios"
        assert ok(planner.home, "plan", "show", name).split()[-1] == schedule


def test_telemetry_is_acknowledged_after_commit_and_a_repeat_is_stored_once(planner: PlannerProcess) -> None:
    with _device(planner, "sender") as device:
        samples = [QueueSample("branches", number, 0, 0) for number in range(10)]
        for _ in range(2):
            ack = device.rows(0, samples)
            assert isinstance(ack, telemetry.TelemetryAck) and ack.ledgers == (Ledger(BOOT, 10, 0),)
        look = _json(planner.home, "watch", "sender", "--count", "1")
        assert look["telemetry"] == {"produced": 10, "stored": 10, "dropped": 0, "lost": 0}


@pytest.mark.promise("kill-9-planner")
def test_kill_of_the_planner_loses_no_acknowledged_row_and_the_device_stays_enrolled(
    own_planner: PlannerProcess,
) -> None:
    """1. rows are acknowledged; 2. kill -9; 3. a new planner on the same data has them all, and the key."""
    with _device(own_planner, "nano") as device:
        for first in range(0, 100, 20):
            device.rows(first, [QueueSample("branches", n, 0, 0) for n in range(first, first + 20)])
    assert own_planner.stop(signal.SIGKILL) == -signal.SIGKILL
    again = PlannerProcess(own_planner.home)
    assert again.ready["public_key"] == own_planner.ready["public_key"]
    assert _json(again.home, "watch", "--count", "1")["telemetry"]["stored"] == 100
    assert [info["device"] for info in _json(again.home, "device", "list")] == ["nano"]
    assert again.stop() == 0


def test_a_planner_that_is_stopped_leaves_when_its_devices_were_heard_of_last(
    own_planner: PlannerProcess,
) -> None:
    """1. a device connects; 2. later the planner is stopped; 3. the device was seen until then."""
    home = own_planner.home
    with _device(own_planner, "nano"):
        until(lambda: _json(home, "device", "show", "nano")["online"])
        stopped_us = time.time_ns() // 1000
        assert own_planner.stop() == 0
    assert _json(home, "device", "show", "nano")["last_seen_us"] >= stopped_us


def test_what_runs_on_a_device_is_seen_live(planner: PlannerProcess) -> None:
    with _device(planner, "watched") as device:
        device.rows(
            0,
            [
                TaskCounters("branches", 2_000_000, 30, 20, 0, 0, 0, 0),
                histogram_of("branches", [1000] * 99 + [50_000]),
                QueueSample("branches", 4, 0, 0),
            ],
        )
        device.heartbeat()
        look = _json(planner.home, "watch", "watched", "--count", "1")
        (rate,) = look["rates"]
        assert (rate["throughput_per_s"], rate["queued"]) == (10.0, 4)
        assert 0.8 < rate["latency_p50_ms"] < 1.2
        head, *lines = ok(planner.home, "watch").splitlines()
        assert head.split("\t")[0] == "device"
        assert "watched" in [line.split("\t")[0] for line in lines]


@pytest.mark.promise("revocation-holds-next-message")
def test_a_revoked_device_is_refused_at_its_next_message(planner: PlannerProcess) -> None:
    with _device(planner, "leaver") as device:
        device.rows(0, [QueueSample("branches", 0, 0, 0)])
        assert _json(planner.home, "device", "revoke", "leaver") == {"device": "leaver", "revoked": True}
        device.heartbeat()
        refused = device.expect("control", control.TO_DEVICE, Refused)
        assert refused.code is RefusalCode.REVOKED
        assert device.rows(1, [QueueSample("branches", 1, 0, 0)]).code is RefusalCode.REVOKED
    assert _json(planner.home, "device", "show", "leaver")["revoked"]
    ok(planner.home, "device", "token", "leaver")  # a revoked name may join again


def test_a_used_token_enrols_nobody_else(planner: PlannerProcess) -> None:
    token = ok(planner.home, "device", "token")
    with FakeDevice(token, "first") as first, FakeDevice(token, "other") as second:
        assert isinstance(first.enrol(), enrol.EnrolReply)
        assert second.enrol().code is RefusalCode.TOKEN_USED


def test_a_profile_on_request_becomes_costs_that_plans_use(planner: PlannerProcess, branches: Digest) -> None:
    home = planner.home
    with _device(planner, "measured") as device:
        asked = _json(home, "device", "profile", "measured", "--no-wait", "--budget", "5")
        desired = device.expect("control", control.TO_DEVICE, control.Desired)
        (request,) = desired.profiles
        assert (request.request, request.artifact.digest, desired.plan_digest) == (
            asked["requests"][0],
            branches,
            None,
        )
        timings = tuple(OperatorTiming(op, 100.0, 1.0, 9) for op in range(3))
        device.rows(0, [ProfileResult(request.request, branches, 1, "cpu-test", timings, True)])
        costs = _json(home, "device", "profile", "measured", "--no-wait")
        assert costs["generation"] == 2
    assert [entry["decided_by"] for entry in _json(home, "plan", "history", "measured")] == [
        "profile",
        "profile",
    ]


def test_profile_waits_for_the_results_and_prints_them(planner: PlannerProcess, branches: Digest) -> None:
    with _device(planner, "timed") as device:

        def answer() -> None:
            (request,) = device.expect("control", control.TO_DEVICE, control.Desired).profiles
            timings = tuple(OperatorTiming(op, 100.0, 1.0, 9) for op in range(3))
            device.rows(0, [ProfileResult(request.request, branches, 1, "cpu-test", timings, True)])

        thread = threading.Thread(target=answer)
        thread.start()
        (row,) = _json(planner.home, "device", "profile", "timed", "--model", "branches")["measured"]
        thread.join()
    assert (row["model"], row["measured"], row["total_us"]) == ("branches", 3, 300.0)


def test_stages_are_of_one_plan_as_it_is_so_other_options_beside_it_are_refused(
    planner: PlannerProcess,
) -> None:
    done = stageloom(planner.home, "device", "profile", "timed", "--plan", "p", "--batch", "2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave out --model, --batch" in done.stderr


@pytest.mark.promise("clean-stop-leaves-nothing")
def test_a_second_planner_on_the_same_data_is_refused(planner: PlannerProcess) -> None:
    done = stageloom(planner.home, "up", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert f"(process {planner.process.pid}); stop that one, or name another --data-dir" in done.stderr
    assert ok(planner.home, "status").startswith("planner 0.1.0 up")


@pytest.mark.promise("clean-stop-leaves-nothing")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly_and_leaves_nothing_running(
    own_planner: PlannerProcess, number: signal.Signals
) -> None:
    assert own_planner.stop(number) == 0
    assert not (own_planner.home / "api.sock").exists()
    assert "Traceback" not in own_planner.log()
    done = stageloom(own_planner.home, "status")
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)


def test_secrets_are_their_owners_alone(planner: PlannerProcess) -> None:
    for name in ("api.sock", "planner.keys"):
        assert stat.S_IMODE((planner.home / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(planner.home.stat().st_mode) == 0o700


def test_an_access_token_holds_when_the_api_is_opened_later_and_on_a_restored_planner(
    own_planner: PlannerProcess, tmp_path: Path
) -> None:
    token, saved = tmp_path / "token", tmp_path / "saved.tar"
    ok(own_planner.home, "access", "create", "ci", "--output", str(token))
    ok(own_planner.home, "planner", "backup", str(saved))
    own_planner.stop()
    restored = tmp_path / "restored"
    with tarfile.open(saved) as archive:
        archive.extractall(restored, filter="data")
    planner = PlannerProcess(restored, "--api", "127.0.0.1:0")
    try:
        elsewhere = ["--planner", planner.ready["api"], "--token-file", str(token)]
        assert stageloom(tmp_path / "nowhere", "status", *elsewhere).stdout.startswith("planner")
        trusted = ssl.create_default_context()
        trusted.load_verify_locations(restored / "api.pem")
        port = int(planner.ready["api"].rpartition(":")[2])
        for name in ("stageloom-planner", "127.0.0.1"):
            with socket.create_connection(("127.0.0.1", port)) as bare:
                trusted.wrap_socket(bare, server_hostname=name).close()
    finally:
        planner.stop()


def test_an_address_in_use_is_one_line(planner: PlannerProcess, tmp_path: Path) -> None:
    port = planner.ready["endpoints"]["control"].rpartition(":")[2]
    done = stageloom(tmp_path / "other", "up", "--listen", f"127.0.0.1:{port}")
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "cannot be bound" in done.stderr


def test_readers_work_while_the_planner_is_down(own_planner: PlannerProcess, model_file: Path) -> None:
    add_model(own_planner, model_file)
    ok(own_planner.home, "plan", "create", "--model", "branches", "--name", "first")
    with _device(own_planner, "nano"):
        until(lambda: _json(own_planner.home, "device", "list")[0]["online"])
    own_planner.stop()
    home = own_planner.home
    assert [info["model"] for info in _json(home, "model", "list")] == ["branches"]
    assert [info["plan"] for info in _json(home, "plan", "list")] == ["first"]
    assert _json(home, "device", "list")[0]["online"] is None
    assert "online:     unknown" in ok(home, "device", "show", "nano")
    assert _json(home, "plan", "history") == []
    for refused in (["plan", "push", "nano", "first"], ["model", "remove", "branches"], ["watch"]):
        done = stageloom(home, *refused)
        assert (done.returncode, "start it with `stageloom up`" in done.stderr) == (4, True)
