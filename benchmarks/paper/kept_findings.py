"""Findings kept from run to run: one JSON file each, with the digest of what made it and the day."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.paper.code_digest import ROOT, digest_of_code
from benchmarks.paper.finding import Finding, Reproduction, finding_of

FAILED: Final = "failed"
"""In place of a digest: it runs again next time."""

_DEPTH: Final = 3
"""Of the file, its finding and the finding's parts."""


@dataclass(frozen=True)
class KeptFinding:
    """A finding, the digest of the code and files that made it, the day (ISO 8601), processor seconds."""

    id: str
    finding: Finding
    digest: str
    day: str
    cpu_s: float


def _laid_out(value: Any, depth: int = 0) -> str:
    """JSON with a line for each claim, row and panel: what changed from run to run is seen at a glance."""
    if depth == _DEPTH or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(one, depth + 1)}" for key, one in value.items()]
    else:
        parts = [_laid_out(one, depth + 1) for one in value]
    inner = ",\n".join(" " * (depth + 1) + part for part in parts)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}\n{' ' * depth}{last}"


class FindingsFolder:
    """Kept findings by the reproduction's id."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._folder, self._root = folder, root

    def digest_of(self, reproduction: Reproduction) -> str:
        """The digest that a finding of today's code and files has."""
        return digest_of_code(reproduction.module, reproduction.files, root=self._root)

    def read(self, id: str) -> KeptFinding | None:
        """What is kept, whatever code it is of."""
        file = self._file(id)
        if not file.is_file():
            return None
        kept = json.loads(file.read_text(encoding="utf-8"))
        finding = finding_of(kept["finding"])
        return KeptFinding(id, finding, kept["digest"], kept["day"], kept["cpu_s"])

    def write(self, kept: KeptFinding) -> None:
        """Keep a finding in place of an older one."""
        plain: dict[str, Any] = {
            "digest": kept.digest,
            "day": kept.day,
            "cpu_s": round(kept.cpu_s, 1),
            "finding": kept.finding.plain,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(kept.id).write_text(_laid_out(plain) + "\n", encoding="utf-8")

    def due(self, reproductions: Sequence[Reproduction]) -> list[Reproduction]:
        """Those without a finding, or with one of other code or files."""
        return [one for one in reproductions if not self._fresh(one)]

    def _fresh(self, reproduction: Reproduction) -> bool:
        kept = self.read(reproduction.id)
        return kept is not None and kept.digest == self.digest_of(reproduction)

    def _file(self, id: str) -> Path:
        return self._folder / f"{id}.json"
