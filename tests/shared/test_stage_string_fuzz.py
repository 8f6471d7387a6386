"""The stage-string parser under a committed corpus and its mutations: refused, or the one spelling."""

from pathlib import Path
from random import Random

import pytest

from stageloom.shared.errors import PlanError
from stageloom.shared.stage_string import parse, to_string

CORPUS = sorted((Path(__file__).parents[1] / "data/corpus/stage_string").iterdir())
ALPHABET = "0123456789/|-.*~;:,@ \n٣é"


def accepts(text: str) -> bool:
    """Whether `text` parses; then it must be the one spelling. Any error but PlanError fails the test."""
    try:
        schedule = parse(text)
    except PlanError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 300
        return False
    assert to_string(schedule) == text
    return True


def read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def expands(path: Path) -> bool:
    """Whether a text expands to the largest range, which takes a tenth of a second to build and compare."""
    return "0..65535" in read(path) or "0-65535" in read(path)


SMALL = [path for path in CORPUS if not expands(path)]


def mutated(random: Random, text: str, other: str) -> str:
    """One small change: remove, insert, replace, repeat a piece, or splice with another text."""
    start = random.randint(0, len(text))
    stop = min(len(text), start + random.choice([0, 1, 1, 2, 5]))
    change = random.randrange(4)
    if change == 0:
        return text[:start] + text[stop:]
    if change == 1:
        return text[:start] + random.choice(ALPHABET) + text[stop:]
    if change == 2:
        return text[:stop] + text[start:stop] * random.randint(1, 3) + text[stop:]
    return text[:start] + other[random.randint(0, len(other)) :]


@pytest.mark.promise("decoder-stage-string-parser")
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_corpus_and_its_mutations_are_refused_or_canonical(path: Path) -> None:
    accepts(read(path))
    random = Random(path.stem)
    for _ in range(8 if expands(path) else 40):
        text = read(path)
        for _ in range(random.randint(1, 4)):
            text = mutated(random, text, read(random.choice(SMALL)))
        accepts(text[:2000])


def test_the_corpus_holds_texts_of_both_kinds() -> None:
    accepted = [accepts(read(path)) for path in CORPUS]
    assert accepted.count(True) >= 15
    assert accepted.count(False) >= 25
