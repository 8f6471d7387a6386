"""How long commands wait for what is computed beside the planner: longer than a page, which names them."""

from pathlib import Path
from typing import Any

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.page.visit import _PATIENCE_S
from stageloom.planner.api.route import Route
from stageloom.planner.cli.app import execute
from stageloom.shared.errors import UnavailableError


@pytest.mark.parametrize(
    ("command", "route"),
    [
        ("plan explain fast --device nano", routes.PLAN_EXPLAIN),
        ("plan export fast --format perfetto", routes.PLAN_EXPORT),
        ("plan compare nano", routes.TRIAL_COMPARE),
        ("device telemetry nano --by minute", routes.DEVICE_TELEMETRY),
    ],
)
def test_a_command_waits_longer_than_the_page_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, route: Route[Any, Any]
) -> None:
    waited: list[tuple[str, float]] = []

    def call(self: PlannerClient, asked: Route[Any, Any], request: Any, *, timeout_s: float = 60.0) -> Any:
        waited.append((asked.name, timeout_s))
        raise UnavailableError("it takes long", remedy="wait")

    monkeypatch.setattr(PlannerClient, "call", call)
    token = tmp_path / "token"
    token.write_text("stl_none")
    execute([*command.split(), "--planner", "https://planner.example:1", "--token-file", str(token)])
    ((name, timeout_s),) = waited
    assert name == route.name and timeout_s > _PATIENCE_S
