"""What `deploy/` gives Prometheus and Grafana: its files, and the names of metrics that they use."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "stageloom.rules.yml"
EXAMPLE = DEPLOY / "prometheus" / "prometheus.yml"
DASHBOARD = DEPLOY / "grafana" / "stageloom.json"

_NAME = re.compile(r"stageloom_\w+|\bup\b")  # `up`: what Prometheus itself says of each target


def panels() -> list[dict[str, Any]]:
    """Panels of the dashboard that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[tuple[str, str]]:
    """(title, expression) of every query of every panel, with Grafana's variables replaced."""
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s")
            for name in ("$agent", "$model"):
                expression = expression.replace(f'"{name}"', '".*"')
            yield panel["title"], expression


def rule_queries() -> Iterator[tuple[str, str]]:
    """(name, expression) of every alert."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def names_in(expression: str) -> set[str]:
    """Names of metrics in an expression, of a histogram without what its series end in."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in _NAME.findall(expression)}
