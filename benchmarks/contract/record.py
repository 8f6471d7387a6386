"""Rows kept in a file as they come, so that a comparison of hours can be cut off, divided and gone on with.

One JSON object a line: the settings, and either a `row` or the name of a part that is `complete`. Files may
be concatenated; rows of other settings may stand between.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Record:
    """What is known for one run's settings; without a file it knows nothing and keeps nothing."""

    def __init__(self, path: Path | None, settings: Mapping[str, object]) -> None:
        """Read what is there.

        Raises:
            OSError: the file can be neither read nor written.
        """
        self._path = path
        self._settings = dict(settings)
        self._complete: set[str] = set()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
        for line in whole.splitlines():
            found = json.loads(line)
            if found["settings"] != self._settings:
                continue
            if "complete" in found:
                self._complete.add(found["complete"])
            else:
                self._rows[found["row"]["plan"]] = found["row"]
        if torn:  # the writer was killed in the middle of a line
            path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each plan."""
        return list(self._rows.values())

    def has(self, plan: str) -> bool:
        """Whether this plan was compared and agreed; one that did not is compared again."""
        return plan in self._rows and bool(self._rows[plan]["agrees"])

    def is_complete(self, part: str) -> bool:
        """Whether all plans of this part were compared and agreed."""
        return part in self._complete

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep one plan's row."""
        self._rows[row["plan"]] = dict(row)
        self._write({"row": row})

    def complete(self, part: str) -> None:
        """All plans of this part have been compared and agreed."""
        self._complete.add(part)
        self._write({"complete": part})

    def _write(self, said: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"settings": self._settings, **said}) + "\n")
