"""Join tokens, retry delays and clocks."""

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stageloom.shared.backoff import backoff_s
from stageloom.shared.clock import ManualClock, SystemClock
from stageloom.shared.errors import TokenError
from stageloom.shared.token import MAX_TOKEN_CHARS, JoinToken, format_token, parse_token

TOKEN = JoinToken(
    planner_key=bytes(range(32)),
    secret=bytes(range(16)),
    control="tcp://10.0.0.7:7440",
    telemetry="tcp://10.0.0.7:7441",
    bulk="tcp://planner.example.org:7442",
    enrol="tls://[fe80::1]:7443",
    certificate=bytes(range(32, 64)),
)


def test_a_token_round_trips() -> None:
    text = format_token(TOKEN)
    assert text.startswith("stgl2.") and len(text) < 304
    assert parse_token(f"  {text}\n") == TOKEN
    assert parse_token(text).enrol == "tls://[fe80::1]:7443"


@given(key=st.binary(min_size=32, max_size=32), secret=st.binary(min_size=16, max_size=32))
def test_any_key_and_secret_round_trip(key: bytes, secret: bytes) -> None:
    token = replace(TOKEN, planner_key=key, secret=secret)
    assert parse_token(format_token(token)) == token


@given(text=st.text(max_size=300), prefix=st.sampled_from(["", "stgl2."]))
def test_any_text_is_a_token_or_refused(text: str, prefix: str) -> None:
    with pytest.raises(TokenError):
        parse_token(prefix + text)


@given(position=st.integers(0, 200), letter=st.sampled_from("AZaz09-_=+/ .\n\x00é"))
def test_a_damaged_token_is_refused_without_repeating_its_secret(position: int, letter: str) -> None:
    text = format_token(TOKEN)
    position %= len(text)
    damaged = text[:position] + letter + text[position + 1 :]
    try:
        parse_token(damaged)
    except TokenError as error:
        assert text[20:60] not in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("kept", [0, 3, 6, 7, 40, 100])
def test_a_cut_off_token_is_refused(kept: int) -> None:
    with pytest.raises(TokenError, match="stageloom device token"):
        parse_token(format_token(TOKEN)[:kept])


def test_an_overlong_token_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(TokenError, match="more than 1024"):
        parse_token("stgl2." + "A" * MAX_TOKEN_CHARS)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x:1", "tcp://host", "tcp://a b:1", "tcp://h:123456", "x" * 200]
)
def test_a_token_names_only_tcp_and_tls_endpoints(endpoint: str) -> None:
    with pytest.raises(TokenError):
        format_token(replace(TOKEN, control=endpoint))
    with pytest.raises(TokenError):
        format_token(replace(TOKEN, enrol=endpoint))


@pytest.mark.promise("key-files-enrolment-certificate")
def test_a_token_of_the_first_version_names_the_remedy() -> None:
    with pytest.raises(TokenError, match=r"an older version; upgrade the planner, then make a new one"):
        parse_token("stgl1.lsQgAAEC")


@pytest.mark.promise("reconnects-back-off-jitter")
def test_delays_double_up_to_the_cap_with_half_of_each_left_to_chance() -> None:
    delays = list(islice(backoff_s(Random(1), first_s=1.0, factor=2.0, cap_s=10.0), 200))
    wholes = [1.0, 2.0, 4.0, 8.0] + [10.0] * 196
    assert all(whole / 2 <= delay <= whole for delay, whole in zip(delays, wholes, strict=True))
    assert min(delays[4:]) < 5.5 and max(delays[4:]) > 9.5


@pytest.mark.promise("reconnects-back-off-jitter")
def test_two_devices_do_not_return_together() -> None:
    first, second = (list(islice(backoff_s(Random(seed)), 20)) for seed in (1, 2))
    assert all(abs(a - b) > 1e-6 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("first_s", "factor", "cap_s"), [(0.0, 2.0, 1.0), (1.0, 0.5, 2.0), (2.0, 2.0, 1.0)])
def test_delays_that_would_vanish_are_refused(first_s: float, factor: float, cap_s: float) -> None:
    with pytest.raises(ValueError, match="no backoff"):
        next(backoff_s(Random(1), first_s=first_s, factor=factor, cap_s=cap_s))


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock()
    begin_s, begin_us = clock.monotonic_s(), clock.wall_us()
    clock.advance(1.5)
    assert clock.monotonic_s() - begin_s == 1.5 and clock.wall_us() - begin_us == 1_500_000
    with pytest.raises(ValueError, match="cannot move"):
        clock.advance(-1.0)


def test_the_system_clock_does_not_fall() -> None:
    clock = SystemClock()
    assert clock.monotonic_s() <= clock.monotonic_s() and clock.wall_us() > 1_700_000_000_000_000
