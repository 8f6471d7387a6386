"""The counts of `tools/house.py`, on sources written here."""

import ast

import pytest

from tools.house import Counts, Docstring, Module, circles, counts_of, imports_between, problems_of


def module(name: str, text: str) -> Module:
    return Module(f"stageloom.{name}", text.count("\n"), ast.parse(text))


def test_value_types_of_every_kind_are_counted() -> None:
    text = (
        "@dataclass(frozen=True)\nclass A: ...\nclass B(Struct): ...\nclass C(msgspec.Struct): ...\n"
        "class D(NamedTuple): ...\nclass E(str, Enum): ...\nclass F: ...\ndef f():\n    class G(Enum): ...\n"
    )
    counts = counts_of([module("a", text)])
    assert (counts.modules, counts.lines, counts.value_types) == (1, 9, 6)


def test_lines_of_benchmarks_are_counted_but_for_attacks_and_downloads() -> None:
    names = ("runner", "gpu.run", "adversary.floods", "real_models.serving")
    benchmarks = [module(f"benchmarks.{name}", "x = 1\n" * 10) for name in names]
    assert counts_of([], benchmarks).benchmark_lines == 20


def test_a_public_class_name_of_two_modules_is_a_duplicate() -> None:
    found = counts_of(
        [module("a", "class A: ...\nclass _B: ..."), module("b", "class A: ...\nclass _B: ...")]
    )
    assert found.duplicate_class_names == {"A": ["stageloom.a", "stageloom.b"]}


def test_imports_at_any_depth_make_a_circle_and_those_of_type_checkers_none() -> None:
    a = module("a", "def f():\n    from stageloom.b import g")
    b = module("b", "from stageloom import c")
    closing = module("c", "import stageloom.a")
    typed = module("c", "if TYPE_CHECKING:\n    import stageloom.a")
    assert counts_of([a, b, closing]).import_circles == [["stageloom.a", "stageloom.b", "stageloom.c"]]
    assert counts_of([a, b, typed]).import_circles == []


def test_circles_that_share_no_module_are_told_apart() -> None:
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}
    assert sorted(circles(edges)) == [["a", "b"], ["c", "d"]]
    assert imports_between([module("x", "import os")]) == {"stageloom.x": set()}


@pytest.mark.parametrize(
    ("text", "tells"),
    [("The members' mask.", False), ("Operators of one combined block as bits, lowest first.", True)],
)
def test_a_docstring_tells_if_it_adds_words(text: str, tells: bool) -> None:
    assert Docstring("m.f", "def member_mask(self, member: int) -> int", text).tells is tells


def test_duplicates_circles_and_counts_above_their_ceilings_are_problems() -> None:
    problems = problems_of(Counts(10**9, 10**9, 10**9, {"A": ["m", "n"]}, [["m", "n"]]))
    assert problems[:2] == ["A is defined in m, n", "these import each other: m, n"]
    assert any(problem.startswith("lines: 1000000000, above ") for problem in problems)
