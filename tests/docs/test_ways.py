"""docs/trial.md against the ways in which a device decides about a plan."""

import re
from pathlib import Path

from stageloom.edge_agent.lifecycle.attempts import Way

PAGE = Path(__file__).parents[2] / "docs/trial.md"


def test_the_page_on_trials_names_every_way_that_telemetry_tells() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Which plans are tried")[1].split("\n## ")[0]
    named = set(re.findall(r"\| `(\w+)` \|$", section, re.MULTILINE))
    assert named == {way.value for way in Way if way is not Way.IDLE}  # told as `guard`
