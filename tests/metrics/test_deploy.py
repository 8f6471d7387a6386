"""The dashboard, the alerts and the example configuration speak of metrics that there are."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from stageloom.edge_agent.metrics.scrape import AGENT_METRICS, PROCESS_METRICS
from stageloom.planner.metrics.scrape import PLANNER_METRICS
from tests.metrics.deployed import DASHBOARD, EXAMPLE, RULES, names_in, panel_queries, panels, rule_queries

KNOWN = {spec.name for spec in (*AGENT_METRICS, *PLANNER_METRICS)} | {*PROCESS_METRICS, "up"}


@pytest.mark.promise("metrics-scraped-both-sides")
def test_every_query_names_metrics_that_there_are() -> None:
    queries = [*panel_queries(), *rule_queries()]
    assert len(queries) > 50
    for title, expression in queries:
        assert names_in(expression), title
        assert names_in(expression) <= KNOWN, title


def test_every_metric_but_the_informative_ones_is_on_the_dashboard_or_in_an_alert() -> None:
    shown = {name for _, expression in (*panel_queries(), *rule_queries()) for name in names_in(expression)}
    assert {name for name in KNOWN - shown if "_process_" not in name} == {
        "stageloom_agent_applications",
        "stageloom_agent_info",
        "stageloom_agent_uptime_seconds",
        "stageloom_device_last_seen_timestamp_seconds",
        "stageloom_devices_untold",
        "stageloom_plan_epoch",
        "stageloom_plan_info",
        "stageloom_planner_info",
        "stageloom_planner_unreadable_records",
        "stageloom_planner_uptime_seconds",
        "stageloom_spool_rows_acknowledged_total",
        "stageloom_spool_rows_total",
        "stageloom_tasks_submitted_total",
        "stageloom_trial_running",
    }


def test_one_that_is_dead_and_tells_nothing_raises_an_alert() -> None:
    jobs = [job["job_name"] for job in yaml.safe_load(EXAMPLE.read_text())["scrape_configs"]]
    alternatives = {one.strip() for _, expression in rule_queries() for one in expression.split(" or ")}
    assert len(jobs) == 2
    assert {f'up{{job="{job}"}} == 0' for job in jobs} <= alternatives


def test_panels_do_not_overlap_and_fill_the_width() -> None:
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels()):
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells
        cells |= mine
    assert {x for x, _ in cells} == set(range(24))
    assert "${datasource}" in DASHBOARD.read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts_and_the_configuration(tmp_path: Path) -> None:
    for file in (RULES, EXAMPLE):
        shutil.copy(file, tmp_path)
    for name in ("stageloom.token", "planner.pem"):
        (tmp_path / name).touch()
    for what, file in (("rules", RULES), ("config", EXAMPLE)):
        done = subprocess.run(
            ["promtool", "check", what, file.name], cwd=tmp_path, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        assert "SUCCESS" in done.stdout
