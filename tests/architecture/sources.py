"""The repository's own files, for the tests that read them."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("shared", "planner", "edge_agent", "migrations")
NOT_OURS = {".git", "var", "build", "dist", "__pycache__"}


def repository_files() -> Iterator[Path]:
    """Every file of a checkout, without what tools and `make` leave in it."""
    todo = [ROOT]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            cache = path.name.startswith(".") and path.name.endswith(("_cache", ".hypothesis"))
            environment = (path / "pyvenv.cfg").exists()
            if (
                path.name in NOT_OURS
                or cache
                or environment
                or path.name.endswith(".egg-info")
                or path.is_symlink()
            ):
                continue
            if path.is_dir():
                todo.append(path)
            else:
                yield path


def modules(package: str) -> list[str]:
    """Dotted names of a folder at the top and everything below it, found as files: nothing is imported."""
    names = []
    for path in sorted((ROOT / package).rglob("*.py")):
        ours = ("stageloom",) if package in PRODUCT else ()
        parts = (*ours, *path.relative_to(ROOT).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def source_of(module: str) -> Path:
    """The file of a dotted name."""
    path = ROOT.joinpath(*module.removeprefix("stageloom.").split("."))
    package = path / "__init__.py"
    return package if package.exists() else path.with_suffix(".py")


def below(module: str, *packages: str) -> bool:
    """Whether a module is one of the packages or lies in one."""
    return any(module == package or module.startswith(package + ".") for package in packages)
