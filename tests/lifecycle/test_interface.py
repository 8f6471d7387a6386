"""A version with other inputs or outputs runs by an operator's order alone."""

import re

from msgspec import structs

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.facts import PlanFacts
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Activation, DeviceState
from tests.lifecycle import orders
from tests.lifecycle.driver import Driver, desired, kinds

SMALL, LARGE = TensorInfo("x", "float32", (1, 4)), TensorInfo("x", "float32", (1, 8))
OPEN = TensorInfo("x", "float32", (6, 8), (1, 8))
SCORES, BOXES = TensorInfo("scores", "float32", (1, 2)), TensorInfo("boxes", "int64", (1, 2))


def facts(letter: str, *models: ModelSignature) -> PlanFacts:
    digest = Digest(letter * 64)
    return PlanFacts(digest, {one.name: one for one in models}, {one.name: digest for one in models})


def test_a_model_with_other_inputs_or_outputs_is_told_with_what_differs() -> None:
    running = facts("a", ModelSignature("m", (SMALL,), (SCORES, BOXES)))
    same = facts("b", ModelSignature("m", (SMALL,), (SCORES, BOXES), version=2), ModelSignature("n", (), ()))
    assert same.new_interface(running) == "" == running.new_interface(same)
    for inputs, outputs, said in (
        ((LARGE,), (SCORES, BOXES), "other inputs .*: 'x' float32 1x8, not 'x' float32 1x4; .* --now"),
        ((OPEN,), (SCORES, BOXES), "other inputs .*: 'x' float32 1..6x8, not 'x' float32 1x4; "),
        ((SMALL,), (SCORES,), "other outputs .*: 'scores' float32 1x2, not 'boxes' int64 1x2; "),
        ((SMALL,), (BOXES, SCORES), "other outputs .*: 'boxes' int64 1x2, 'scores' .*, not 'scores' "),
    ):
        newer = facts("b", ModelSignature("m", inputs, outputs))
        assert re.search(said, newer.new_interface(running)), newer.new_interface(running)


def test_a_plan_with_another_interface_is_rejected_unless_it_was_ordered() -> None:
    for activation, rejected in ((Activation.TRIAL, True), (Activation.NOW, False)):
        driver = Driver().online()
        driver.do(ev.Received(structs.replace(desired(1), activation=activation)))
        driver.do(orders.PlanVerified((1, 1)))
        actions = kinds(driver.do(ev.PlanStaged((1, 1), interface="model 'm' has other inputs")))
        assert ("ActivatePlan" in actions) is not rejected
        report = driver.core.report()
        assert (report.state is DeviceState.REJECTED) is rejected
        assert not rejected or report.reason == "model 'm' has other inputs"
