"""Canonical bytes and digests: one form for one value, and nothing without a form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.digest import canonical, digest_bytes, digest_from_raw, digest_of, digest_to_raw
from stageloom.shared.ids import Digest
from tests.shared.randoms import thorough

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def test_the_digest_of_nothing_is_the_published_blake2b_256() -> None:
    assert digest_bytes([]) == "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"


def test_canonical_bytes_are_the_shortest_msgpack() -> None:
    assert canonical([1, -1, "a", b"a", True, None, [128]]) == bytes.fromhex(
        "97 01 ff a1 61 c4 01 61 c3 c0 91 cc 80"
    )


@thorough
@given(values, values)
def test_values_have_equal_bytes_exactly_if_they_are_the_same(left: Any, right: Any) -> None:
    assert (canonical(left) == canonical(right)) == (repr(left) == repr(right))


def test_tuples_and_lists_are_one_form() -> None:
    assert canonical((1, (2, 3))) == canonical([1, [2, 3]])


@pytest.mark.parametrize(
    "value",
    [0.5, float("nan"), {}, {"a": 1}, {1}, 1 << 64, -(1 << 63) - 1, bytearray(b"a"), 1j, object(), [[0.0]]],
)
def test_a_value_without_one_form_has_no_digest(value: Any) -> None:
    with pytest.raises(TypeError, match="no canonical form"):
        digest_of(value)


@given(st.lists(st.binary(max_size=20)))
@thorough
def test_the_digest_does_not_depend_on_the_chunks(chunks: list[bytes]) -> None:
    assert digest_bytes(chunks) == digest_bytes([b"".join(chunks)])


@given(st.binary(min_size=32, max_size=32))
@thorough
def test_raw_and_text_forms_of_a_digest_round_trip(raw: bytes) -> None:
    assert digest_to_raw(digest_from_raw(raw)) == raw


GOOD = "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"


@pytest.mark.parametrize(
    "text", ["", GOOD[:-2], GOOD + "00", GOOD.upper(), " " + GOOD, GOOD[:-1] + "g", "é" * 64]
)
def test_a_digest_has_one_spelling(text: str) -> None:
    with pytest.raises(ValueError):
        digest_to_raw(Digest(text))


@pytest.mark.parametrize("raw", [b"", b"0" * 31, b"0" * 33, "0" * 32, [0] * 32, None, 32])
def test_only_32_raw_bytes_are_a_digest(raw: Any) -> None:
    with pytest.raises(ValueError):
        digest_from_raw(raw)
