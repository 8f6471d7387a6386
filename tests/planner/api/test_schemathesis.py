"""A stranger's judge of the API: schemathesis, with a token of each role."""

import subprocess
import sys
from pathlib import Path

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.service import Planner

_ENDLESS = "watch.events"
"""A stream without an end, which schemathesis would wait for."""

_NOT_ASKED = "positive_data_acceptance"
"""A name of the right form need not name anything, and fields may contradict each other."""


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", list(Role))
def test_schemathesis_finds_no_5xx_and_no_violation_of_the_schema(
    remote_planner: Planner, role: Role, tmp_path: Path
) -> None:
    with PlannerClient(data_dir=remote_planner.config.data_dir) as client:
        asked = AccessCreateRequest(name=f"judge-{role.value}", role=role)
        token = client.call(routes.ACCESS_CREATE, asked).token
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{remote_planner.api_url}/schema"),
        *("--header", f"Authorization: Bearer {token.partition('.')[0]}", "--tls-verify", "false"),
        *("--exclude-operation-id", _ENDLESS, "--checks", "all", "--exclude-checks", _NOT_ASKED),
        *("--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1", "--no-color"),
        *("--request-timeout", "30", "--warnings", "off"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
