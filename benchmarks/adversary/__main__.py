"""What a bad device, a bad application or a stranger can do to others, in this version and in 0.1.0.

    python -m benchmarks.adversary [--quick] [--json] [--only PART]... [--attack NAME]... [--postgres URL]

| part | what is done | figures |
| --- | --- | --- |
| scripts | each attack once on SQLite and once on Postgres, in 0.1.0 (commit 5cfc748) and in this version | `attacks`, `broke_before`, `held`, `attacks_postgres`, `broke_before_postgres`, `held_postgres` |

`broke_before` counts attacks that broke version 0.1.0 on the same machine: one that does not is no attack, and
says nothing where it is held. Postgres is a server of its own where its wheel is installed, else `--postgres`
names a database that may be emptied; without either its figures are left out.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.adversary.database import fresh_database, postgres
from benchmarks.adversary.ground import ground
from benchmarks.adversary.scripts import SCRIPTS, Attack
from benchmarks.adversary.tree import ROOT, Tree, checked_out
from benchmarks.report import Report, arguments, emit, progress

VERSION_0_1_0 = "5cfc748"
PARTS = ("scripts",)
PACKAGES = ("pyzmq", "msgspec", "sqlalchemy", "psycopg")


def main() -> None:
    """Attack and print."""
    parser = arguments("Attacks on the planner and the agent, on this version and on 0.1.0")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeat for more")
    parser.add_argument("--attack", action="append", metavar="NAME", help="this attack; repeat for more")
    parser.add_argument("--postgres", default="", metavar="URL", help="a database that may be emptied")
    options = parser.parse_args()
    report = Report("adversary")
    chosen = [one for one in SCRIPTS if not options.attack or one.name in options.attack]
    with postgres(options.postgres) as url, checked_out(VERSION_0_1_0) as before:
        if before is None:
            progress(f"the history does not hold {VERSION_0_1_0}: nothing is said of version 0.1.0")
        databases = {"sqlite": "", **({"postgres": url} if url else {})}
        for database, database_url in databases.items():
            scripts(report, chosen, before, database, database_url)
    emit(report, as_json=options.json, packages=PACKAGES)


def scripts(
    report: Report, chosen: Sequence[Attack], before: Tree | None, database: str, database_url: str
) -> None:
    """Every attack on one database, on both versions."""
    attacks = [one for one in chosen if database in one.databases]
    rows: list[dict[str, Any]] = []
    for attack in attacks:
        progress(f"{database}: {attack.name}")
        row: dict[str, Any] = {"attack": attack.name, "what": attack.row, "database": database}
        if before is not None:
            row["before"] = attempt(attack, before, database_url)
        row["now"] = attempt(attack, Tree(ROOT), database_url)
        progress(f"  before: {row.get('before') or '-'}; now: {row['now'] or '-'}")
        rows.append(row)
    suffix = "" if database == "sqlite" else f"_{database}"
    figures = {f"attacks{suffix}": float(len(rows))}
    if before is not None:
        figures[f"broke_before{suffix}"] = float(sum(bool(row["before"]) for row in rows))
    figures[f"held{suffix}"] = float(sum(not row["now"] for row in rows))
    report.add(figures, rows)


def attempt(attack: Attack, tree: Tree, database_url: str) -> str:
    """What one attack broke on fresh ground; empty text for nothing."""
    with tempfile.TemporaryDirectory(prefix="stageloom-") as folder:
        url = fresh_database(database_url) if database_url else ""
        with ground(tree, Path(folder), url) as place:
            broken = attack.run(place)
            if not broken and not place.alive:
                broken = "the planner died"
            return broken


if __name__ == "__main__":
    main()
