"""The shells on real loopback sockets: what ZeroMQ, CURVE and the disk do to the link."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import msgspec
import pytest
import zmq

from stageloom.edge_agent.link import connection
from stageloom.edge_agent.link.connection import load_membership, make_dealer, new_keys
from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.dispatch.server import DispatchServer, ServerConfig
from stageloom.planner.dispatch.server import new_keys as planner_keys
from stageloom.planner.dispatch.sockets import (
    ZAP_DOMAIN,
    bind_router,
    receive,
    require_files,
    send,
    zap_reply,
)
from stageloom.shared.codec import PLAIN
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import SettingError, StateError, StorageError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair, read_keys, write_keys
from stageloom.shared.messages import bulk, control, telemetry
from stageloom.shared.messages.base import Message, RefusalCode
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.token import Endpoints
from tests.lifecycle import orders
from tests.link.memory_store import MemoryStore
from tests.link.rig import Agent, Rig, Wire, heartbeat, running, wait_until

# -- identity -----------------------------------------------------------------------------------------------


@pytest.mark.promise("identity-key-routing-id")
@pytest.mark.parametrize("chosen", [b"", b"jetson-1"], ids=["the_planners", "its_own"])
def test_a_stolen_routing_id_gets_nobody_elses_plan(chosen: bytes) -> None:
    """1. The victim says hello, under a routing id that the planner or (carelessly) it itself has chosen.
    2. A thief, enrolled too, connects under the same id. 3. A plan is pushed: only the victim gets it."""
    with running("victim", "thief") as (rig, (victim_keys, thief_keys)):
        with Wire(rig, "control", victim_keys, routing_id=chosen) as victim:
            assert victim.hello().device == "victim"
            device = rig.server.ask(lambda core: core.fleet.get(DeviceId("victim")))
            assert device is not None and device.session is not None
            with Wire(rig, "control", thief_keys, routing_id=device.session.route) as thief:
                thief.dealer.poll(300, zmq.POLLOUT)
                rig.push("victim", b"secret plan")
                assert victim.reply().plan == b"secret plan"
                assert not thief.answers(timeout_s=0.3)


@pytest.mark.promise("identity-key-routing-id")
def test_the_device_behind_a_message_is_its_key_whatever_it_says() -> None:
    with running("a", "b") as (rig, (_, b_keys)), Wire(rig, "control", b_keys) as wire:
        assert wire.hello().device == "b"


@pytest.mark.promise("identity-key-routing-id")
def test_a_newer_connection_supersedes_the_older_one() -> None:
    with running("a") as (rig, (keys,)), Wire(rig, "control", keys) as old, Wire(rig, "control", keys) as new:
        assert isinstance(old.hello(boot=1), control.Welcome)
        assert isinstance(new.hello(boot=2), control.Welcome)
        told = old.reply()
        assert told.code is RefusalCode.SUPERSEDED and told.boot == 2
        old.send(heartbeat(boot=1))
        assert old.reply().code is RefusalCode.SUPERSEDED
        new.send(heartbeat(boot=2))
        assert isinstance(new.reply(), control.HeartbeatAck)


@pytest.mark.promise("identity-key-routing-id")
def test_a_rebooted_device_is_served_at_once() -> None:
    """With ROUTER_HANDOVER=0 and a fixed routing id it would be ignored in silence."""
    with running("a") as (rig, (keys,)):
        for boot in (1, 2, 3):
            with Wire(rig, "control", keys) as wire:
                assert isinstance(wire.hello(boot=boot), control.Welcome)


@pytest.mark.promise("revocation-holds-next-message")
def test_a_revocation_holds_from_the_next_message_on() -> None:
    """Taking a key away does not cut a connection that stands: every message is authorised."""
    with running("a") as (rig, (keys,)):
        with (
            Wire(rig, "control", keys) as wire,
            Wire(rig, "telemetry", keys) as lane,
            Wire(rig, "bulk", keys) as chunks,
        ):
            assert isinstance(wire.hello(), control.Welcome)
            lane.send(telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=(telemetry.Ledger(1, 0, 0),)))
            assert isinstance(lane.reply(), telemetry.TelemetryAck)
            rig.revoke("a")
            assert wire.reply().code is RefusalCode.REVOKED
            wire.send(heartbeat())
            assert wire.reply().code is RefusalCode.REVOKED
            lane.send(telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=(telemetry.Ledger(1, 9, 0),)))
            assert lane.reply().code is RefusalCode.REVOKED
            chunks.send(bulk.ChunkRequest(digest=digest_bytes([b""]), offset_bytes=0))
            assert chunks.reply().code is RefusalCode.REVOKED
            assert rig.store.books[DeviceId("a"), 1].produced == 0
        with Wire(rig, "control", keys) as again:
            assert not again.dealer.poll(300, zmq.POLLOUT), "a revoked key connects anew"


@pytest.mark.promise("equal-bytes-two-devices")
def test_equal_bytes_from_two_devices_are_each_their_senders() -> None:
    """Heartbeats are decoded once per content; who sends one is told by the connection, every time."""
    with running("a", "b") as (rig, (a_keys, b_keys)):
        with Wire(rig, "control", a_keys) as first, Wire(rig, "control", b_keys) as second:
            first.hello(boot=1)
            second.hello(boot=1)
            desired = rig.push("b", b"plan of b")
            assert second.reply() == desired
            for wire, generation in ((first, 0), (second, desired.generation)):
                wire.send(heartbeat(boot=1))
                answer = wire.reply()
                assert isinstance(answer, control.HeartbeatAck) and answer.generation == generation
            rig.revoke("a")
            assert first.reply().code is RefusalCode.REVOKED
            first.send(heartbeat(boot=1))
            assert first.reply().code is RefusalCode.REVOKED
            second.send(heartbeat(boot=1))
            assert isinstance(second.reply(), control.HeartbeatAck)


# -- admission ----------------------------------------------------------------------------------------------


def _handshake_succeeds(endpoint: str, server_key: str, *, timeout_ms: int = 1500) -> bool:
    keys = new_keys()
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
        dealer.curve_serverkey = server_key.encode()
        dealer.linger = 0
        dealer.immediate = True
        dealer.connect(endpoint)
        connected = bool(dealer.poll(timeout_ms, zmq.POLLOUT))
        dealer.close()
        return connected


@pytest.mark.promise("without-zap-handler-nobody")
@pytest.mark.parametrize("enforced", [True, False])
def test_a_server_without_a_zap_handler_lets_nobody_in(enforced: bool) -> None:
    """The trap itself is shown beside it: without enforcement libzmq lets every key in."""
    keys = planner_keys()
    with zmq.Context() as context:
        router = bind_router(
            context,
            "tcp://127.0.0.1:0",
            keys=keys,
            domain=ZAP_DOMAIN,
            frame_bytes=1000,
            receive_messages=1,
            send_messages=1,
        )
        if not enforced:
            endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
            router.unbind(endpoint)
            router.setsockopt(zmq.USE_FD, -1)
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)
            router.bind("tcp://127.0.0.1:*")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            assert _handshake_succeeds(endpoint, keys.public) is not enforced
        finally:
            router.close(linger=0)


def _zap_request(domain: bytes, key: bytes = b"k" * 32, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"7", domain, b"10.0.0.9", b"", mechanism, key]


@pytest.mark.promise("without-zap-handler-nobody")
def test_admission_knows_exactly_one_domain() -> None:
    def status(request: list[bytes], *, known: bool, in_pace: bool = True) -> bytes:
        answer = zap_reply(request, lambda key: known, lambda key: in_pace)
        assert answer is not None and answer[1] == b"7"
        return answer[2]

    devices = ZAP_DOMAIN.encode()
    assert status(_zap_request(devices), known=True) == b"200"
    assert status(_zap_request(devices), known=False) == b"400"
    assert status(_zap_request(devices), known=True, in_pace=False) == b"300"
    assert status(_zap_request(devices), known=False, in_pace=False) == b"400"
    for domain in (b"", b"*", b"stageloom", devices + b"x"):
        assert status(_zap_request(domain), known=True) == b"400"
    for mechanism in (b"NULL", b"PLAIN", b"GSSAPI"):
        assert status(_zap_request(devices, mechanism=mechanism), known=True) == b"400"
    assert status(_zap_request(devices, key=b"short"), known=True) == b"400"
    assert zap_reply([b"1.0"], lambda key: True, lambda key: True) is None


@pytest.mark.promise("without-zap-handler-nobody")
def test_an_exception_in_the_credentials_check_denies_one_and_admission_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running("a") as (rig, (keys,)):
        broken = True

        def check(key: str) -> bool:
            if broken:
                raise KeyError("the check itself is broken")
            return key == keys.public

        rig.server.ask(lambda core: setattr(core, "may_connect", check))
        with Wire(rig, "control", keys) as wire:
            assert not wire.dealer.poll(500, zmq.POLLOUT)
        assert rig.server.alive
        broken = False
        with Wire(rig, "control", keys) as wire:
            assert isinstance(wire.hello(), control.Welcome)
    assert "admission failed" in caplog.text


def test_an_unknown_key_never_reaches_the_core() -> None:
    with running("a") as (rig, _), Wire(rig, "control", new_keys()) as wire:
        assert not wire.dealer.poll(500, zmq.POLLOUT)
        assert rig.count("unknown_key") == 0


@pytest.mark.promise("wrong-refused-key-named")
def test_the_client_names_a_refused_key_within_five_seconds(tmp_path: Path) -> None:
    with running("a") as (rig, _), Agent(rig, "a", new_keys(), tmp_path) as agent:
        wait_until(lambda: agent.status.detail == connection.OUR_KEY_REFUSED, timeout_s=5)


@pytest.mark.promise("wrong-refused-key-named")
def test_the_client_names_a_planner_with_another_key_within_five_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running("a") as (rig, (keys,)):
        with Agent(rig, "a", keys, tmp_path, planner_key=planner_keys().public) as agent:
            wait_until(lambda: agent.status.detail == connection.PLANNER_KEY_DIFFERS, timeout_s=5)
    assert connection.PLANNER_KEY_DIFFERS in caplog.text


def test_a_device_that_connects_too_often_is_not_told_that_another_planner_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*args: Any, **options: Any) -> "zmq.Socket[bytes]":
        dealer = make_dealer(*args, **options)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, 500)  # not 10 s: what is not let in is not answered
        return dealer

    monkeypatch.setattr(connection, "make_dealer", impatient)
    with running("a") as (rig, (keys,)):
        rig.server.ask(lambda core: setattr(core, "may_connect_now", lambda key, now_s: False))
        with Agent(rig, "a", keys, tmp_path) as agent:
            wait_until(lambda: "connects too often" in agent.status.detail, timeout_s=5)


# -- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.promise("frames-bounded-size-number")
def test_messages_with_more_frames_than_one_are_dropped() -> None:
    with running("a") as (rig, (keys,)), Wire(rig, "control", keys) as wire:
        wire.hello()
        frame = control.TO_PLANNER.encode(heartbeat())
        wire.send_frames([frame] * 200)
        wire.send_frames([b"", frame])
        wait_until(lambda: rig.count("frames") == 2)
        wire.send(heartbeat())
        assert isinstance(wire.reply(), control.HeartbeatAck)


@pytest.mark.promise("frames-bounded-size-number")
def test_an_oversized_frame_cuts_its_connection_and_nobody_elses() -> None:
    with running("a", "b") as (rig, (a_keys, b_keys)):
        with Wire(rig, "control", a_keys) as big, Wire(rig, "control", b_keys) as other:
            other.hello()
            big.hello()
            big.send_frames([bytes(control.TO_PLANNER.limits.frame_bytes + 1)])
            other.send(heartbeat())
            assert isinstance(other.reply(), control.HeartbeatAck)
            assert rig.count("malformed") == 0


def test_a_queue_that_is_read_is_not_full_however_fast_answers_follow() -> None:
    """Each answer has come before the next is sent, and nothing polls in between."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 2)
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        dealer.send(b"first")
        assert router.poll(10_000)
        route, _ = receive(router)
        for number in range(500):
            send(router, route, b"%d" % number)
            assert dealer.recv() == b"%d" % number


def test_an_unreadable_frame_is_answered_and_changes_nothing() -> None:
    with running("a") as (rig, (keys,)), Wire(rig, "control", keys) as wire:
        wire.send_frames([b"\x00\xc1"])
        assert wire.reply().code is RefusalCode.MALFORMED
        assert isinstance(wire.hello(), control.Welcome)


@pytest.mark.promise("frames-bounded-size-number")
def test_too_few_open_files_are_found_out_at_the_start() -> None:
    """In a child: the limit of a process can be lowered only once."""
    code = (
        "import resource; from stageloom.planner.dispatch.sockets import require_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "assert require_files(50) == 328 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 328\n"
        "assert require_files(0) == 512, 'all that the system allows'\n"
        "require_files(1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert SettingError.__name__ in done.stderr and "1000 devices need 4128 open files" in done.stderr
    assert require_files(1) >= 132


def test_a_taken_address_is_an_error_with_a_remedy() -> None:
    with running() as (rig, _):
        config = ServerConfig(keys=rig.keys, control=rig.endpoints.control)
        with pytest.raises(UnavailableError, match="cannot be bound"):
            DispatchServer(MemoryStore(), config).start()


# -- life ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("frames-bounded-size-number")
def test_a_frozen_device_is_noticed_by_the_planner() -> None:
    """A stopped process keeps its connection and its queue takes messages: only silence tells."""
    with running("a", dead_after_s=1.0) as (rig, (keys,)), Wire(rig, "control", keys) as wire:
        wire.hello()
        wait_until(lambda: (DeviceId("a"), True) in rig.came)
        wait_until(lambda: (DeviceId("a"), False) in rig.came, timeout_s=5)


@pytest.mark.promise("frames-bounded-size-number")
def test_a_frozen_planner_is_noticed_by_the_device(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)), Agent(rig, "a", keys, tmp_path) as agent:
        wait_until(lambda: agent.connected)
        thawed = []
        rig.server.post(lambda: thawed.append(wait_until(lambda: not agent.connected)))  # type: ignore[arg-type]
        wait_until(lambda: thawed, timeout_s=15)
        wait_until(lambda: agent.connected)


_FULL_AND_BROKEN = """
import sys, threading, zmq
context, peers = zmq.Context(), zmq.Context()
router = context.socket(zmq.ROUTER)
router.setsockopt(zmq.RCVHWM, 1)
router.setsockopt(zmq.HEARTBEAT_IVL, 50)
router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
dealer = peers.socket(zmq.DEALER)
dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
for _ in range(100):
    dealer.send(b"more than the router takes in")
dealer.close(linger=1000)
peers.term()
threading.Event().wait(60)
"""


@pytest.mark.promise("zeromq-s-own-heartbeats")
def test_zeromqs_own_heartbeats_stay_off_since_they_end_a_process_with_a_full_queue() -> None:
    """The trap itself: 1. a peer fills a router's receive queue, which nobody reads; 2. its connection
    breaks; 3. the router's next heartbeat aborts the whole process (libzmq 4.3.5)."""
    trapped = subprocess.run(
        [sys.executable, "-c", _FULL_AND_BROKEN], capture_output=True, text=True, timeout=30, check=False
    )
    assert trapped.returncode == -signal.SIGABRT and "!_io_error" in trapped.stderr
    with zmq.Context() as context:
        ours = [
            bind_router(
                context,
                "tcp://127.0.0.1:0",
                keys=planner_keys(),
                domain=ZAP_DOMAIN,
                frame_bytes=1000,
                receive_messages=1,
                send_messages=1,
            ),
            make_dealer(
                context,
                keys=new_keys(),
                planner_key=planner_keys().public,
                frame_bytes=1000,
                send_messages=1,
                rng=Random(1),
            ),
        ]
        for one in ours:
            assert one.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert one.getsockopt(zmq.TCP_KEEPALIVE) == 1, "TCP finds who is gone"
            one.close(linger=0)


def test_a_plan_travels_is_committed_and_reported(tmp_path: Path) -> None:
    blob = Random(1).randbytes(900_001)
    with running("a") as (rig, (keys,)), Agent(rig, "a", keys, tmp_path) as agent:
        wait_until(lambda: agent.connected)
        desired = rig.push("a", b"plan", (blob, b"small"))
        report = wait_until(lambda: _committed(rig, desired))
        assert report.active == desired.plan_digest and report.state is DeviceState.COMMITTED
        assert agent.client.artifacts.path(desired.artifacts[0].digest).read_bytes() == blob
        assert [type(action).__name__ for action in agent.actions] == [
            "VerifyPlan",
            "StagePlan",
            "ActivatePlan",
            "AbandonPlan",  # it is over: nothing of it is left to give up
        ]


def _committed(rig: Rig, desired: control.Desired) -> control.Report | None:
    report = rig.store.members[DeviceId("a")].report
    done = report is not None and report.generation == desired.generation
    return report if done and report and report.state is DeviceState.COMMITTED else None


@pytest.mark.promise("restored-database-starts-new")
def test_a_change_made_while_the_device_was_away_arrives(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)):
        with Agent(rig, "a", keys, tmp_path) as agent:
            wait_until(lambda: agent.connected)
        first, last = rig.push("a", b"one"), rig.push("a", b"two")
        assert (first.generation, last.generation) == (1, 2)
        with Agent(rig, "a", keys, tmp_path):
            wait_until(lambda: _committed(rig, last))


def test_a_restarted_agent_restores_its_plan_before_any_network(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)):
        with Agent(rig, "a", keys, tmp_path):
            desired = rig.push("a", b"plan")
            wait_until(lambda: _committed(rig, desired))
    with Agent(rig, "a", keys, tmp_path) as offline:
        action = wait_until(lambda: offline.actions)[0]
        assert isinstance(action, orders.RestorePlan) and action.plan.wire == b"plan"
        assert not offline.connected


def test_a_restarted_planner_gets_its_devices_back(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)), Agent(rig, "a", keys, tmp_path) as agent:
        wait_until(lambda: agent.connected)
        rig.server.stop()
        rig.start(at=rig.endpoints)
        desired = rig.push("a", b"after")
        wait_until(lambda: _committed(rig, desired))


@pytest.mark.promise("restored-database-starts-new")
def test_a_restored_database_begins_a_new_epoch(tmp_path: Path) -> None:
    """1. Backup. 2. Two plans are committed. 3. The backup is restored: generation 1 would be old news."""
    with running("a") as (rig, (keys,)), Agent(rig, "a", keys, tmp_path):
        backup = rig.store.snapshot()
        rig.push("a", b"one")
        wait_until(lambda: _committed(rig, rig.push("a", b"two")) or _committed_any(rig, 2))
        rig.server.stop()
        rig.store = backup
        rig.start(at=rig.endpoints)
        rig.push("a", b"three")
        wait_until(lambda: _active(rig) == digest_bytes([b"three"]))
        report = rig.store.members[DeviceId("a")].report
        assert report is not None and report.epoch == 2 and report.generation > 2


def _committed_any(rig: Rig, generation: int) -> bool:
    report = rig.store.members[DeviceId("a")].report
    return report is not None and report.generation >= generation and report.state is DeviceState.COMMITTED


def _active(rig: Rig) -> str | None:
    report = rig.store.members[DeviceId("a")].report
    return report.active if report is not None and report.state is DeviceState.COMMITTED else None


def test_telemetry_is_stored_once_and_acknowledged_after_the_commit(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)), Agent(rig, "a", keys, tmp_path) as agent:
        for number in range(3000):
            agent.client.record([telemetry.Event(f"n{number}")])
        wait_until(lambda: agent.status.telemetry_acknowledged >= 3000)
        status = agent.status
        accounted = status.telemetry_acknowledged + status.telemetry_dropped + status.telemetry_spooled
        assert status.telemetry_produced == accounted
        codes = [row.data.code for row in rig.store.rows.values() if isinstance(row.data, telemetry.Event)]
        assert sorted(codes) == sorted(f"n{number}" for number in range(3000))


def test_a_store_that_fails_gets_no_acknowledgement_and_the_rows_later(tmp_path: Path) -> None:
    with running("a") as (rig, (keys,)):
        append, failures = rig.store.append_telemetry, []

        def failing(writes: object) -> NoReturn:
            failures.append(1)
            raise OSError("disk full")

        rig.store.append_telemetry = failing  # type: ignore[method-assign]
        with Agent(rig, "a", keys, tmp_path, telemetry_again_s=0.3) as agent:
            agent.client.record([telemetry.Event("kept")])
            wait_until(lambda: len(failures) >= 2)
            assert agent.status.telemetry_acknowledged == 0
            rig.store.append_telemetry = append  # type: ignore[method-assign]
            wait_until(lambda: agent.status.telemetry_acknowledged == 1)
    assert len(rig.store.rows) == 1


def test_a_batch_that_could_not_be_sent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is full once; an acknowledgement would be waited for for an hour."""
    send, refused = connection.PlannerConnection.send, list[object]()

    def full_once(sockets: connection.PlannerConnection, lane: str, message: Message) -> bool:
        if lane == "telemetry" and not refused:
            refused.append(message)
            return False
        return send(sockets, lane, message)

    monkeypatch.setattr(connection.PlannerConnection, "send", full_once)
    with (
        running("a") as (rig, (keys,)),
        Agent(rig, "a", keys, tmp_path, telemetry_again_s=3600.0) as agent,
    ):
        agent.client.record([telemetry.Event("kept")])
        wait_until(lambda: agent.status.telemetry_acknowledged == 1)
    assert refused


@pytest.mark.promise("requests-wait-store-wait")
def test_a_report_is_stored_while_telemetry_waits_for_the_disk() -> None:
    began, go = threading.Event(), threading.Event()
    with running("busy", "new") as (rig, (busy_keys, new_keys_)):
        append = rig.store.append_telemetry

        def slow(writes: Sequence[TelemetryWrite]) -> Sequence[tuple[DeviceId, control.Desired]]:
            began.set()
            go.wait(30)
            return append(writes)

        rig.store.append_telemetry = slow  # type: ignore[method-assign]
        with Wire(rig, "control", busy_keys) as wire, Wire(rig, "telemetry", busy_keys) as lane:
            wire.hello()
            lane.send(telemetry.TelemetryBatch(rows=(), ranges=(), ledgers=(telemetry.Ledger(1, 0, 0),)))
            assert began.wait(10)
            with Wire(rig, "control", new_keys_) as other:
                assert isinstance(other.hello(), control.Welcome), "and its report is acknowledged"
            go.set()
            assert isinstance(lane.reply(), telemetry.TelemetryAck)


@pytest.mark.promise("frames-bounded-size-number")
def test_heartbeats_overtake_a_telemetry_flood() -> None:
    """The store hangs, the telemetry lane is stuffed: the control lane does not notice."""
    row = telemetry.encode_row(telemetry.Row(1, telemetry.Event("x")))
    hang = threading.Event()
    with running("a", backlog_rows=2000) as (rig, (keys,)):

        def hangs(writes: object) -> Sequence[tuple[DeviceId, control.Desired]]:
            hang.wait(30)
            return ()

        rig.store.append_telemetry = hangs  # type: ignore[method-assign]
        with Wire(rig, "control", keys) as wire, Wire(rig, "telemetry", keys) as lane:
            wire.hello()
            for at in range(100):
                ranges = (telemetry.RowRange(1, at * 500, at * 500 + 499),)
                lane.send(telemetry.TelemetryBatch(rows=(row,) * 500, ranges=ranges, ledgers=()))
                wire.send(heartbeat())
                assert isinstance(wire.reply(), control.HeartbeatAck)
            assert wait_until(lambda: rig.count("busy"))
        hang.set()


# -- files --------------------------------------------------------------------------------------------------


@pytest.mark.promise("key-files-enrolment-certificate")
def test_key_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys", new_keys()
    old = os.umask(0)
    try:
        write_keys(path, keys)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == keys and keys.secret not in repr(keys)
    with pytest.raises(StorageError, match="exists already"):
        write_keys(path, new_keys())
    assert read_keys(path) == keys


@pytest.mark.promise("key-files-enrolment-certificate")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    write_keys(path, new_keys())
    path.chmod(mode)
    with pytest.raises(StorageError, match=f"mode {mode:04o}"):
        read_keys(path)


def test_damaged_missing_and_linked_key_files_are_refused(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys", new_keys()
    with pytest.raises(StorageError, match="cannot be read"):
        read_keys(path)
    write_keys(path, KeyPair(keys.public, keys.secret[:-1]))
    with pytest.raises(StateError, match="two keys"):
        read_keys(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StorageError):
        read_keys(link)


# -- membership ----------------------------------------------------------------------------------------------


def test_a_damaged_membership_is_an_error_and_a_missing_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "membership"
    assert load_membership(path) is None
    path.write_bytes(b"\x00garbage")
    with pytest.raises(StateError, match="join the planner again"):
        load_membership(path)


@pytest.mark.promise("key-files-enrolment-certificate")
def test_a_membership_of_version_0_1_with_its_enrolment_endpoint_is_read(tmp_path: Path) -> None:
    where = [f"tcp://10.0.0.7:{port}" for port in (7420, 7421, 7422, 7423)]
    old = {"type": "membership", "device": "edge1", "planner_key": "k" * 40, "endpoints": where}
    path = tmp_path / "membership"
    path.write_bytes(PLAIN + msgspec.msgpack.encode(old))
    member = load_membership(path)
    assert member is not None and member.endpoints == Endpoints(*where[:3])
