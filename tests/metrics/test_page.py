"""docs/metrics.md lists each metric as it is told."""

import re
from pathlib import Path

from stageloom.edge_agent.ingest.ledger import MOST_MODELS
from stageloom.edge_agent.metrics.scrape import AGENT_METRICS, PROCESS_METRICS
from stageloom.planner.metrics.scrape import MOST_DEVICES, PLANNER_METRICS
from stageloom.shared.metrics import MetricKind, MetricSpec

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `stageloom_.*$", re.MULTILINE)


def row_of(spec: MetricSpec) -> str:
    """A metric's line on the page."""
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.name}` | {spec.kind.value} | {labels} | {spec.about} |"


def test_page_lists_each_metric_as_it_is_told() -> None:
    page = _PAGE.read_text("utf-8")
    assert _ROW.findall(page) == [row_of(spec) for spec in (*AGENT_METRICS, *PLANNER_METRICS)]
    assert f"{MOST_MODELS} models per agent and {MOST_DEVICES} devices per planner" in page
    for name in PROCESS_METRICS:
        assert f"`{name.partition('_process_')[2]}`" in page


def test_names_follow_the_rules_of_prometheus() -> None:
    for spec in (*AGENT_METRICS, *PLANNER_METRICS):
        assert re.fullmatch(r"stageloom_[a-z]+(_[a-z]+)*", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER), spec.name
        assert spec.name.endswith("_seconds") or spec.kind is not MetricKind.HISTOGRAM
        assert not {"le", "quantile", "task", "request", "application"} & set(spec.labels)
        assert spec.about.endswith(".")
