"""Frames that mean harm, from an enrolled device into a planner on either database."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgpack
import pytest

from stageloom.planner.api import routes
from stageloom.planner.schema.device import DeviceReleaseRequest
from stageloom.planner.schema.service import WatchRequest
from stageloom.shared.codec import PLAIN, pack_body
from stageloom.shared.messages import control
from stageloom.shared.messages.base import RefusalCode, Refused
from tests.adversary.rig import CODECS, Device, Rig
from tests.link.samples import MESSAGES
from tests.link.test_codec import CORPUS
from tests.link.test_messages import _types

pytestmark = pytest.mark.more

FRAMES = 400
"""A lane."""

BETWEEN = 5
"""A planner drops what it has to say to a device that does not read."""

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**53,
        2**53 + 1,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        float("nan"),
        float("inf"),
        5e-324,
    ),
    *(
        "",
        "a\x00c",
        "\x00",
        "x" * 4096,
        "\ud7ff\u202e",
        b"",
        b"\x00" * 4096,
        [],
        [[]] * 64,
        {},
        {"type": "hello"},
    ),
)
"""What takes a field's place."""


def sendable(lane: str) -> list[Any]:
    """A message of each kind that devices send there."""
    return [message for message in MESSAGES if type(message) in _types(CODECS[lane][0].types)]


def harmful(lane: str, rng: Random) -> Iterator[bytes]:
    """The corpus, then real messages with something replaced, flipped or cut off."""
    for path in sorted(CORPUS.glob("*.hex")):
        yield bytes.fromhex(path.read_text())
    codec, known = CODECS[lane][0], sendable(lane)
    for _ in range(FRAMES):
        fields = msgpack.unpackb(codec.encode_body(rng.choice(known)))
        body = bytearray(msgpack.packb(_replaced(fields, rng)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            body[rng.randrange(len(body))] = rng.randrange(256)
        cut = rng.randrange(len(body)) if rng.random() < 0.1 else len(body)
        yield rng.choice((pack_body, lambda raw: PLAIN + raw))(bytes(body[:cut]))


def _replaced(value: Any, rng: Random) -> Any:
    """The same with an odd value somewhere, at any depth."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        made = value.copy()
        at = rng.choice(list(made) if isinstance(made, dict) else range(len(made)))
        made[at] = _replaced(made[at], rng)
        return made
    return rng.choice(ODD)


def is_let_in(rig: Rig, bad: Device) -> bool:
    """Whether a device is there; one that the frames before had quarantined is released and says hello."""
    answer = bad.heartbeat()
    if isinstance(answer, Refused) and answer.code is RefusalCode.QUARANTINED:
        rig.ask(routes.DEVICE_RELEASE, DeviceReleaseRequest(device=bad.name))
    return isinstance(answer, control.HeartbeatAck) or isinstance(bad.hello(), control.Welcome)


@pytest.mark.promise("extreme-field-message-taken")
@pytest.mark.timeout(300)
def test_frames_that_mean_harm_are_the_senders_own(rig: Rig) -> None:
    """1. A bad device sends them on every lane, released whenever it is quarantined; 2. a good one is
    served in between; 3. after a restart every page is whole, and the good one's data is as it was."""
    rng = Random(20261123)
    good, bad = rig.device("good"), rig.device("bad")
    assert good.is_served() and bad.is_served()
    for lane in CODECS:
        for number, frame in enumerate(harmful(lane, rng)):
            bad.send_frame(lane, frame)
            if number % BETWEEN == 0:
                assert is_let_in(rig, bad), (lane, number)
        assert good.is_served()
    rig.restart()
    assert good.is_served()
    watched = rig.ask(routes.WATCH, WatchRequest())
    assert [info.device for info in watched.devices] == ["bad", "good"]
    for name in ("good", "bad"):
        assert rig.info(name).unshown == ""
        rig.command("device", "telemetry", name)
    info = rig.info("good")
    assert (info.unreadable, info.quarantine, info.desired_generation) == (0, "", 0)
    books = rig.ask(routes.WATCH, WatchRequest(device=good.name)).telemetry
    assert (books.produced, books.stored, books.lost) == (5, 5, 0)
