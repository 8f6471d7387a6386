"""The waves of a rollout, as an operator writes them: `1,10%,100%`."""

import math
import re
from collections.abc import Sequence
from typing import Final

from stageloom.shared.errors import InputError

MOST_WAVES: Final = 32

_WAVE: Final = re.compile(r"([0-9]{1,7})(%?)")


def parse_waves(text: str) -> tuple[str, ...]:
    """The words of `1,10%,100%`: a number of devices or a share of them, up to the end of each wave.

    Raises:
        InputError: a word is neither, is 0 or above 100 %, or the last is not 100 %.
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        match = _WAVE.fullmatch(word)
        if match is None or int(match[1]) == 0 or (match[2] and int(match[1]) > 100):
            raise InputError(
                f"{word[:32]!r} is no end of a wave",
                remedy="write waves such as 1,10%,100%: devices or shares",
            )
    if words[-1] != "100%":
        raise InputError("the last wave leaves devices out", remedy=f"end with 100%: {text[:64]},100%")
    if len(words) > MOST_WAVES:
        raise InputError(f"{len(words)} waves are too many", remedy=f"use {MOST_WAVES} at most")
    return words


def wave_ends(words: Sequence[str], devices: int) -> list[int]:
    """How many of `devices` have been asked at the end of each wave: rising, the last is `devices`.

    Shares are rounded up. A wave that would add nothing is left out, so there may be fewer waves than words.
    """
    ends: list[int] = []
    for word in words:
        number = int(word.rstrip("%"))
        end = min(math.ceil(devices * number / 100) if word.endswith("%") else number, devices)
        if end > (ends[-1] if ends else 0):
            ends.append(end)
    return ends
