"""Operators split over two cores of a real device: measured there, planned from that, served."""

import os
from pathlib import Path

import numpy as np
import pytest

from stageloom import Client
from tests.e2e.fleet import Device
from tests.e2e.networks import LAYERS, reference, rows
from tests.planner.processes import stageloom

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two resources need two cores"),
]

ALPHA = ("--model", "alpha")


@pytest.mark.promise("split-plans-from-device")
def test_a_device_measures_parts_and_serves_plans_that_split_operators(
    device: Device, files: dict[str, Path]
) -> None:
    """1. Without parts there is no such plan, and the error has the command. 2. The device measures. 3. eop
    chooses, and says what with and without. 4. A plan with every operator split serves what the model
    computes. 5. It is explained. 6. Its stages can be measured."""
    device.start()
    fleet, row = device.fleet, rows(1)[0]
    device.until_seen(lambda seen: seen["machine"], "its cores and executors")
    create = ("plan", "create", device.name, *ALPHA, "--scheduler")
    refused = stageloom(fleet.home, *create, "eop")
    assert f"stageloom device profile {device.name} --model alpha --executor onnx --splits" in refused.stderr
    profile = ("device", "profile", device.name, *ALPHA, "--executor", "onnx", "--splits")
    (measured,) = fleet.ask(*profile, "--budget", "20s")["measured"]
    assert measured["parts"] >= LAYERS and measured["whole_us"] > 0.0 and measured["reason"] == ""
    made = fleet.ask(*create, "eop")
    assert made["scheduler"] == "eop" and "ms whole on onnx on core" in made["known"]
    device.run(made["plan"])
    split = fleet.ask(*create, "equal")
    assert "splits=" in split["text"]
    device.run(split["plan"])
    with Client(device.running.socket) as client:
        expected = reference(files["alpha"]).run(None, {"input": row})[0]
        found = client.run("alpha", {"input": row}, timeout_s=60)["output"]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    said = fleet.ask("plan", "explain", device.name)
    assert len(said["splits"]) >= LAYERS and all(one["measured"] for one in said["splits"])
    assert said["predicted_ms"] > said["unsplit_ms"] > 0.0, (
        "a hand-over per operator costs more than it gains"
    )
    fleet.ask("device", "profile", device.name, "--plan", split["plan"], "--budget", "5s")
    contest = fleet.ask("plan", "create", device.name, *ALPHA, "--budget", "5s")["contest"]
    assert contest["winner"]
