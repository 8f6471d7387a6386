"""Errors: one line each, an exit code each, and the tree that the module draws."""

import inspect
import re

from shared import errors
from shared.errors import ExitCode, PlanError, StageloomError, TaskRefused, UnpinnedShape

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, StageloomError)]


def test_the_drawn_tree_is_the_class_tree() -> None:
    drawn = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^((?:[ |`-]*- )?)([A-Z]\w+)(?: {2,}|$)", line):
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[-2] if depth else "Exception"
    assert drawn == {c.__name__: c.__base__.__name__ for c in CLASSES if c.__base__}


def test_an_error_is_one_line_whatever_its_cause_holds() -> None:
    error = PlanError("a library\n  says this\n", remedy="do\nthat")
    assert str(error) == "a library says this ; do that"
    assert (error.cause, error.remedy) == ("a library\n  says this\n", "do\nthat")


def test_fields_stay_beside_the_sentence() -> None:
    shape = UnpinnedShape("images", "height", "1x3x?x?")
    assert (shape.input_name, shape.dimension) == ("images", "height")
    assert "--shape images=" in str(shape)
    assert TaskRefused("queue_full", "the queue is full").code == "queue_full"


def test_an_open_batch_is_pinned_in_the_example_and_the_other_sizes_are_the_models_own() -> None:
    for shape, example in (("nx3x32x32", "1x3x32x32"), ("?x10", "1x10"), ("?", "1x3x224x224")):
        assert f"for example --shape x={example}" in str(UnpinnedShape("x", "n", shape)) + " "
    assert str(UnpinnedShape("x", "n", "maxx3xhx5")).endswith("--shape x=1x3x224x224")


def test_every_error_ends_a_command_with_a_documented_code() -> None:
    assert all(isinstance(c.exit_code, ExitCode) and c.exit_code is not ExitCode.OK for c in CLASSES)
