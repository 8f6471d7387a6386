"""A new version of a model that gives something else is found on real tasks, and is not activated."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.e2e.fleet import Device
from tests.e2e.networks import reference, rows, write_chain
from tests.e2e.test_serving import _grown, _load
from tests.planner.processes import until


def write_near(path: Path, of: Path, factor: float) -> Path:
    """The same network with its first weights scaled."""
    model = onnx.load(of)
    weights = model.graph.initializer[0]
    weights.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(factor), weights.name)
    )
    onnx.save(model, path)
    return path


def pushed(device: Device, plan: str) -> dict[str, Any]:
    """Push with a comparison of outputs; what became of it."""
    generation = device.fleet.ask("plan", "push", device.name, plan, "--compare-outputs")["generation"]

    def ended(seen: dict[str, Any]) -> bool:
        report = seen["report"]
        return report["generation"] == generation and report["state"] in ("rejected", "committed", "no_gain")

    return dict(device.until_seen(ended, f"{plan} to be decided")["report"])


def trial(device: Device, generation: int) -> dict[str, Any]:
    """What `plan compare` tells of a generation, once its telemetry has come."""

    def told() -> Any:
        with contextlib.suppress(AssertionError):  # there is no such trial yet
            found = device.fleet.ask("plan", "compare", device.name, "--generation", str(generation))
            return found["trial"]

    return dict(until(told))


@pytest.mark.full
@pytest.mark.promise("compared-outputs")
def test_a_version_that_gives_something_else_is_rejected_and_one_that_agrees_is_activated(
    device: Device, files: dict[str, Path], tmp_path: Path
) -> None:
    """Under load, from the planner to the engine process.

    1. The device runs version 1 of a model; a thread keeps it busy.
    2. Version 2 has other weights: pushed with a comparison of outputs it is rejected, and the planner tells
       which output differs, where, and both values. Version 1 serves on.
    3. Version 3 has almost the same weights: it agrees, and serves.
    4. Every task completed, with the output of version 1 or 3.
    """
    fleet = device.fleet
    other = write_chain(tmp_path / "other.onnx", seed=77)
    near = write_near(tmp_path / "near.onnx", files["alpha"], 1.0001)
    for name, file in (("v1", files["alpha"]), ("v2", other), ("v3", near)):
        fleet.do("model", "add", str(file), "--name", "gamma")
        fleet.make_plan(name, "--model", "gamma:partition=base")
    given = rows(8)
    device.start()
    device.run("v1")
    with _load(device, ["gamma"], given, deadline_s=30.0) as ended:
        until(_grown(ended))
        seen = pushed(device, "v2")
        assert seen["state"] == "rejected", (seen, trial(device, seen["generation"]))
        assert seen["reason"].startswith("outputs_differ: 'output' of 'gamma' at [0, ")
        rejected = trial(device, seen["generation"])
        seen = pushed(device, "v3")
        assert seen["state"] == "committed"
        until(_grown(ended))
    expected = [[reference(f).run(None, {"input": row})[0] for row in given] for f in (files["alpha"], other)]
    for number, (_, result) in ended.items():
        assert not isinstance(result, Exception), result
        np.testing.assert_allclose(result, expected[0][number % len(given)], rtol=1e-2, atol=1e-3)
    committed = trial(device, seen["generation"])
    assert committed["how"] == rejected["how"] == "outputs"
    assert (committed["verdict"], rejected["verdict"]) == ("commit", "reject")
    found = rejected["outputs"]
    assert (found["model"], found["output"], found["agrees"], found["inputs"]) == (
        "gamma",
        "output",
        False,
        32,
    )
    index = tuple(found["index"])
    values = [(float(one[index]), float(two[index])) for one, two in zip(*expected, strict=True)]
    assert any(
        abs(old - float(found["old"])) < 1e-3 and abs(new - float(found["new"])) < 1e-3 for old, new in values
    )
    assert committed["outputs"]["agrees"]
    plans = {plan["plan"]: plan["compared"] for plan in fleet.ask("plan", "list")}
    assert [(one["device"], one["outputs"]["agrees"]) for one in plans["v2"]] == [(device.name, False)]
    assert fleet.ask("plan", "show", "v3")["compared"] == plans["v3"] != []
    assert plans["v1"] == []
