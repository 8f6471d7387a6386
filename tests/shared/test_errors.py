"""Errors: one line each, an exit code each, and the tree that the module draws."""

import inspect
import pickle
import re

import pytest

from stageloom.shared import errors
from stageloom.shared.errors import (
    ExitCode,
    OpenInput,
    PlanError,
    StageloomError,
    TaskRefused,
    UnpinnedShape,
    Unsplittable,
)

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
    shape = UnpinnedShape([OpenInput("images", "1x3xhxw", "1x3x224x224")])
    assert [found.name for found in shape.inputs] == ["images"]
    assert TaskRefused("queue_full", "the queue is full").code == "queue_full"


@pytest.mark.parametrize(
    "error",
    [
        PlanError("it is not legal", remedy="do that"),
        TaskRefused("queue_full", "the queue is full"),
        UnpinnedShape([OpenInput("images", "1x3xhxw", "1x3x224x224")]),
        Unsplittable("axis", "Reshape is not split"),
    ],
)
def test_an_error_comes_from_another_process_as_it_was(error: StageloomError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_open_dimensions_of_all_inputs_are_pinned_by_pasting_the_example() -> None:
    error = UnpinnedShape([OpenInput("ids", "nxs", "1x128"), OpenInput("sr", "?", "1")])
    assert str(error) == (
        "the model leaves dimensions open: 'ids' nxs, 'sr' ?; "
        "pin them, for example --shape ids=1x128 --shape sr=1"
    )


def test_every_error_ends_a_command_with_a_documented_code() -> None:
    assert all(isinstance(c.exit_code, ExitCode) and c.exit_code is not ExitCode.OK for c in CLASSES)
