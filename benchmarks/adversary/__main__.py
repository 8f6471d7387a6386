"""What a bad device, a bad application or a stranger can do to others, in this version and in 0.1.0.

    python -m benchmarks.adversary [--quick] [--json] [--only PART]... [--attack NAME]... [--postgres URL]

| part | what is done | figures |
| --- | --- | --- |
| scripts | each attack, in 0.1.0 (commit 5cfc748) and in this version | `attacks`, `broke_before`, `held` |
| floods | each flood beside a good device, for 20 s | `floods`, `floods_held`, `flood_p99_ms_max`, ... |
| api | fifty idle, slow and flooding clients of the API, for 60 s | `api_p99_ms`, `api_held`, ... |
| pings | five minutes of the ping attack on every socket | `aborts`, `pings_lost`, ... |
| kills | 100 kills under load: see `benchmarks.adversary.kills` | `kills`, `wrong`, `hung`, ... |

Scripts run on SQLite and again on Postgres, whose figures end in `_postgres`: a server of its own where
its wheel is installed, else `--postgres` names a database that may be emptied; without either there are
none. `broke_before` counts attacks that broke version 0.1.0 on the same machine: one that did not is no
attack, and says nothing where it is held. An attack that does not take place is an error and ends the run.

A flood is held if the good device's p99 stays within three times what it is alone, or 250 ms, no heartbeat
stays unanswered, no device is declared dead, and the planner grows by 256 MiB at most. Attacker and good
device share a core, the planner has another.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.adversary import kills
from benchmarks.adversary.api_clients import CLIENTS
from benchmarks.adversary.beside import Noticed, asked, flooded
from benchmarks.adversary.database import fresh_database, postgres
from benchmarks.adversary.floods import FLOODS
from benchmarks.adversary.ground import ground
from benchmarks.adversary.pinged import Survived, pinged
from benchmarks.adversary.scripts import SCRIPTS, Attack
from benchmarks.adversary.tree import ROOT, Tree, checked_out
from benchmarks.runner import Report, arguments, emit, progress
from stageloom.planner.twin.compiled.compile_cache import is_compiled

VERSION_0_1_0 = "5cfc748"
PARTS = ("scripts", "floods", "api", "pings", "kills")
# In a process of its own: its memory, and that of a planner that compiles, are no attack's.
_COMPILE = "from stageloom.planner.twin.compiled import compile_ahead; compile_ahead()"
_AT_WILL = "enrolled, unpaced"
PACKAGES = ("pyzmq", "msgspec", "sqlalchemy", "psycopg", "onnxruntime")


def main() -> None:
    """Attack and print."""
    parser = arguments("Attacks on the planner and the agent, on this version and on 0.1.0")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeat for more")
    names = [one.name for one in SCRIPTS] + [one.name for one in FLOODS]
    parser.add_argument(
        "--attack", action="append", choices=names, metavar="NAME", help="this script or flood; repeat"
    )
    parser.add_argument("--postgres", default="", metavar="URL", help="a database that may be emptied")
    options = parser.parse_args()
    report = Report("adversary")
    parts = options.only or PARTS
    if not is_compiled():
        progress("compiling the twin's kernels, which a planner does once after it is installed")
        subprocess.run([sys.executable, "-c", _COMPILE], check=True)
    if "scripts" in parts:
        chosen = [one for one in SCRIPTS if not options.attack or one.name in options.attack]
        with postgres(options.postgres) as url, checked_out(VERSION_0_1_0) as before:
            if before is None:
                progress(f"the history does not hold {VERSION_0_1_0}: nothing is said of version 0.1.0")
            for database, database_url in {"sqlite": "", **({"postgres": url} if url else {})}.items():
                scripts(report, chosen, before, database, database_url)
    if "floods" in parts:
        kinds = [one.name for one in FLOODS if not options.attack or one.name in options.attack]
        floods(report, kinds, 5.0 if options.quick else 20.0)
    if "api" in parts:
        api(report, 10.0 if options.quick else 60.0)
    if "pings" in parts:
        pings(report, 20.0 if options.quick else 300.0)
    if "kills" in parts:
        found = kills.run(10 if options.quick else 100, seed=1)
        report.add(found.figures, found.rows)
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
            return broken or ("" if place.alive else "the planner died")


def floods(report: Report, kinds: Sequence[str], seconds: float) -> None:
    """Every flood beside a good device, on this version."""
    found: dict[str, Noticed] = {}
    for kind in kinds:
        progress(f"flood: {kind}")
        with (
            tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
            ground(Tree(ROOT), Path(folder)) as place,
        ):
            found[kind] = flooded(place, kind, seconds)
        progress(f"  {found[kind].broken or 'held'}: {found[kind]}")
    report.add(
        {
            "floods": float(len(found)),
            "floods_held": float(sum(not one.broken for one in found.values())),
            "flood_p99_ms_max": max((one.p99_ms for one in found.values()), default=0.0),
            "flood_deaths": float(sum(one.died for one in found.values())),
            "flood_grown_mib_max": max((one.grown_mib for one in found.values()), default=0.0),
        },
        [{"flood": kind, **asdict(one), "broken": one.broken} for kind, one in found.items()],
    )


def api(report: Report, seconds: float) -> None:
    """Bad clients of the API beside a good device."""
    progress(f"clients of the API, {seconds:g} s")
    settings = {"STAGELOOM_PLANNER_API": "127.0.0.1:0"}
    with (
        tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
        ground(Tree(ROOT), Path(folder), settings=settings) as place,
    ):
        found = asked(place, seconds)
    progress(f"  {found.broken or 'held'}: {found}")
    report.add(
        {
            "api_clients": float(CLIENTS),
            "api_held": float(not found.broken),
            "api_answered": float(found.sent),
            "api_p99_ms": found.p99_ms,
            "api_alone_p99_ms": found.alone_p99_ms,
            "api_grown_mib": found.grown_mib,
        },
        [{"api": "idle, slow, flooding", **asdict(found), "broken": found.broken}],
    )


def pings(report: Report, seconds: float) -> None:
    """The ping attack: from a stranger, from an enrolled device, and from one that may connect at will.

    The last shows that no number of connections aborts the planner; what they take is bounded by the quota
    that it is rid of, so its memory is in its row alone.
    """
    found: dict[str, Survived] = {}
    at_will = {"STAGELOOM_PLANNER_QUOTA_CONNECTIONS": "1000000/1000000"}
    for attacker, settings in (("stranger", {}), ("enrolled", {}), (_AT_WILL, at_will)):
        progress(f"pings: {attacker}, {seconds:g} s")
        with (
            tempfile.TemporaryDirectory(prefix="stageloom-") as folder,
            ground(Tree(ROOT), Path(folder), settings=settings) as place,
        ):
            found[attacker] = pinged(place, seconds, enrolled=attacker != "stranger")
        progress(f"  {found[attacker]}")
    report.add(
        {
            "aborts": float(sum(one.aborts for one in found.values())),
            "pings_lost": float(sum(one.lost for one in found.values())),
            "pings_unanswered": float(sum(one.unanswered for one in found.values())),
            "pings_grown_mib_max": max(one.grown_mib for name, one in found.items() if name != _AT_WILL),
        },
        [{"pings": attacker, **asdict(one)} for attacker, one in found.items()],
    )


if __name__ == "__main__":
    main()
