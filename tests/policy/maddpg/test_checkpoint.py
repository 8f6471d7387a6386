"""A policy as bytes, and whom it belongs to."""

from dataclasses import replace

import msgpack
import pytest

from stageloom.shared.digest import canonical, digest_of
from stageloom.shared.errors import DecodeError
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.network import MaddpgNetwork
from stageloom.shared.schedule import stage_schedule
from tests.policy.maddpg.cases import arrays, network, space

SPACE = replace(space(2, 1, replicas=2), deviation_scale=0.05)


def checkpoint() -> MaddpgCheckpoint:
    book = {
        (digest_of(["b"]), 2): stage_schedule([[[0], [1]], [[2]]]),
        (digest_of(["a"]), 1): stage_schedule([[[0]]]),
    }
    return MaddpgCheckpoint(SPACE, network(SPACE), book, {"seed": 3})


def test_what_was_written_reads_back_the_same() -> None:
    raw = encode(checkpoint())
    found = decode(raw)
    assert (found.space, found.book, found.provenance) == (SPACE, checkpoint().book, {"seed": 3})
    assert encode(found) == raw


def test_equal_policies_have_equal_bytes_in_whatever_order_they_were_made() -> None:
    one = checkpoint()
    other = replace(one, book=dict(sorted(one.book.items(), reverse=True)))
    assert encode(one) == encode(other)


@pytest.mark.parametrize(
    ("number", "value", "problem"),
    [
        (0, 9, "format 9"),
        (1, "gpg", "kind gpg"),
        (2, ["toy", [], 2, 2, "geometric", "0x0p+0"], "0 models"),
        (2, ["toy", [[b"x" * 32, [], 1, 1]], 2, 2, "geometric", "nan"], "no policy|states"),
        (2, ["toy", [[b"x" * 32, [], 10**6, 1]], 10, 2, "geometric", "0x0p+0"], "1000000 replicas"),
        (2, ["toy", [[b"x" * 32, [], 1, 1]], 2, 2, "geometric", "0x1p99999"], "too large"),
        (3, "[]", "provenance is no table"),
        (4, [], "arrays"),
        (4, [["actor.0.0.weight", [2, 2], b""]], "shape and bytes differ"),
        (4, [["actor.0.0.bias", [1], b"\x00\x00\xc0\x7f"]], "not finite"),
        (5, [[b"short", 1, [0]]], "digest"),
        (5, [[b"x" * 32, 1, [-3]]], "not a checkpoint of maddpg"),
    ],
)
def test_bytes_that_are_no_policy_are_refused_with_the_reason(
    number: int, value: object, problem: str
) -> None:
    fields = msgpack.unpackb(encode(checkpoint()))
    fields[number] = value
    with pytest.raises(DecodeError, match=problem):
        decode(canonical(fields))


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93" * 10_000, canonical([1, "maddpg"])])
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(DecodeError, match="train it again"):
        decode(raw)


def test_layers_that_do_not_fit_the_space_are_refused() -> None:
    other = space(2, 2)
    raw = encode(MaddpgCheckpoint(SPACE, MaddpgNetwork(arrays(other), other.agents)))
    with pytest.raises(DecodeError, match="layer 0 of actor 0 takes"):
        decode(raw)
