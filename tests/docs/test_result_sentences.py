"""Sentences of pages that tell figures of kept results have what the files have."""

import json
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "sentence", "file", "keys"),
    [
        (
            "results/README.md",
            "`stageloom --help` {:.2f} s; `stageloom device list` {:.2f} s on the planner's machine, "
            "{:.2f} s over TLS with a token, {:.2f} s while no planner runs",
            "2026-11-23-command_line.json",
            ("help_s", "read_s", "remote_read_s", "offline_read_s"),
        ),
        (
            "results/README.md",
            "no gain in {:.1%}, a plan 5% better commits in {:.0%} (median {:.1f} s)",
            "2026-11-28-trial.json",
            ("same.no_gain_share", "better.commit_share", "better.seconds_median_s"),
        ),
        ("results/README.md", "takes {:.2f} s at most", "2026-11-30-eop.json", ("search_eop_slowest_s",)),
        ("schedulers/eop.md", "take {:.2f} s at most", "2026-11-30-eop.json", ("search_eop_slowest_s",)),
        (
            "schedulers/eop.md",
            "{:.0f} of its {:.0f} lines are met",
            "2026-11-30-eop.json",
            ("lines_met", "lines"),
        ),
    ],
)
def test_a_sentence_has_the_figures_of_its_file(
    page: str, sentence: str, file: str, keys: tuple[str, ...]
) -> None:
    figures = json.loads((_DOCS / "results" / file).read_text(encoding="utf-8"))["figures"]
    text = " ".join((_DOCS / page).read_text(encoding="utf-8").split()).replace(" %", "%")
    assert sentence.format(*(figures[key] for key in keys)) in text
