"""The library that applications import: submit tasks to the agent of this machine.

    from edge_agent import Client

    with Client() as client:
        future = client.submit("resnet50", {"input": array}, deadline_s=0.5)
        outputs = future.result(timeout=5.0)  # {"output": array}

A client may be used from any number of threads. Tensors travel through shared memory: `submit` copies the
inputs there and returns; results are copies that belong to the caller. A task runs at most once: when the
engine or the agent restarts, its future raises `AgentRestarted` and nothing is sent again by itself. After a
restart of the agent the next call connects again.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from edge_agent.ingest import channel
from edge_agent.ingest.arena import ArenaPool, ClientArena, Reservation
from edge_agent.ingest.messages import (
    PROTOCOL_VERSION,
    AttachArena,
    Cancel,
    Ended,
    Goodbye,
    Hello,
    InputRef,
    ListModels,
    ModelInfo,
    Models,
    OutputRef,
    Submit,
    TensorInfo,
    ToApplication,
    Welcome,
    decode_to_application,
    encode,
)
from edge_agent.ingest.paths import default_socket
from edge_agent.ingest.signature import tensor_bytes
from shared.errors import (
    AgentRestarted,
    DecodeError,
    RefusedError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRefused,
    UnavailableError,
)

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Outputs: TypeAlias = dict[str, Array]


class TaskFuture(Future[Any]):
    """A task's result to come: outputs by tensor name, for a shared task by model and then by tensor name.

    `result` raises `TaskRefused`, `TaskExpired`, `TaskCancelled`, `TaskFailed`, `AgentRestarted`, or
    `TimeoutError` if the time given to it runs out first. `received_at_s` and `queued_at_s` are, once it is
    done, the instants (CLOCK_MONOTONIC) when the agent read the task and when the engine queued it.
    """

    def __init__(self, session: "_Session", task: int) -> None:
        super().__init__()
        self._session = session
        self._task = task
        self.received_at_s = 0.0
        self.queued_at_s = 0.0

    def cancel(self) -> bool:
        """Ask the agent to drop the task; False if it has ended. `result` then raises `TaskCancelled`."""
        if self.done():
            return False
        self._session.cancel(self._task)
        return True


@dataclass(slots=True)
class _Pending:
    """What is needed to answer one task."""

    future: TaskFuture
    reservation: Reservation
    models: tuple[ModelInfo, ...]
    outputs: tuple[tuple[int, TensorInfo, int], ...]  # model, tensor, offset


class Client:
    """A connection to the agent of this machine.

    Args:
        path: the agent's socket; default `$STAGELOOM_AGENT_SOCKET`, else `run/agent.sock` in its home.
        timeout_s: how long connecting, asking and handing over may take before `UnavailableError`.

    Raises:
        UnavailableError: no agent answers.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 5.0) -> None:
        self._path = Path(path) if path is not None else default_socket()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._session: _Session | None = _Session(self._path, timeout_s)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended and disconnect."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def models(self) -> dict[str, ModelInfo]:
        """What can be run now, by name."""
        return self._live().fetch_models()

    def submit(
        self,
        model: str | Sequence[str],
        inputs: Mapping[str, Array],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> TaskFuture:
        """Hand a task over; several model names share one input and make one task.

        Args:
            inputs: arrays by tensor name, with exactly the model's type and shape.
            deadline_s: seconds from now after which the result is worthless (`TaskExpired`).
            priority: higher runs earlier where the plan's queue rule says so.

        Raises:
            TaskRefused: it does not fit into shared memory, or no such model is known to the agent.
            UnavailableError: the agent is gone and does not come back within the timeout.
        """
        sent_at_s = time.monotonic()
        names = (model,) if isinstance(model, str) else tuple(model)
        return self._live().submit(names, inputs, sent_at_s, deadline_s, priority)

    def run(
        self,
        model: str | Sequence[str],
        inputs: Mapping[str, Array],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """`submit` and wait."""
        return self.submit(model, inputs, deadline_s=deadline_s, priority=priority).result(timeout_s)

    def _live(self) -> "_Session":
        with self._lock:
            if self._closed:
                raise UnavailableError("this client is closed", remedy="make a new one")
            if self._session is None or self._session.gone:
                self._session = _Session(self._path, self._timeout_s)
            return self._session


class _Session:
    """One life of a connection: a socket, its arenas, a thread that reads replies."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock = channel.connect(path, timeout_s)
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._tasks = itertools.count()
        self._requests = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._answers: dict[int, Future[Models]] = {}
        self._infos: dict[str, ModelInfo] = {}
        self.gone = False
        self._goodbye = ""
        self._arenas = self._greet(path)
        self._reader = threading.Thread(target=self._read, name="stageloom-client", daemon=True)
        self._reader.start()

    def _greet(self, path: Path) -> ArenaPool:
        try:
            self._sock.send(encode(Hello(PROTOCOL_VERSION)))
            packet, _ = channel.receive(self._sock)
            answer = decode_to_application(packet)
        except (OSError, DecodeError) as error:
            self._sock.close()
            raise UnavailableError(f"the agent at {path} does not answer: {error}") from error
        if not isinstance(answer, Welcome):
            self._sock.close()
            reason = answer.reason if isinstance(answer, Goodbye) else "an unexpected answer"
            raise UnavailableError(f"the agent at {path} turned this application away: {reason}")
        return ArenaPool(answer.max_arena_bytes, answer.max_arenas)

    def fetch_models(self) -> dict[str, ModelInfo]:
        """Ask for all models, page by page."""
        found: dict[str, ModelInfo] = {}
        more = True
        while more:
            request = next(self._requests)
            answer: Future[Models] = Future()
            with self._lock:
                self._check_alive()
                self._answers[request] = answer
            self._send(encode(ListModels(request, len(found))))
            try:
                part = answer.result(self._timeout_s)
            except TimeoutError as error:
                raise UnavailableError(f"the agent did not answer within {self._timeout_s} s") from error
            found.update((info.name, info) for info in part.models)
            more = part.more and bool(part.models)
        self._infos = found
        return found

    def submit(
        self,
        names: tuple[str, ...],
        inputs: Mapping[str, Array],
        sent_at_s: float,
        deadline_s: float | None,
        priority: int,
    ) -> TaskFuture:
        """See `Client.submit`."""
        infos = self._known(names)
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        outputs = [(index, tensor) for index, info in enumerate(infos) for tensor in info.outputs]
        reservation = self._arenas.reserve(
            [array.nbytes for array in arrays.values()]
            + [tensor_bytes(t.dtype, t.shape) for _, t in outputs],
            self._announce,
        )
        try:
            refs = [
                _place(reservation, offset, name, array)
                for (name, array), offset in zip(arrays.items(), reservation.offsets, strict=False)
            ]
        except BaseException:
            self._arenas.release(reservation)
            raise
        arena = reservation.arena.number
        places = tuple(
            (index, tensor, offset)
            for (index, tensor), offset in zip(outputs, reservation.offsets[len(arrays) :], strict=True)
        )
        with self._send_lock:  # task numbers must reach the agent in rising order
            task = next(self._tasks)
            future = TaskFuture(self, task)
            packet = encode(
                Submit(
                    task,
                    names,
                    tuple(refs),
                    tuple(
                        OutputRef(i, t.name, arena, o, tensor_bytes(t.dtype, t.shape)) for i, t, o in places
                    ),
                    sent_at_s,
                    priority,
                    deadline_s,
                )
            )
            with self._lock:
                self._check_alive()
                self._pending[task] = _Pending(future, reservation, infos, places)
            self._send_locked(packet, None)
        return future

    def _known(self, names: tuple[str, ...]) -> tuple[ModelInfo, ...]:
        if any(name not in self._infos for name in names):
            self.fetch_models()
        try:
            return tuple(self._infos[name] for name in names)
        except KeyError as error:
            have = ", ".join(sorted(self._infos)[:8]) or "none"
            raise TaskRefused(
                "unknown_model",
                f"no model {error.args[0]!r} runs here",
                remedy=f"models of the active plan: {have}",
            ) from None

    def _announce(self, arena: ClientArena) -> None:
        self._send(encode(AttachArena(arena.number, arena.nbytes)), descriptor=arena.descriptor)

    def cancel(self, task: int) -> None:
        """Tell the agent; whatever ends the task answers its future."""
        with contextlib.suppress(UnavailableError):  # then the future has been answered already
            self._send(encode(Cancel(task)))

    def _send(self, packet: bytes, descriptor: int | None = None) -> None:
        with self._send_lock:
            self._send_locked(packet, descriptor)

    def _send_locked(self, packet: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                self._sock.send(packet, socket.MSG_NOSIGNAL)
            else:
                channel.send_with_descriptor(self._sock, packet, descriptor)
        except OSError as error:
            self._end(str(error))
            raise UnavailableError(f"the agent is gone: {error}", remedy="submit again") from error

    def _check_alive(self) -> None:
        if self.gone:
            raise UnavailableError(f"the agent is gone: {self._goodbye or 'the connection ended'}")

    def _read(self) -> None:
        self._sock.settimeout(None)
        while True:
            try:
                packet, _ = channel.receive(self._sock)
                if not packet:
                    break
                self._take(decode_to_application(packet))
            except (OSError, DecodeError) as error:
                self._goodbye = self._goodbye or str(error)
                break
        self._end(self._goodbye)
        with self._send_lock:  # nobody is sending through the descriptor while it is closed
            self._sock.close()

    def _take(self, message: ToApplication) -> None:
        match message:
            case Ended():
                with self._lock:
                    pending = self._pending.pop(message.task, None)
                if pending is not None:
                    self._finish(pending, message)
            case Models():
                with self._lock:
                    answer = self._answers.pop(message.request, None)
                if answer is not None:
                    answer.set_result(message)
            case Goodbye():
                self._goodbye = message.reason

    def _finish(self, pending: _Pending, ended: Ended) -> None:
        future = pending.future
        future.received_at_s, future.queued_at_s = ended.received_at_s, ended.queued_at_s
        try:
            if ended.outcome == "completed":
                outputs = _outputs(pending)
                self._arenas.release(pending.reservation)
                future.set_result(outputs)
                return
            self._arenas.release(pending.reservation)
            if ended.code == "signature_changed":
                self._infos = {}  # the plan has changed: ask again before the next task
            future.set_exception(_error_of(ended))
        except Exception as error:  # a result that cannot be read must not end the reader
            future.set_exception(error)

    def _end(self, why: str) -> None:
        """The connection is over: everything still open is answered, once."""
        with self._lock:
            if self.gone:
                return
            self.gone = True
            self._goodbye = self._goodbye or why
            pending, self._pending = self._pending, {}
            answers, self._answers = self._answers, {}
        for open_task in pending.values():
            open_task.future.set_exception(
                AgentRestarted(
                    f"the agent went away: {self._goodbye or 'the connection ended'}",
                    remedy="the task may have run; submit it again if wanted",
                )
            )
        for answer in answers.values():
            answer.set_exception(UnavailableError("the agent went away", remedy="try again"))
        self._arenas.close()

    def close(self) -> None:
        """Leave; open tasks raise `TaskCancelled`."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for open_task in pending.values():
            open_task.future.set_exception(TaskCancelled("the client was closed"))
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was gone already
        if threading.current_thread() is not self._reader:
            self._reader.join(self._timeout_s)


def _place(reservation: Reservation, offset: int, name: str, array: Array) -> InputRef:
    """Copy an input to its place in shared memory."""
    if array.dtype.hasobject or array.dtype.kind not in "fiub" + "V":
        raise TaskRefused(
            "wrong_dtype",
            f"input {name!r} has the type {array.dtype}, which no model takes",
            remedy="give numbers or booleans, of the type that `models()` names",
        )
    native = array.dtype.newbyteorder("=")
    view: Array = np.frombuffer(
        reservation.arena.memory, dtype=native, count=array.size, offset=offset
    ).reshape(array.shape)
    np.copyto(view, array)
    return InputRef(name, reservation.arena.number, offset, native.name, tuple(array.shape))


def _outputs(pending: _Pending) -> Outputs | dict[str, Outputs]:
    """Copies of the outputs, so that the places can be used again."""
    by_model: list[Outputs] = [{} for _ in pending.models]
    for index, tensor, offset in pending.outputs:
        dtype = _numpy_dtype(tensor.dtype)
        count = 1
        for dim in tensor.shape:
            count *= dim
        view: Array = np.frombuffer(
            pending.reservation.arena.memory, dtype=dtype, count=count, offset=offset
        ).reshape(tensor.shape)
        by_model[index][tensor.name] = view.copy()
    if len(pending.models) == 1:
        return by_model[0]
    return {info.name: outputs for info, outputs in zip(pending.models, by_model, strict=True)}


def _numpy_dtype(name: str) -> "np.dtype[Any]":
    """numpy has no bfloat16 of its own: without a package that adds one, its bits come as uint16."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(np.uint16)


def _error_of(ended: Ended) -> RefusedError:
    cause, _, remedy = ended.reason.partition("; ")
    if ended.code == "agent_restarted":
        return AgentRestarted(cause, remedy=remedy)
    match ended.outcome:
        case "refused":
            return TaskRefused(ended.code, cause, remedy=remedy)
        case "expired":
            return TaskExpired(cause or "the deadline passed before the result")
        case "cancelled":
            return TaskCancelled(cause or "cancelled by its owner")
        case _:
            return TaskFailed(cause or "the executor failed", remedy=remedy)
