"""Writes docs/testing.md: what is promised (`tests/promises.toml`), and the tests that say they hold it.

    python3 tools/testing_page.py [--check]

A test says so by `@pytest.mark.promise("ID", ...)`, a whole file by `pytestmark`. The promises' order is that
of the file. `--check` writes nothing and ends with 1 if the page is not what it would write, if a promise has
no test, or if a test names a promise that there is not.
"""

import argparse
import ast
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tomllib

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "testing.md"
PROMISES: Final = ROOT / "tests" / "promises.toml"
_WIDTH: Final = 120


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(promise, test) of every mark in a test file; a mark of the whole file has "" for its test."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            yield from ((promise, "") for value in values for promise in _named(value))
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                yield from ((promise, node.name) for promise in _named(decorator))


def _named(mark: ast.expr) -> list[str]:
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
        return [ast.literal_eval(argument) for argument in mark.args]
    return []


def tests_by_promise(folder: Path) -> dict[str, list[str]]:
    """Per promise the ids of its tests, by file and then in the order of the file."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for promise, test in marks(path.read_text(encoding="utf-8")):
            tests[promise].append(f"{name}::{test}" if test else name)
    return dict(tests)


def problems(sections: Sequence[Mapping[str, Any]], tests: Mapping[str, Sequence[str]]) -> list[str]:
    """Promises without a test, and marks without a promise."""
    known = [promise["id"] for section in sections for promise in section["promises"]]
    return [
        *(f"no test holds the promise {name!r}" for name in known if name not in tests),
        *(
            f"{ids[0]} names {name!r}, which no promise has"
            for name, ids in tests.items()
            if name not in known
        ),
        *(f"two promises are {name!r}" for name in sorted(set(known)) if known.count(name) > 1),
    ]


def page(title: str, text: str, sections: Sequence[Mapping[str, Any]], tests: Mapping[str, list[str]]) -> str:
    """The whole page as Markdown."""
    parts = [f"# {title}\n", text.strip() + "\n"]
    for section in sections:
        parts.append(f"## {section['title']}\n")
        if section.get("text"):
            parts.append(section["text"].strip() + "\n")
        lines = []
        for promise in section["promises"]:
            lines += textwrap.wrap(promise["text"], _WIDTH, initial_indent="- ", subsequent_indent="  ")
            lines += [f"  - `{test}`" for test in tests.get(promise["id"], ())]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    """Run the command; the process ends with what this returns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 if something is wrong"
    )
    given = parser.parse_args()
    wanted = tomllib.loads(PROMISES.read_text(encoding="utf-8"))
    tests = tests_by_promise(ROOT / "tests")
    wrong = problems(wanted["sections"], tests)
    text = page(wanted["title"], wanted["text"], wanted["sections"], tests)
    if given.check and PAGE.read_text(encoding="utf-8") != text:
        wrong.append(f"{PAGE.relative_to(ROOT)} is out of date: run `python3 tools/testing_page.py`")
    for problem in wrong:
        print(problem, file=sys.stderr)
    if not given.check:
        PAGE.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
