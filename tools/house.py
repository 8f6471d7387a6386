"""Counts of the product, and what keeps the house in order.

    python3 tools/house.py [--json] [--check] [--docstrings N] [--seed S]

The product is `planner`, `edge_agent`, `shared` and `migrations`. Lines are physical lines of Python. A value
type is a dataclass, a msgspec Struct, a NamedTuple, a TypedDict or an enumeration. Two product modules that
define one public class name at their top level make a duplicate. A circle is a set of modules that import
each other, at any depth of the code; imports for type checkers alone do not count. Beside the product the
lines of `benchmarks` are counted, without those that attack the planner or download models.

`--check` ends with 1 on a duplicate, a circle, or a count above its ceiling in pyproject.toml
(`[tool.house]`). `--docstrings` prints N docstrings drawn by the seed with their signatures, for a person to
judge; a mark before the name says that a docstring adds fewer than three words to its signature.

`api lines` are those of the planner's HTTP API, which `lines` holds, too. `commands`, `options` and `longest
command` count what both programs take, `--help` and the options that stand with every command aside.

It needs Python's standard library only; the commands are counted where typer is installed.
"""

import argparse
import ast
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("planner", "edge_agent", "shared", "migrations")
NOT_COUNTED: Final = ("stageloom.benchmarks.adversary", "stageloom.benchmarks.real_models")
API: Final = ("stageloom.planner.api", "stageloom.planner.schema")
_VALUE_BASES: Final = {"Struct", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
_SMALL_WORDS: Final = frozenset(
    "a an and are as at by for from in into is it its of on or that the to".split()
)
_LEAST_NEW_WORDS: Final = 3


@dataclass(frozen=True)
class Module:
    """One source file; `name` is dotted, from `stageloom` on."""

    name: str
    lines: int
    tree: ast.Module

    @property
    def classes(self) -> list[ast.ClassDef]:
        """Classes at the top level."""
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]


@dataclass(frozen=True)
class Docstring:
    """A public docstring and the signature that it belongs to."""

    place: str
    signature: str
    text: str

    @property
    def tells(self) -> bool:
        """Whether at least three of its words are not in the signature."""
        known = set(_words(self.signature)) | _SMALL_WORDS
        return len(set(_words(self.text)) - known) >= _LEAST_NEW_WORDS


@dataclass(frozen=True)
class Counts:
    """What `main` prints."""

    modules: int
    lines: int
    value_types: int
    duplicate_class_names: dict[str, list[str]]
    import_circles: list[list[str]]
    benchmark_lines: int = 0
    api_lines: int = 0
    commands: int = 0
    options: int = 0
    longest_command: int = 0


def commands_of() -> list[tuple[str, int]]:
    """Every command of both programs with how many options and arguments it has, the longest first.

    None where typer is not installed: the other counts need Python's standard library alone.
    """
    try:
        from typer.main import get_command

        from stageloom.edge_agent.cli.app import app as agent
        from stageloom.planner.cli.app import app as planner
    except ImportError:
        return []
    found: list[tuple[str, int]] = []

    def walk(path: str, command: Any) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found.append((path, len(command.params)))
        for name, child in (children or {}).items():
            walk(f"{path} {name}", child)

    walk("stageloom", get_command(planner))
    walk("stageloom-agent", get_command(agent))
    return sorted(found, key=lambda entry: -entry[1])


def modules_of(folder: str) -> list[Module]:
    """Every module of a folder at the top of the repository."""
    modules = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("stageloom", *(parts[:-1] if parts[-1] == "__init__" else parts)))
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, text.count("\n"), ast.parse(text)))
    return modules


def counts_of(modules: Sequence[Module], benchmarks: Sequence[Module] = ()) -> Counts:
    """The counts over the product's modules and, of their lines alone, over those of the benchmarks."""
    commands = commands_of()
    return Counts(
        modules=len(modules),
        lines=sum(module.lines for module in modules),
        value_types=sum(
            is_value_type(node)
            for module in modules
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        ),
        duplicate_class_names=duplicate_class_names(modules),
        import_circles=circles(imports_between(modules)),
        benchmark_lines=sum(module.lines for module in benchmarks if not module.name.startswith(NOT_COUNTED)),
        api_lines=sum(module.lines for module in modules if module.name.startswith(API)),
        commands=len(commands),
        options=sum(number for _, number in commands),
        longest_command=commands[0][1] if commands else 0,
    )


def is_value_type(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, or derives from a kind of record or enumeration."""
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return decorated or any(ast.unparse(base).split(".")[-1] in _VALUE_BASES for base in node.bases)


def duplicate_class_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Public class names that several modules define, with those modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.classes:
            if not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def imports_between(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Per module those of the others that it imports."""
    names = {module.name for module in modules}
    imports = {}
    for module in modules:
        targets: set[str] = set()
        for node in _running(module.tree):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                below = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                targets.update(path if path in names else node.module for path in below.values())
        imports[module.name] = (targets & names) - {module.name}
    return imports


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree` that is not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _running(node)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(imports[name]):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            start = stack.index(name)
            components.append(sorted(stack[start:]))
            del stack[start:]

    sys.setrecursionlimit(10_000)
    for name in sorted(imports):
        if name not in order:
            visit(name)
    return [component for component in components if len(component) > 1]


def docstrings_of(modules: Iterable[Module]) -> list[Docstring]:
    """Of every module, public class and public function."""
    return [docstring for module in modules for docstring in _documented(module.tree, module.name, "")]


def _documented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef, place: str, signature: str
) -> Iterator[Docstring]:
    if text := ast.get_docstring(node):
        yield Docstring(place, signature or place, text)
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _documented(child, f"{place}.{child.name}", f"class {child.name}")
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            returned = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            call = f"def {child.name}({ast.unparse(child.args)}){returned}"
            yield from _documented(child, f"{place}.{child.name}", call)


def _words(text: str) -> list[str]:
    """Words in lower case; names in camel case and underscores fall into theirs."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return [word.lower().rstrip("s") for word in re.findall(r"[A-Za-z]+", apart)]


def problems_of(counts: Counts) -> list[str]:
    """What `--check` complains of."""
    import tomllib  # Python 3.11; the counts alone do with less

    problems = [f"{name} is defined in {', '.join(at)}" for name, at in counts.duplicate_class_names.items()]
    problems += [f"these import each other: {', '.join(circle)}" for circle in counts.import_circles]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    for name, ceiling in settings.items():
        if (count := getattr(counts, name)) > ceiling:
            problems.append(f"{name}: {count}, above {ceiling}")
    return problems


def text_of(counts: Counts) -> str:
    """The counts for a person, with what is duplicated or circular below them."""
    rows = asdict(counts)
    lines = [
        f"{name.replace('_', ' '):24}{value if isinstance(value, int) else len(value)}"
        for name, value in rows.items()
    ]
    lines += [f"  {name}: {', '.join(where)}" for name, where in counts.duplicate_class_names.items()]
    lines += [f"  circle: {', '.join(circle)}" for circle in counts.import_circles]
    return "\n".join(lines)


def drawn_text(docstrings: Sequence[Docstring], number: int, seed: int) -> str:
    """Some docstrings, drawn by a seed; `!` marks those that add next to nothing."""
    drawn = random.Random(seed).sample(docstrings, number)
    parts = [
        f"{' ' if docstring.tells else '!'} {docstring.place}\n    {docstring.signature}\n"
        + "\n".join(f"      {line}" for line in docstring.text.splitlines())
        for docstring in drawn
    ]
    telling = sum(docstring.tells for docstring in drawn)
    return "\n\n".join([*parts, f"{telling} of {number} add {_LEAST_NEW_WORDS} words or more"])


def main() -> int:
    """Run the command; the process ends with what this returns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--check", action="store_true", help="end with 1 if the house is out of order")
    parser.add_argument("--docstrings", type=int, default=0, metavar="N", help="print N, to be judged")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    given = parser.parse_args()
    modules = [module for folder in PRODUCT for module in modules_of(folder)]
    counts = counts_of(modules, modules_of("benchmarks"))
    print(json.dumps(asdict(counts), indent=1) if given.json else text_of(counts))
    if given.docstrings:
        print("\n" + drawn_text(docstrings_of(modules), given.docstrings, given.seed))
    problems = problems_of(counts) if given.check else []
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
