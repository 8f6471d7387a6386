"""The digest of what a result is made of: the code that it may run, and the files that it reads."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OURS = ("benchmarks", "stageloom")
_DIGEST_BYTES = 8


def digest_of_code(module: str, files: Iterable[str] = (), *, root: Path = ROOT) -> str:
    """16 hexadecimal digits over a module, all of ours that it imports at any depth, and `files`.

    Files are paths from `root`; a folder stands for everything below it, a pattern with `*` for what there
    is, if anything. Sources count as syntax trees, so
    that comments and layout change nothing. Packages of others are not looked at.

    Raises:
        FileNotFoundError: there is no such module or file.
    """
    found = blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(imported(module, root)):
        found.update(f"{name}\0{_form(_source(name, root))}\0".encode())
    for path in sorted(path for file in files for path in _read(root, file)):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def imported(module: str, root: Path = ROOT) -> set[str]:
    """The module and all of ours that it imports at any depth, inside functions as well."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += _named(_source(name, root), root)
        parent = name.rpartition(".")[0]
        if "." in parent and _exists(parent, root):  # what a top-level package offers is not what is used
            todo.append(parent)
    return seen


@cache
def _named(source: Path, root: Path) -> tuple[str, ...]:
    """Modules of ours that a file names in its imports."""
    return tuple(name for name in _names(source) if name.split(".")[0] in _OURS and _exists(name, root))


def _names(source: Path) -> Iterator[str]:
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # it may be a module


@cache
def _tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


@cache
def _form(source: Path) -> str:
    return ast.dump(_tree(source))


def _exists(module: str, root: Path) -> bool:
    return _path(module, root).is_file()


def _source(module: str, root: Path) -> Path:
    path = _path(module, root)
    if not path.is_file():
        raise FileNotFoundError(f"there is no module {module}")
    return path


def _path(module: str, root: Path) -> Path:
    """The packages of `stageloom` are folders at the top, which `src/stageloom` links to."""
    first, *rest = module.split(".")
    base = root / "src" / first if first == "stageloom" and (root / "src" / first).is_dir() else root / first
    path = base.joinpath(*rest)
    package = path / "__init__.py"
    return package if package.is_file() else path.with_suffix(".py")


def _read(root: Path, file: str) -> Iterator[Path]:
    """What a path or a pattern stands for.

    Raises:
        FileNotFoundError: a path stands for nothing.
    """
    path = root / file
    if "*" in file:
        yield from root.glob(file)
    elif path.is_dir():
        yield from (one for one in path.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
    elif path.is_file():
        yield path
    else:
        raise FileNotFoundError(f"there is no {path}")
