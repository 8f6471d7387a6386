"""A device that joins gets a plan without anybody choosing a scheduler, and a better one once it measured."""

import re
from pathlib import Path

import numpy as np
import pytest

from stageloom import Client
from tests.e2e.fleet import Device
from tests.e2e.networks import reference, rows

BOTH = ("--model", "alpha", "--model", "beta")


@pytest.mark.promise("plan-create-needs-no-scheduler")
def test_a_plan_for_a_device_needs_no_scheduler_and_uses_what_it_measured(
    device: Device, files: dict[str, Path]
) -> None:
    """1. An agent joins and tells its cores and executors. 2. A plan is made of that, and says what was not
    measured. 3. It serves. 4. Each executor is measured. 5. The next plan knows each time, and serves."""
    device.start()
    fleet, row = device.fleet, rows(1)[0]
    machine = device.until_seen(lambda seen: seen["machine"], "its cores and executors")["machine"]
    usable = [one["name"] for one in machine["executors"] if not one["problem"]]
    assert usable[0] == "onnx" and "openvino" in usable
    made = fleet.ask("plan", "create", device.name, *BOTH)
    assert made["scheduler"] == "auto" and made["known"].startswith(f"{device.name} has ")
    assert f"not measured on openvino yet, `stageloom device profile {device.name}" in made["known"]
    for index, core in enumerate(machine["cores"]):
        assert f"resource {index}  cores={core} lanes={index}" in made["text"]

    def serves(plan: str) -> None:
        device.run(plan)
        with Client(device.running.socket) as client:
            for name, file in files.items():
                expected = reference(file).run(None, {"input": row})[0]
                found = client.run(name, {"input": row}, timeout_s=60)["output"]
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)

    serves(made["plan"])
    for executor in ("onnx", "openvino"):
        measured = fleet.ask(
            "device", "profile", device.name, *BOTH, "--executor", executor, "--budget", "8s"
        )
        assert {(one["model"], one["executor"]) for one in measured["measured"]} == {
            ("alpha", executor),
            ("beta", executor),
        }
        assert all(one["whole_us"] > 0.0 and one["measured"] for one in measured["measured"])
    known = fleet.ask("plan", "create", device.name)["known"]
    assert "not measured" not in known
    for name in files:  # agents measure further ways by themselves, with two threads
        assert re.search(rf"{name} on (onnx|openvino)( with \d threads)? in [\d.]+ ms \([\d.]+ ms on ", known)
    by_hand = fleet.ask("plan", "create", device.name, *BOTH, "--scheduler", "auto", "--push")
    serves(by_hand["plan"])
    said = fleet.ask("plan", "explain", device.name)["blocks"]
    assert {(one["executor"], tuple(one["cores"])) for one in said} <= {
        (name, tuple(machine["cores"])) for name in ("onnx", "openvino")
    }
