"""The local endpoint and the client library, over a real socket with a played backend."""

import contextlib
import fcntl
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stageloom import Client, TaskFuture
from stageloom.edge_agent.ingest import channel, client_memory
from stageloom.edge_agent.ingest.channel import close_received
from stageloom.edge_agent.ingest.client_memory import ArenaPool, InputSource, LayoutPool, TaskLayout, kind_of
from stageloom.edge_agent.ingest.connection import ConnectionLimits
from stageloom.edge_agent.ingest.messages import (
    AttachArena,
    ClientHello,
    DeclareLayout,
    DetachArena,
    Goodbye,
    InputRef,
    ModelSignature,
    OutputRef,
    RetractLayout,
    SubmitRequest,
    TaskEnded,
    TensorInfo,
    ToAgent,
    TraceRequest,
    TraceWritten,
    decode_to_application,
    encode,
)
from stageloom.edge_agent.ingest.signature import check_layout, model_info
from stageloom.edge_agent.worker.messages import RunTask, TaskDone
from stageloom.shared.engine.steps import Outcome
from stageloom.shared.errors import (
    AgentRestarted,
    InputError,
    RefusedError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRefused,
    UnavailableError,
)
from stageloom.shared.graph import Graph, Tensor
from stageloom.shared.ids import TensorId
from tests.agent.conftest import ECHO, Hosted, eventually

ROW = np.array([[1.0, 2.0, 3.0, 4.0]], dtype=np.float32)


def _refused(future: TaskFuture) -> TaskRefused:
    with pytest.raises(TaskRefused) as caught:
        future.result(20)
    return caught.value


@pytest.mark.promise("refusal-typed-says-was")
def test_socket_is_for_its_owner_only(hosted: Hosted) -> None:
    assert stat.S_IMODE(hosted.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(hosted.path.parent.stat().st_mode) == 0o700


def test_outputs_of_many_tasks_from_many_threads_arrive_unmixed(hosted: Hosted) -> None:
    hosted.backend.echo = True
    failures: list[str] = []

    def use(client: Client, seed: int) -> None:
        for index in range(100):
            given = np.full((1, 4), seed * 1000 + index, dtype=np.float32)
            got = client.run("echo", {"input": given}, timeout_s=20)
            if not np.array_equal(got["output"], given):
                failures.append(f"{seed} {index}")

    with Client(hosted.path) as one, Client(hosted.path) as other:
        threads = [threading.Thread(target=use, args=((one, other)[i % 2], i)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert hosted.ledger.totals["echo"].completed == 600


def test_models_tell_types_and_shapes_over_several_pages(hosted: Hosted) -> None:
    tensor = TensorInfo("t" * 500, "float32", (1, 2, 3))
    hosted.backend.infos = {
        f"m{i}": ModelSignature(f"m{i}", (tensor,) * 20, (tensor,) * 20) for i in range(9)
    }
    with Client(hosted.path) as client:
        assert client.models() == hosted.backend.infos


@pytest.mark.parametrize(
    "tensor", [Tensor("t" * 513, "float32", (1,)), Tensor("t", "float32", (1,) * 33)], ids=["name", "rank"]
)
def test_model_that_no_application_could_read_is_refused_by_what_checks_its_plan(tensor: Tensor) -> None:
    graph = Graph("g", tensors=(tensor,), operators=(), inputs=(TensorId(0),), outputs=())
    with pytest.raises(TaskRefused, match=r"the signature of model 'm' fits no packet: .* length <= "):
        model_info("m", graph)


@pytest.mark.promise("refusal-typed-says-was")
@pytest.mark.parametrize(
    ("inputs", "code", "expected"),
    [
        ({"input": ROW.astype(np.float64)}, "wrong_dtype", "float32 1x4"),
        ({"input": ROW[0]}, "wrong_shape", "1x4, not 4"),
        (
            {"inputs": ROW},
            "wrong_input",
            "'echo' has no input 'inputs' and was not given 'input'; it takes input: float32 1x4",
        ),
        ({}, "wrong_input", "'echo' was not given 'input'; it takes input"),
        ({"input": ROW, "more": ROW}, "wrong_input", "'echo' has no input 'more'; it takes input"),
        ({"input": np.array([["a"]], dtype=object)}, "wrong_dtype", "no model takes"),
        ({"input": np.array([["a"]])}, "wrong_dtype", "no model takes"),
    ],
)
def test_wrong_input_is_refused_and_told_what_is_expected(
    hosted: Hosted, inputs: dict[str, Any], code: str, expected: str
) -> None:
    with Client(hosted.path) as client:
        with pytest.raises(TaskRefused) as caught:
            client.run("echo", inputs, timeout_s=20)
        assert caught.value.code == code
        assert expected in str(caught.value)
        assert not hosted.backend.accepted


@pytest.mark.promise("refusal-typed-says-was")
def test_unknown_model_is_refused_with_the_names_of_those_that_run(hosted: Hosted) -> None:
    with Client(hosted.path) as client, pytest.raises(TaskRefused, match="echo, twin") as caught:
        client.run("nothing", {"input": ROW})
    assert caught.value.code == "unknown_model"


def test_tasks_are_refused_while_no_plan_is_active(hosted: Hosted) -> None:
    hosted.backend.why_not_ready = "no plan is active"
    with Client(hosted.path) as client:
        assert _refused(client.submit("echo", {"input": ROW})).code == "not_ready"


def test_tasks_are_refused_with_the_reason_while_the_agent_has_no_models_yet(hosted: Hosted) -> None:
    served, hosted.backend.infos = hosted.backend.infos, {}
    hosted.backend.why_not_ready = "a plan is being loaded"
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        with pytest.raises(
            TaskRefused, match="a plan is being loaded; see `stageloom-agent status`"
        ) as caught:
            client.submit("echo", {"input": ROW})
        assert caught.value.code == "not_ready"
        hosted.backend.infos, hosted.backend.why_not_ready = served, ""
        assert np.array_equal(client.run("echo", {"input": ROW}, timeout_s=20)["output"], ROW)


def test_non_contiguous_and_foreign_endian_arrays_are_converted(hosted: Hosted) -> None:
    hosted.backend.echo = True
    wide = np.arange(8, dtype=">f4").reshape(1, 8)[:, ::2]
    with Client(hosted.path) as client:
        assert np.array_equal(client.run("echo", {"input": wide}, timeout_s=20)["output"], wide)


class _Counting(InputSource):
    """Reads 0, 1, 2, ... into the place; or fails as a file does that is too short."""

    def __init__(self, dtype: type = np.float32, *, short: bool = False) -> None:
        super().__init__(np.dtype(dtype), (1, 4))
        self._short = short

    def read_into(self, place: Any) -> None:
        if self._short:
            raise InputError("the file is too short")
        place.reshape(-1)[:] = np.arange(4)


def test_input_that_is_no_array_is_read_into_shared_memory(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        outputs = client.run("echo", {"input": _Counting()}, timeout_s=10.0)
        assert outputs["output"].tolist() == [[0, 1, 2, 3]]
        with pytest.raises(TaskRefused, match="float32"):
            client.run("echo", {"input": _Counting(np.float64)}, timeout_s=10.0)


def test_input_that_cannot_be_read_leaves_its_place_for_the_next_task(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        for _ in range(3):
            with pytest.raises(InputError, match="too short"):
                client.submit("echo", {"input": _Counting(short=True)})
        client.run("echo", {"input": _Counting()}, timeout_s=10.0)
        assert len(hosted.backend.layouts) == 1
    assert len(hosted.backend.accepted) == 1


def test_outputs_are_delivered_where_they_lie(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        seen = []

        def deliver(outputs: Any) -> float:
            seen.append(outputs["output"].flags.owndata)
            return float(outputs["output"].sum())

        assert client.submit("echo", {"input": _Counting()}, deliver=deliver).result(10.0) == 6.0
        assert seen == [False]


def test_a_result_that_cannot_be_made_is_the_error_of_its_task_alone(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:

        def deliver(outputs: Any) -> None:
            raise InputError("the region is gone")

        with pytest.raises(InputError, match="the region is gone"):
            client.submit("echo", {"input": _Counting()}, deliver=deliver).result(10.0)
        client.run("echo", {"input": _Counting()}, timeout_s=10.0)
        assert len(hosted.backend.layouts) == 1


def test_shared_input_makes_one_task_with_outputs_per_model(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        outputs = client.run(["echo", "twin"], {"input": ROW}, timeout_s=20)
    assert np.array_equal(outputs["echo"]["output"], ROW)
    assert np.array_equal(outputs["twin"]["result"], ROW)
    assert sum(c.submitted for c in hosted.ledger.totals.values()) == 1


def test_priority_and_deadline_reach_the_engine_as_instants_of_the_shared_clock(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        before_s = hosted.loop.now()
        client.submit("echo", {"input": ROW}, priority=7, deadline_s=50.0)
        eventually(lambda: hosted.backend.accepted, "the task arrives")
        task = hosted.backend.accepted[0]
        assert task.priority == 7
        assert task.deadline_s is not None
        assert before_s + 50.0 <= task.deadline_s <= hosted.loop.now() + 50.0


@pytest.mark.parametrize(
    ("model", "options", "cause"),
    [
        ("echo", {"priority": 2**31 + 1}, "a priority of 2147483649 is impossible"),
        ("echo", {"priority": 0.5}, r"a priority of 0\.5 is impossible"),
        ([], {}, "a task for 0 models is impossible"),
        (["echo"] * 17, {}, "a task for 17 models is impossible"),
    ],
)
def test_what_no_task_may_have_is_an_error_of_that_task_alone(
    hosted: Hosted, model: Any, options: dict[str, Any], cause: str
) -> None:
    with Client(hosted.path) as client:
        held = client.submit("echo", {"input": ROW})
        with pytest.raises(InputError, match=cause):
            client.submit(model, {"input": ROW}, **options)
        assert client.models() and not held.done()


@pytest.mark.parametrize("limits", [ConnectionLimits(max_arena_bytes=1 << 20)])
@pytest.mark.parametrize(
    ("model", "inputs", "code"),
    [
        (["left", "right"], {"input": ROW}, "too_many_tensors"),
        ("echo", {"input": ROW, "n" * 513: np.zeros(400_000, np.uint8)}, "wrong_input"),
        ("echo", {"input": np.zeros(400_000, np.uint8)} | {str(i): ROW for i in range(256)}, "wrong_input"),
    ],
)
def test_tensors_that_fit_no_packet_are_refused_with_that_task_alone_and_leave_their_places(
    hosted: Hosted, model: Any, inputs: dict[str, Any], code: str
) -> None:
    outputs = tuple(TensorInfo(f"output{i}", "float32", (1,)) for i in range(129))
    hosted.backend.infos |= {name: ModelSignature(name, ECHO.inputs, outputs) for name in ("left", "right")}
    with Client(hosted.path) as client:
        held = client.submit("echo", {"input": ROW})
        for _ in range(3):  # the places of three would not fit
            with pytest.raises(TaskRefused) as caught:
                client.submit(model, inputs)
            assert caught.value.code == code
        assert client.models() and not held.done()


def test_numbers_of_numpy_do_for_priority_and_deadline(hosted: Hosted) -> None:
    hosted.backend.echo = True
    numbers: dict[str, Any] = {"priority": np.int64(3), "deadline_s": np.float32(50.0)}
    with Client(hosted.path) as client:
        for _ in range(2):
            client.run("echo", {"input": ROW}, timeout_s=20, **numbers)
    assert [task.priority for task in hosted.backend.accepted] == [3, 3]
    assert len(hosted.backend.layouts) == 1


def test_a_deadline_that_has_passed_on_arrival_expires_the_task(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        future = client.submit("echo", {"input": ROW}, deadline_s=0.0)
        with pytest.raises(TaskExpired):
            future.result(20)
    assert not hosted.backend.accepted
    assert hosted.ledger.totals["echo"].expired == 1


def test_cancel_reaches_the_engine_and_the_future(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        future = client.submit("echo", {"input": ROW})
        assert future.cancel()
        with pytest.raises(TaskCancelled):
            future.result(20)
        assert not future.cancel()
    assert hosted.ledger.totals["echo"].cancelled == 1


@pytest.mark.promise("refusal-typed-says-was")
@pytest.mark.parametrize(
    ("outcome", "code", "error"),
    [
        (Outcome.FAILED, "executor", TaskFailed),
        (Outcome.FAILED, "agent_restarted", AgentRestarted),
        (Outcome.REFUSED, "queue_full", TaskRefused),
        (Outcome.EXPIRED, "deadline", TaskExpired),
        (Outcome.CANCELLED, "plan_lost_model", TaskCancelled),
    ],
)
def test_every_end_is_a_typed_error(
    hosted: Hosted, outcome: Outcome, code: str, error: type[RefusedError]
) -> None:
    with Client(hosted.path) as client:
        future = client.submit("echo", {"input": ROW})
        eventually(lambda: hosted.backend.accepted, "the task arrives")
        task = hosted.backend.accepted[0]
        hosted.call(lambda: hosted.endpoint.task_ended(task.task, outcome, code, "the cause; the remedy"))
        with pytest.raises(error, match="the cause"):
            future.result(20)


@pytest.mark.promise("end-told-before-agent")
def test_an_end_that_an_engine_process_reported_last_is_told_again_when_it_is_gone(hosted: Hosted) -> None:
    """1. Two tasks end; the process tells the first one and dies. 2. Both futures have their results."""
    with Client(hosted.path) as client:
        futures = [client.submit("echo", {"input": np.ones((1, 4), np.float32)}) for _ in range(2)]
        eventually(lambda: len(hosted.backend.accepted) == 2, "both tasks are with the engine")
        first, last = hosted.backend.accepted
        now = time.monotonic()

        def end() -> None:
            done = TaskDone(first.task, Outcome.COMPLETED, "", "", now, now, now, told=True)
            hosted.endpoint.task_done(done)
            hosted.endpoint.pass_on(
                hosted.backend.layouts[first.layout].application,
                encode(TaskEnded(first.owner_task, "completed")),
            )
            hosted.endpoint.task_done(replace(done, task=last.task))
            hosted.endpoint.end_all(Outcome.FAILED, "agent_restarted", "the engine process ended")

        hosted.call(end)
        for future in futures:
            assert set(future.result(20.0)) == {"output"}
        assert hosted.ledger.totals["echo"].completed == 2


def test_second_end_of_a_task_changes_nothing(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        client.run("echo", {"input": ROW}, timeout_s=20)
        task = hosted.backend.accepted[0]
        hosted.call(lambda: hosted.endpoint.task_ended(task.task, Outcome.FAILED))
    assert hosted.ledger.totals["echo"].failed == 0


@pytest.mark.promise("shared-memory-could-kill")
def test_death_of_an_application_cancels_its_tasks_and_frees_its_memory(hosted: Hosted) -> None:
    client = Client(hosted.path)
    client.submit("echo", {"input": ROW})
    eventually(lambda: hosted.backend.accepted, "the task arrives")
    assert hosted.backend.arenas
    client.close()
    eventually(lambda: hosted.backend.cancelled, "its task is cancelled")
    eventually(lambda: not hosted.backend.arenas, "its arena is dropped")


def test_arena_of_a_dead_application_stays_until_its_last_task_has_ended(hosted: Hosted) -> None:
    class Slow:
        """Stands in for an engine that answers the cancellation later."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        def __call__(self, task: int) -> None:
            self.asked.append(task)

    slow = Slow()
    hosted.backend.cancel = slow  # type: ignore[method-assign]
    client = Client(hosted.path)
    client.submit("echo", {"input": ROW})
    eventually(lambda: hosted.backend.accepted, "the task arrives")
    client.close()
    eventually(lambda: slow.asked, "the engine is asked to cancel")
    assert hosted.backend.arenas
    task = hosted.backend.accepted[0]
    hosted.call(lambda: hosted.endpoint.task_ended(task.task, Outcome.CANCELLED))
    assert not hosted.backend.arenas


@pytest.mark.parametrize("limits", [ConnectionLimits(max_tasks=3)])
def test_one_application_cannot_open_more_tasks_than_its_share(hosted: Hosted) -> None:
    with Client(hosted.path) as client, Client(hosted.path) as other:
        held = [client.submit("echo", {"input": ROW}) for _ in range(3)]
        assert _refused(client.submit("echo", {"input": ROW})).code == "too_many_tasks"
        other.submit("echo", {"input": ROW})
        eventually(lambda: len(hosted.backend.accepted) == 4, "another application is not affected")
        assert not any(future.done() for future in held)


@pytest.mark.parametrize("limits", [ConnectionLimits(max_arena_bytes=1 << 20)])
def test_shared_memory_is_bounded_and_reused(hosted: Hosted) -> None:
    big = ModelSignature(
        "big", (TensorInfo("input", "uint8", (400_000,)),), (TensorInfo("output", "uint8", (4,)),)
    )
    hosted.backend.infos = {"big": big}
    data = np.zeros(400_000, dtype=np.uint8)
    with Client(hosted.path) as client:
        held = [client.submit("big", {"input": data}) for _ in range(2)]
        with pytest.raises(TaskRefused) as caught:
            client.submit("big", {"input": data})
        assert caught.value.code == "arena_full"
        eventually(lambda: len(hosted.backend.accepted) == 2, "both arrive")
        hosted.call(lambda: hosted.endpoint.end_all(Outcome.FAILED, "executor", "over"))
        for future in held:
            with pytest.raises(TaskFailed):
                future.result(20)
        held = [client.submit("big", {"input": data}) for _ in range(2)]
        eventually(lambda: len(hosted.backend.accepted) == 4, "the places are used again")
        assert len(hosted.backend.arenas) == 1


@pytest.mark.promise("shared-memory-could-kill")
@pytest.mark.parametrize("limits", [ConnectionLimits(max_unsent=8)])
def test_an_application_that_does_not_read_its_replies_stalls_only_itself(hosted: Hosted) -> None:
    hosted.backend.why_not_ready = "no plan is active"
    deaf = _raw(hosted.path)
    deaf.setblocking(False)
    connection = next(iter(hosted.endpoint._connections.values()))
    sent = 0

    def choked() -> bool:
        nonlocal sent
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.send(encode(SubmitRequest(sent, 0, 0.0)))
                sent += 1
        return connection.choked

    eventually(choked, "its replies pile up and nothing more is read from it")
    with Client(hosted.path) as client:
        assert client.models()
    answered = 0
    deaf.setblocking(True)
    deaf.settimeout(20)
    while answered < sent:
        packet, _ = channel.receive(deaf)
        answered += 1
        assert packet
    deaf.close()


def _raw(path: Path) -> socket.socket:
    sock = channel.connect(path, 20.0)
    sock.send(encode(ClientHello(1)))
    channel.receive(sock)
    return sock


def _last_word(sock: socket.socket) -> str:
    message = decode_to_application(channel.receive(sock)[0])
    assert isinstance(message, Goodbye)
    assert channel.receive(sock)[0] == b""
    sock.close()
    return message.reason


@pytest.mark.promise("shared-memory-could-kill")
@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        b"\x91" * 60_000,
        b"\x90" * 10,
        encode(DeclareLayout(0, (), (), ())),
        encode(SubmitRequest(0, 0, float("nan"))),
        encode(ClientHello(99)),
        encode(AttachArena(0, 64)),
        bytes(70_000),
    ],
)
def test_malformed_packet_ends_that_connection_with_a_reason_and_no_other(
    hosted: Hosted, packet: bytes
) -> None:
    with Client(hosted.path) as client:
        sock = _raw(hosted.path)
        sock.send(packet)
        assert _last_word(sock)
        assert client.models()


@pytest.mark.promise("shared-memory-could-kill")
def test_arena_that_could_shrink_under_the_engine_is_refused(hosted: Hosted) -> None:
    sock = _raw(hosted.path)
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    channel.send_with_descriptor(sock, encode(AttachArena(0, 4096)), descriptor)
    assert "sealed" in _last_word(sock)
    os.close(descriptor)


def test_each_engine_process_is_told_an_arena_once_though_it_was_told_before_it_was_ready(
    hosted: Hosted,
) -> None:
    """It refuses one that it knows, and the agent would say that tasks in it are refused."""
    backend = hosted.backend
    backend.echo = True
    with Client(hosted.path) as client:
        client.run("echo", {"input": ROW}, timeout_s=20)
        told = list(backend.added_arenas)
        hosted.call(hosted.endpoint.engine_ready)
        assert told and backend.added_arenas == told
        backend.life += 1
        hosted.call(hosted.endpoint.engine_ready)
        assert backend.added_arenas == told * 2


def test_an_arena_in_huge_pages_is_refused(hosted: Hosted) -> None:
    try:
        descriptor = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    size = os.fstatvfs(descriptor).f_bsize
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    sock = _raw(hosted.path)
    channel.send_with_descriptor(sock, encode(AttachArena(0, size)), descriptor)
    assert "huge pages" in _last_word(sock)
    os.close(descriptor)


def test_descriptor_that_is_no_memory_file_is_refused(hosted: Hosted) -> None:
    sock = _raw(hosted.path)
    with open("/dev/null", "rb") as other:
        channel.send_with_descriptor(sock, encode(AttachArena(0, 4096)), other.fileno())
    assert "memory file" in _last_word(sock)


@pytest.mark.promise("trace-goes-memory-file")
def test_a_received_socket_that_lingers_is_closed_without_waiting_for_its_reader() -> None:
    """1. An application passes a socket whose data nobody reads, and ends. 2. The agent has the last copy."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    reader, _ = listener.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    sender.setblocking(True)
    others = set(threading.enumerate())  # endpoints of other tests may still close what they received
    close_received([sender.detach()])
    closing = [thread for thread in threading.enumerate() if thread.name == "close" and thread not in others]
    assert len(closing) == 1, "a thread waits instead of this one"
    reader.close()  # unread data resets the connection
    closing[0].join(60)
    assert not closing[0].is_alive()
    listener.close()


def test_a_trace_into_anything_but_a_memory_file_is_refused_by_what_to_do(hosted: Hosted) -> None:
    with _raw(hosted.path) as sock, open("/dev/null", "wb") as other:
        channel.send_with_descriptor(sock, encode(TraceRequest(3, 1.0)), other.fileno())
        answer = decode_to_application(channel.receive(sock)[0])
    assert isinstance(answer, TraceWritten) and answer.request == 3
    assert "make one with memfd_create" in answer.reason


def test_tensor_outside_its_arena_is_refused(hosted: Hosted) -> None:
    sock = _raw(hosted.path)
    ref = InputRef("input", 0, 1 << 40, "float32", (1, 4))
    sock.send(encode(DeclareLayout(0, ("echo",), (ref,), ())))
    sock.send(encode(SubmitRequest(0, 0, 0.0)))
    answer = decode_to_application(channel.receive(sock)[0])
    assert getattr(answer, "outcome", "") == "refused"
    sock.close()


def test_task_in_a_layout_that_was_never_declared_is_refused(hosted: Hosted) -> None:
    sock = _raw(hosted.path)
    sock.send(encode(SubmitRequest(0, 7, 0.0)))
    answer = decode_to_application(channel.receive(sock)[0])
    assert isinstance(answer, TaskEnded)
    assert (answer.outcome, answer.code) == ("refused", "bad_reference")
    sock.close()


@pytest.mark.parametrize("limits", [ConnectionLimits(max_layouts=2)])
def test_layouts_of_one_application_are_bounded(hosted: Hosted) -> None:
    sock = _raw(hosted.path)
    for number in (0, 1, 1, 2):  # declaring a number again replaces it
        sock.send(encode(DeclareLayout(number, ("echo",), (), ())))
    assert "more than 2 layouts" in _last_word(sock)


@pytest.mark.promise("tasks-kind-take-turns")
def test_tasks_of_one_kind_take_turns_in_one_layout(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        for _ in range(20):
            client.run("echo", {"input": ROW}, timeout_s=20)
        assert len({task.layout for task in hosted.backend.accepted}) == 1
    eventually(lambda: hosted.backend.dropped_layouts, "it goes with the connection")


@pytest.mark.promise("tasks-kind-take-turns")
def test_tasks_open_at_once_lie_in_different_places(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        for _ in range(3):
            client.submit("echo", {"input": ROW})
        eventually(lambda: len(hosted.backend.accepted) == 3, "they arrive")
        layouts = [hosted.backend.layouts[task.layout] for task in hosted.backend.accepted]
        places = [place for layout in layouts for place in (*layout.inputs, *layout.outputs)]
        assert len({(arena, offset) for _, arena, offset in places}) == 6


def _byte_models(**sizes: int) -> dict[str, ModelSignature]:
    """Models by name that take so many bytes and give 16."""
    return {
        name: ModelSignature(
            name, (TensorInfo("input", "uint8", (nbytes,)),), (TensorInfo("output", "uint8", (16,)),)
        )
        for name, nbytes in sizes.items()
    }


@pytest.mark.parametrize("limits", [ConnectionLimits(max_arena_bytes=1 << 20)])
def test_places_of_another_kind_of_task_are_given_up_when_memory_is_short(hosted: Hosted) -> None:
    hosted.backend.infos = _byte_models(one=700_000, other=600_000)
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        for name, nbytes in (("one", 700_000), ("other", 600_000), ("one", 700_000)):
            client.run(name, {"input": np.zeros(nbytes, np.uint8)}, timeout_s=20)
    assert len({task.layout for task in hosted.backend.accepted}) == 3


@pytest.mark.parametrize("limits", [ConnectionLimits(max_arena_bytes=4 << 20, max_arenas=4)])
def test_arenas_that_smaller_tasks_have_used_up_make_room_for_a_larger_one(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Small tasks use up all arenas; all end but one. 2. A task larger than an arena runs beside it."""
    monkeypatch.setattr(client_memory, "_ARENA_BYTES", 1 << 20)
    hosted.backend.infos = _byte_models(small=600_000, large=2_500_000)
    large = {"input": np.full(2_500_000, 9, np.uint8)}

    def complete(tasks: list[RunTask]) -> None:
        for task in tasks:
            hosted.backend.complete(task)

    with Client(hosted.path) as client:
        held = [client.submit("small", {"input": np.full(600_000, i, np.uint8)}) for i in range(4)]
        eventually(lambda: len(hosted.backend.accepted) == 4, "each has an arena")
        first, *others = hosted.backend.accepted
        with pytest.raises(TaskRefused, match="beside the tasks that have not ended"):
            client.submit("large", large)
        hosted.call(lambda: complete(others))
        for future in held[1:]:
            future.result(20)
        hosted.backend.echo = True
        assert client.run("large", large, timeout_s=20)["output"].tolist() == [9] * 16
        assert len(hosted.backend.arenas) == 2
        hosted.call(lambda: complete([first]))
        assert held[0].result(20)["output"].tolist() == [0] * 16


def test_an_arena_is_detached_after_its_layouts_and_before_another_takes_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_memory, "_ARENA_BYTES", 1 << 20)
    sent: list[ToAgent] = []
    pool = LayoutPool(ArenaPool(2 << 20, 2), lambda message, descriptor: sent.append(message))

    def make(name: str, nbytes: int) -> TaskLayout:
        kind = kind_of((name,), {"input": np.zeros(nbytes, np.uint8)})
        return pool.make(kind, tuple(_byte_models(**{name: nbytes}).values()))

    for layout in [make("small", 600_000) for _ in range(2)]:
        pool.give_back(layout)
    make("large", 1_500_000)
    assert [(type(message), getattr(message, "arena", None)) for message in sent] == [
        *[(AttachArena, 0), (DeclareLayout, None), (AttachArena, 1), (DeclareLayout, None)],
        *[(RetractLayout, None), (RetractLayout, None), (DetachArena, 0), (DetachArena, 1)],
        *[(AttachArena, 2), (DeclareLayout, None)],
    ]
    pool.close()


def test_wrong_tasks_leave_nothing_behind(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        for size in range(5, 25):
            _refused(client.submit("echo", {"input": np.zeros((1, size), np.float32)}))
        (connection,) = hosted.endpoint._connections.values()
        eventually(lambda: connection.last_task == 19 and not connection.layouts, "layouts are retracted")
    assert not hosted.backend.layouts


def test_model_whose_outputs_changed_is_asked_for_again(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        client.run("echo", {"input": ROW}, timeout_s=20)
        renamed = ModelSignature(
            "echo", hosted.backend.infos["echo"].inputs, (TensorInfo("new", "float32", (1, 4)),)
        )
        hosted.backend.infos = {"echo": renamed}
        assert _refused(client.submit("echo", {"input": ROW})).code == "signature_changed"
        assert np.array_equal(client.run("echo", {"input": ROW}, timeout_s=20)["new"], ROW)


@pytest.mark.parametrize(
    "changed", [TensorInfo("output", "float32", (4, 1)), TensorInfo("output", "int32", (1, 4))]
)
def test_output_that_changed_in_type_or_shape_but_not_in_size_is_asked_for_again(
    hosted: Hosted, changed: TensorInfo
) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        client.run("echo", {"input": ROW}, timeout_s=20)
        hosted.backend.infos = {"echo": ModelSignature("echo", ECHO.inputs, (changed,), version=2)}
        assert _refused(client.submit("echo", {"input": ROW})).code == "signature_changed"
        made = client.run("echo", {"input": ROW}, timeout_s=20)["output"]
        assert (made.dtype.name, made.shape, made.tobytes()) == (changed.dtype, changed.shape, ROW.tobytes())


@pytest.mark.parametrize(
    ("code", "inputs", "corrected"),
    [
        ("wrong_shape", (TensorInfo("input", "float32", (1, 8)),), {"input": np.ones((1, 8), np.float32)}),
        ("wrong_dtype", (TensorInfo("input", "int32", (1, 4)),), {"input": ROW.astype(np.int32)}),
        ("wrong_input", (TensorInfo("given", "float32", (1, 4)),), {"given": ROW}),
    ],
)
def test_after_the_first_refusal_by_a_new_plan_a_corrected_task_runs(
    hosted: Hosted, code: str, inputs: tuple[TensorInfo, ...], corrected: dict[str, Any]
) -> None:
    hosted.backend.echo = True
    changed = ModelSignature("echo", inputs, (TensorInfo("new", "float32", (1, 4)),))
    with Client(hosted.path) as client:
        client.run("echo", {"input": ROW}, timeout_s=20)
        hosted.backend.infos = {"echo": changed}
        assert _refused(client.submit("echo", {"input": ROW})).code == code
        assert set(client.run("echo", corrected, timeout_s=20)) == {"new"}


@pytest.mark.parametrize("code", ["model_changed", "model_removed"])
def test_a_task_that_a_new_plan_sends_back_can_be_submitted_again_at_once(hosted: Hosted, code: str) -> None:
    with Client(hosted.path) as client:
        queued = client.submit("echo", {"input": ROW})
        eventually(lambda: hosted.backend.accepted, "it waits in the queue")
        hosted.backend.echo = True
        renamed = ModelSignature("echo", ECHO.inputs, (TensorInfo("new", "float32", (1, 4)),))
        hosted.backend.infos = {"echo": renamed}
        task = hosted.backend.accepted[0]
        hosted.call(lambda: hosted.endpoint.task_ended(task.task, Outcome.REFUSED, code, "a new plan"))
        assert _refused(queued).code == code
        assert np.array_equal(client.run("echo", {"input": ROW}, timeout_s=20)["new"], ROW)


def test_wrong_tasks_leave_the_layouts_of_right_ones(hosted: Hosted) -> None:
    hosted.backend.echo = True
    with Client(hosted.path) as client:
        for _ in range(3):
            client.run("echo", {"input": ROW}, timeout_s=20)
            _refused(client.submit("echo", {"input": ROW[0]}))
    assert len({task.layout for task in hosted.backend.accepted}) == 1


def test_outputs_of_an_application_that_names_no_types_are_held_to_their_sizes() -> None:
    """As applications did of versions before their types and shapes were compared."""

    def check(nbytes: int) -> None:
        source, target = InputRef("input", 0, 0, "float32", (1, 4)), OutputRef(0, "output", 0, 64, nbytes)
        check_layout(DeclareLayout(0, ("echo",), (source,), (target,)), {"echo": ECHO}, {0: 128})

    check(16)
    with pytest.raises(TaskRefused, match="are not those named"):
        check(32)


def test_tasks_that_a_new_plan_refuses_can_be_submitted_again_by_their_callbacks(hosted: Hosted) -> None:
    """Callbacks run in the thread that reads replies, which reads the models by itself, one at a time."""
    count = 20
    again: queue.SimpleQueue[TaskFuture | Exception] = queue.SimpleQueue()
    within: list[None] = []
    depths: list[int] = []
    with Client(hosted.path) as client:
        held = [client.submit("echo", {"input": ROW}) for _ in range(count)]
        eventually(lambda: len(hosted.backend.accepted) == count, "each has a layout of its own")
        hosted.call(lambda: hosted.endpoint.end_all(Outcome.FAILED, "executor", "over"))
        for future in held:
            assert future.exception(20)

        def submit_again(future: Future[Any]) -> None:
            assert isinstance(future.exception(), TaskRefused)
            within.append(None)
            depths.append(len(within))
            try:
                again.put(client.submit("echo", {"input": ROW}))
            except Exception as error:
                again.put(error)
            within.pop()

        def submit_all() -> None:  # in the endpoint's thread: it refuses none before its callback is known
            for _ in range(count):
                client.submit("echo", {"input": ROW}).add_done_callback(submit_again)

        hosted.backend.echo = True
        changed = (TensorInfo("new", "float32", (1, 4)),)
        hosted.backend.infos = {"echo": ModelSignature("echo", hosted.backend.infos["echo"].inputs, changed)}
        hosted.call(submit_all)
        for _ in range(count):
            one = again.get(timeout=20)
            assert isinstance(one, TaskFuture), one
            assert np.array_equal(one.result(20)["new"], ROW)
    assert depths == [1] * count


def test_callback_that_asks_an_agent_that_goes_is_told_so_at_once(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn_away() -> Any:
        raise TaskRefused("gone", "it restarts")

    told: Future[Any] = Future()

    def ask(_: Future[Any]) -> None:
        try:
            told.set_result(client.models())
        except UnavailableError as error:
            told.set_exception(error)

    with Client(hosted.path) as client:
        future = client.submit("echo", {"input": ROW})
        future.add_done_callback(ask)
        eventually(lambda: hosted.backend.accepted, "the task arrives")
        monkeypatch.setattr(hosted.backend, "models", turn_away)
        hosted.call(lambda: hosted.endpoint.end_all(Outcome.FAILED, "executor", "over"))
        with pytest.raises(UnavailableError, match="the agent is gone: it restarts"):
            told.result(20)
        with pytest.raises(TaskFailed):
            future.result(20)


def _row_models(**columns: int) -> dict[str, ModelSignature]:
    """Models by name that take and give one row of so many columns."""
    return {
        name: ModelSignature(
            name, (TensorInfo("input", "float32", (1, n)),), (TensorInfo("output", "float32", (1, n)),)
        )
        for name, n in columns.items()
    }


def test_model_that_a_new_plan_serves_in_several_shapes_is_asked_for_again(hosted: Hosted) -> None:
    hosted.backend.echo = True
    hosted.backend.infos = _row_models(rec=4)
    with Client(hosted.path) as client:
        client.run("rec", {"input": ROW}, timeout_s=20)
        hosted.backend.infos = _row_models(**{"rec--1x4": 4, "rec--1x8": 8})
        assert _refused(client.submit("rec", {"input": ROW})).code == "unknown_model"
        assert np.array_equal(client.run("rec", {"input": ROW}, timeout_s=20)["output"], ROW)


def test_shape_that_a_new_plan_adds_is_run_without_a_refusal(hosted: Hosted) -> None:
    hosted.backend.echo = True
    hosted.backend.infos = _row_models(**{"rec--1x2": 2, "rec--1x8": 8})
    with Client(hosted.path) as client:
        with pytest.raises(TaskRefused, match="'rec' does not take input 1x4"):
            client.submit("rec", {"input": ROW})
        hosted.backend.infos |= _row_models(**{"rec--1x4": 4})
        assert np.array_equal(client.run("rec", {"input": ROW}, timeout_s=20)["output"], ROW)


def test_a_refusal_costs_one_question_for_the_models(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted.backend.infos = _row_models(**{"rec--1x2": 2, "rec--1x8": 8})
    asked: list[bool] = []
    models = hosted.backend.models

    def counted() -> Any:
        asked.append(True)
        return models()

    monkeypatch.setattr(hosted.backend, "models", counted)
    with Client(hosted.path) as client:
        for number, (model, code) in enumerate([("rec", "wrong_shape"), ("none", "unknown_model")] * 3, 1):
            with pytest.raises(TaskRefused) as caught:
                client.submit(model, {"input": ROW})
            assert (caught.value.code, len(asked)) == (code, number)


def _full_queue(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """Somebody who listens there and takes nothing, and the connections that fill its queue."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(0)
    waiting: list[socket.socket] = []
    with contextlib.suppress(UnavailableError):
        while True:
            waiting.append(channel.connect(path, 0.0))
    return listener, waiting


def test_a_connection_waits_until_an_agent_with_a_full_queue_takes_others(tmp_path: Path) -> None:
    listener, opened = _full_queue(tmp_path / "agent.sock")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            opened.append(listener.accept()[0])

    opened.append(channel.connect(tmp_path / "agent.sock", 1.0, wait))
    assert len(waits) == 3
    for one in (listener, *opened):
        one.close()


def test_an_agent_whose_queue_stays_full_is_told_from_one_that_does_not_run(tmp_path: Path) -> None:
    listener, opened = _full_queue(tmp_path / "agent.sock")
    waits: list[float] = []
    with pytest.raises(UnavailableError, match=r"takes no connection now.*full for 0\.05 s.*try again"):
        channel.connect(tmp_path / "agent.sock", 0.05, waits.append)
    assert sum(waits) == pytest.approx(0.05)
    for one in (listener, *opened):
        one.close()


def test_restart_of_the_agent_answers_open_tasks_once_and_the_next_call_reconnects(tmp_path: Path) -> None:
    first = Hosted(tmp_path / "run", ConnectionLimits())
    with Client(first.path) as client:
        future: Future[Any] = client.submit("echo", {"input": ROW})
        eventually(lambda: first.backend.accepted, "the task arrives")
        first.close()
        with pytest.raises(AgentRestarted):
            future.result(20)
        with pytest.raises(UnavailableError, match="stageloom-agent run"):
            client.submit("echo", {"input": ROW})
        second = Hosted(tmp_path / "run", ConnectionLimits())
        second.backend.echo = True
        assert np.array_equal(client.run("echo", {"input": ROW}, timeout_s=20)["output"], ROW)
        assert len(second.backend.accepted) == 1
    second.close()


def test_tasks_of_callbacks_for_an_agent_that_takes_nothing_end_within_the_timeout(hosted: Hosted) -> None:
    """1. Tasks end, and the agent stands still. 2. Their callbacks submit more than the socket takes."""
    count, more = 50, 20
    again: queue.SimpleQueue[TaskFuture] = queue.SimpleQueue()

    def submit_more(_: Future[Any]) -> None:
        for _number in range(more):
            again.put(client.submit("echo", {"input": ROW}))

    def end() -> None:
        hosted.endpoint.end_all(Outcome.FAILED, "executor", "over")
        goes_on.wait(20)

    goes_on = threading.Event()
    with Client(hosted.path, timeout_s=0.2) as client:
        for _ in range(count):
            client.submit("echo", {"input": ROW}).add_done_callback(submit_more)
        eventually(lambda: len(hosted.backend.accepted) == count, "all tasks arrive")
        agent = threading.Thread(target=hosted.call, args=(end,))
        agent.start()
        try:
            for _ in range(count * more):
                with pytest.raises(AgentRestarted, match=r"taken nothing for 0\.2 s"):
                    again.get(timeout=20).result(20)
        finally:
            goes_on.set()
            agent.join(20)


@contextlib.contextmanager
def _standing_still(hosted: Hosted) -> Iterator[None]:
    """The agent takes nothing and answers nothing."""
    still, goes_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        still.set()
        goes_on.wait(20)

    agent = threading.Thread(target=hosted.call, args=(stand_still,))
    agent.start()
    assert still.wait(20)
    try:
        yield
    finally:
        goes_on.set()
        agent.join(20)


def test_an_agent_that_takes_nothing_is_an_error_within_the_timeout(hosted: Hosted) -> None:
    with Client(hosted.path, timeout_s=0.2) as client:
        first = client.submit("echo", {"input": ROW})
        eventually(lambda: hosted.backend.accepted, "the task arrives")
        with _standing_still(hosted):
            told = _error_of_submitting(client, count=1000)
            assert isinstance(told, UnavailableError)
            assert told.cause == "the agent is gone: it has taken nothing for 0.2 s"
            assert "look at its log" in told.remedy
            with pytest.raises(AgentRestarted, match=r"taken nothing for 0\.2 s"):
                first.result(20)


def test_callbacks_that_submit_into_a_full_socket_do_not_keep_replies_from_being_read(hosted: Hosted) -> None:
    """1. More tasks end at once than the socket takes replies. 2. The agent reads no more until they left.

    3. Each one's callback submits the next task, and the socket does not take all of those.
    """
    count = 1000
    again: queue.SimpleQueue[TaskFuture | Exception] = queue.SimpleQueue()

    def submit_again(_: Future[Any]) -> None:
        try:
            again.put(client.submit("echo", {"input": ROW}))
        except Exception as error:
            again.put(error)

    with Client(hosted.path) as client:
        for _ in range(count):
            client.submit("echo", {"input": ROW}).add_done_callback(submit_again)
        eventually(lambda: len(hosted.backend.accepted) == count, "all tasks arrive")
        hosted.backend.echo = True
        hosted.call(lambda: hosted.endpoint.end_all(Outcome.FAILED, "executor", "over"))
        for _ in range(count):
            one = again.get(timeout=20)
            assert isinstance(one, TaskFuture), one
            assert np.array_equal(one.result(20)["output"], ROW)


class _Broken:
    """A session's socket through which nothing can be sent any more."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.descriptors: list[int] = []

    def send(self, *_: Any) -> int:
        raise BrokenPipeError("broken pipe")

    def sendmsg(self, buffers: Any, ancillary: Any, *_: Any) -> int:
        self.descriptors += channel.descriptors_in(
            (level, kind, bytes(data)) for level, kind, data in ancillary
        )
        raise BrokenPipeError("broken pipe")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _break(client: Client) -> _Broken:
    session: Any = client._session
    broken = session._outbox._sock = _Broken(session._sock)
    return broken


def _error_of_submitting(client: Client, count: int = 1) -> BaseException | None:
    """In a thread, so that one that stands still fails the test; the first that one of `count` tasks has."""
    told: Future[Any] = Future()

    def submit() -> None:
        try:
            for _ in range(count):
                client.submit("echo", {"input": ROW})
            told.set_result(None)
        except Exception as error:
            told.set_exception(error)

    threading.Thread(target=submit, daemon=True).start()
    return told.exception(20)


def test_first_task_for_an_agent_that_has_gone_is_an_error_and_leaves_no_descriptor(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        client.models()
        broken = _break(client)
        assert isinstance(_error_of_submitting(client), UnavailableError)
        (descriptor,) = broken.descriptors
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_callbacks_of_tasks_whose_agent_has_gone_may_cancel_others(hosted: Hosted) -> None:
    with Client(hosted.path) as client:
        held = [client.submit("echo", {"input": ROW}) for _ in range(3)]
        held[0].add_done_callback(lambda _: held[1].cancel())
        _break(client)
        assert isinstance(_error_of_submitting(client), UnavailableError)
        for future in held:
            assert isinstance(future.exception(20), AgentRestarted)


def test_socket_works_below_a_path_longer_than_an_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100) / "run"
    host = Hosted(deep, ConnectionLimits())
    host.backend.echo = True
    with Client(host.path) as client:
        assert client.run("echo", {"input": ROW}, timeout_s=20)
    host.close()


def test_no_agent_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="start one with `stageloom-agent run`"):
        Client(tmp_path / "absent.sock")
