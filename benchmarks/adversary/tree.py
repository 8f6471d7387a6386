"""A version of the project as a folder of sources, and its commands."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OLDER = Path(__file__).parent / "older"


@dataclass(frozen=True)
class Tree:
    """One version's sources; its commands run with this interpreter and its packages."""

    root: Path

    @property
    def path(self) -> list[Path]:
        """Where its packages are found, as `stageloom`; 0.1.0 had them at the top, under bare names."""
        package = self.root / "src"
        return [package] if package.exists() else [_OLDER, self.root]

    def command(self, program: str, *arguments: str) -> list[str]:
        """The argument list of `planner` (stageloom) or `edge_agent` (stageloom-agent)."""
        return [sys.executable, "-c", f"from stageloom.{program}.cli import main; main()", *arguments]

    def script(self, path: Path, *arguments: str) -> list[str]:
        """The argument list of a script of ours that imports this version's packages."""
        return [sys.executable, str(path), *arguments]

    def environment(self, first: Path | None = None, **extra: str) -> dict[str, str]:
        """An environment in which this version is found before any other; searches need no Ray.

        `first`: a folder that is looked into even before.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STAGELOOM_")}
        path = os.pathsep.join(str(folder) for folder in (first, *self.path) if folder is not None)
        return {**kept, "STAGELOOM_PLANNER_SEARCH": "local", **extra, "PYTHONPATH": path}

    def run(
        self, program: str, *arguments: str, timeout_s: float = 60.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run one command to its end."""
        return subprocess.run(
            self.command(program, *arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment(),
            cwd=self.root,
            check=False,
        )


@contextmanager
def checked_out(commit: str) -> Iterator[Tree | None]:
    """The sources of a commit in a folder of their own; None where the history does not reach so far."""
    with tempfile.TemporaryDirectory(prefix="stageloom-tree-") as folder:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
        if packed.returncode:
            yield None
            return
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        yield Tree(Path(folder))
