"""`[NAME=]FILE[:INPUT=DIMS,...]`: one reading per text, names that exporters produce, one-line errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from onnx import helper

from stageloom.shared.errors import InputError, ModelError, OpenInput, UnpinnedShape
from stageloom.shared.importer.api import list_inputs
from stageloom.shared.importer.model_argument import (
    ModelArgument,
    Sizes,
    Span,
    dims_between,
    format_model,
    named,
    parse_model,
    parse_models,
    parse_shape,
    unpinned_in_option,
)
from stageloom.shared.served_name import served_name
from tests.importer.models import info, model_of


def only(*paths: str) -> Callable[[str], bool]:
    """A disk that holds these files and nothing else."""
    return paths.__contains__


ODD = "aB1.:/=,x _-\n☃"  # what separates in the grammar, what exporters use, and what they do not
paths = st.text(ODD, min_size=1, max_size=12)
inputs = st.text(ODD, min_size=1, max_size=8)
dims = st.lists(st.integers(0, 999_999_999), max_size=16).map(tuple)
names = st.none() | st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,4}\Z")
pins = st.lists(st.tuples(inputs, dims), max_size=3, unique_by=lambda pin: pin[0]).map(tuple)


@pytest.mark.promise("model-file-name-pinned")
@given(st.builds(ModelArgument, paths, names, pins))
@example(ModelArgument("n=n=n=", "n", (("n", (1,)),)))
@example(ModelArgument("m.onnx", None, (("a=1", (2,)), (",b", ()))))
@example(ModelArgument("m.onnx:x=1", "x", (("x", ()), ("scalar", (3,)))))
def test_what_is_written_is_read_again_where_its_file_exists(argument: ModelArgument) -> None:
    try:
        text = format_model(argument)
    except ValueError:
        assume(False)
    assert parse_model(text, is_file=only(argument.path)) == argument


@pytest.mark.promise("model-file-name-pinned")
@given(st.text(ODD + "0123456789", max_size=24), st.sets(paths, max_size=3))
def test_any_text_is_read_or_refused_in_one_line(text: str, files: set[str]) -> None:
    try:
        found = parse_model(text, is_file=only(*files))
    except InputError as error:
        assert error.remedy and "\n" not in str(error)
    else:
        assert found.path in text
        assert all(0 <= size < 1_000_000_000 for shape in found.largest.values() for size in shape)
        for name, low in found.smallest.items():
            assert all(1 <= a <= b or a == b for a, b in zip(low, found.largest[name], strict=True))


X: tuple[tuple[str, tuple[int, ...]], ...] = (("x", (1, 4)),)
SEVEN = ("y", (Sizes((7,)),))


@pytest.mark.promise("model-file-name-pinned")
@pytest.mark.parametrize(
    ("text", "files", "found"),
    [
        ("m.onnx", (), ModelArgument("m.onnx")),
        ("a=m.onnx", (), ModelArgument("m.onnx", "a")),
        ("a=m.onnx:x=1x4", (), ModelArgument("m.onnx", "a", X)),
        ("m.onnx:x=1x4", (), ModelArgument("m.onnx", None, X)),
        ("m.onnx:x=scalar", (), ModelArgument("m.onnx", None, (("x", ()),))),
        ("m.onnx:x=1x4,y=7", (), ModelArgument("m.onnx", None, (*X, ("y", (7,))))),
        ("my model.onnx:x=1x4", (), ModelArgument("my model.onnx", None, X)),
        ("m.onnx:x=1..4x3", (), ModelArgument("m.onnx", None, (("x", (Span(1, 4), 3)),))),
        ("m.onnx:x=1x{3,5},y={7}", (), ModelArgument("m.onnx", None, (("x", (1, Sizes((3, 5)))), SEVEN))),
        ("m.onnx:x=2..2", (), ModelArgument("m.onnx", None, (("x", (2,)),))),
        # names that real exporters produce
        ("m.onnx:serving_default_x:0=7", (), ModelArgument("m.onnx", None, (("serving_default_x:0", (7,)),))),
        ("m.onnx:x.1=2,/in/ids=3", (), ModelArgument("m.onnx", None, (("x.1", (2,)), ("/in/ids", (3,))))),
        # what exists as written wins over NAME= and over the list
        ("a=m.onnx", ("a=m.onnx",), ModelArgument("a=m.onnx")),
        ("m.onnx:x=1x4", ("m.onnx:x=1x4", "m.onnx"), ModelArgument("m.onnx:x=1x4")),
        ("a=m.onnx:x=1x4", ("a=m.onnx",), ModelArgument("a=m.onnx", None, X)),
        ("v=2/m.onnx:x=1x4", ("v=2/m.onnx",), ModelArgument("v=2/m.onnx", None, X)),
        ("m:1.onnx:x=1x4", ("m:1.onnx",), ModelArgument("m:1.onnx", None, X)),
        ("m:a:x=1x4", ("m", "m:a"), ModelArgument("m:a", None, X)),
        ("m:a:x=1x4", ("m",), ModelArgument("m", None, (("a:x", (1, 4)),))),
        # NAME has neither "/" nor ":"
        ("v=2.0:b/m.onnx", (), ModelArgument("2.0:b/m.onnx", "v")),
        ("./v=2/m.onnx", (), ModelArgument("./v=2/m.onnx")),
    ],
)  # fmt: skip
def test_a_text_has_one_reading(text: str, files: tuple[str, ...], found: ModelArgument) -> None:
    assert parse_model(text, is_file=only(*files)) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m.onnx:x=", "'' is no shape of input 'x' .*; write whole numbers like 1x3x640x640"),
        ("m.onnx:x=axb", "'axb' is no shape of input 'x'"),
        ("m.onnx:x=1,y=01x3", "'01x3' is no shape of input 'y'"),
        ("m.onnx:x=1x4,", "'' behind m.onnx .* is not INPUT=DIMS"),
        ("m.onnx:x=1x6..2", "6..2 of input 'x' is no range of sizes; write the smallest size, at least 1"),
        ("m.onnx:x=0..2", "0..2 of input 'x' is no range of sizes"),
        ("m.onnx:x={3,4,3}", "{3,4,3} of input 'x' has a size twice; give each size once"),
        ("m.onnx:x={}", "'{}' is no shape of input 'x'"),
        ("m.onnx:x={3", "'{3' is no shape of input 'x'"),
        ("m.onnx:x=1..", "'1..' is no shape of input 'x'"),
        ("m.onnx:x=1..2..3", "'1..2..3' is no shape of input 'x'"),
        ("m.onnx:x", "'x' behind m.onnx .* is not INPUT=DIMS"),
        ("m.onnx:=1", "'=1' behind m.onnx .* is not INPUT=DIMS"),
        ("m.onnx:x=" + "x".join(["1"] * 17), "is no shape of input 'x'"),
        ("a b=m.onnx", "'a b' cannot be the name of a model"),
        ("=m.onnx", "'' cannot be the name of a model"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_part_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_model(text, is_file=only("m.onnx"))


@pytest.mark.promise("open-dimensions")
def test_a_range_gives_the_smallest_and_the_largest_shape() -> None:
    found = parse_model("m.onnx:x=1..6x3x48x16..2400,y=7", is_file=only("m.onnx"))
    assert found.largest == {"x": (6, 3, 48, 2400), "y": (7,)}
    assert found.smallest == {"x": (1, 3, 48, 16)}
    assert dims_between(found.smallest["x"], found.largest["x"]) == found.shapes[0][1]
    assert format_model(found) == "m.onnx:x=1..6x3x48x16..2400,y=7"
    with pytest.raises(InputError, match=r"verify takes one shape per input, and 'm.onnx:x=1..6x3"):
        found.pinned("verify")
    assert replace(found, shapes=(("y", (7,)),)).pinned("verify") == {"y": (7,)}


@pytest.mark.promise("shape-sets")
def test_sets_of_sizes_are_models_of_their_own_under_one_name() -> None:
    found = parse_model("rec=m.onnx:x=1x{160,320},m={1,2}x4,q=7", is_file=only("m.onnx"))
    assert format_model(found) == "rec=m.onnx:x=1x{160,320},m={1,2}x4,q=7"
    assert [(one.called, one.largest) for one in found.each()] == [
        ("rec--1x160-1x4", {"x": (1, 160), "m": (1, 4), "q": (7,)}),
        ("rec--1x320-2x4", {"x": (1, 320), "m": (2, 4), "q": (7,)}),
    ]
    assert {served_name(one.called) for one in found.each()} == {"rec"}
    assert [served_name(name) for name in ("rec", "a--b", "a--b--1x3", "r--1..6x3-scalar")] == [
        "rec",
        "a--b",
        "a--b",
        "r",
    ]
    numbered = parse_model("rec@3=m.onnx:x=1x{160,320}", is_file=only("m.onnx")).each()
    assert [(one.called, one.version) for one in numbered] == [("rec--1x160", 3), ("rec--1x320", 3)]
    alone = parse_model("m.onnx:x=1..4", is_file=only("m.onnx"))
    assert alone.each() == (alone,)
    uneven = parse_model("m.onnx:x={1,2,3},y={4,5}", is_file=only("m.onnx"))
    with pytest.raises(InputError, match="has sets of 2 and 3 sizes; sets are taken in step"):
        uneven.each()
    with pytest.raises(InputError, match=r"takes one shape per input, and '.*' has several sizes"):
        found.pinned("verify")


def test_a_missing_file_with_broken_dimensions_is_told_about_the_dimensions() -> None:
    with pytest.raises(InputError, match="'axb' is no shape of input 'x'"):
        parse_model("absent.onnx:x=axb", is_file=only())


def test_a_model_is_called_as_it_was_named_else_like_its_file() -> None:
    assert ModelArgument("a/b.c.onnx").called == "b.c"
    assert ModelArgument("a/b.onnx", "n").called == "n"
    assert named(ModelArgument("b.onnx"), "n").called == "n"
    assert named(ModelArgument("b.onnx", "n"), None).called == "n"
    with pytest.raises(InputError, match="cannot be the name"):
        _ = ModelArgument("a b.onnx").called
    with pytest.raises(InputError, match="called 'n' and, by --name, 'm'"):
        named(ModelArgument("b.onnx", "n"), "m")


@pytest.mark.parametrize("text", ["x", "=1x3", "x=", "x=1x", "x=00x3", "x=-1", "x=1x3.0", "x=1X3"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write"):
        parse_shape(text)


def test_a_shape_is_read_from_the_last_equals_sign() -> None:
    assert parse_shape("a=b/x:0=1x3") == ("a=b/x:0", (1, 3))
    assert parse_shape("t=scalar") == ("t", ())
    assert parse_shape("past=1x8x0x64") == ("past", (1, 8, 0, 64))


def test_shape_is_for_the_only_model() -> None:
    (found,) = parse_models(["a=m.onnx:x=1x4"], ["y=2"])
    assert found == ModelArgument("m.onnx", "a", (*X, ("y", (2,))))
    with pytest.raises(InputError, match=r"which of 2 models .* for example --model 'm=m.onnx:x=1x4'"):
        parse_models(["m.onnx", "n.onnx"], ["x=1x4"])


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"two models are called 'm'; .*with --model NAME=FILE"):
        parse_models(["m.onnx", "other/m.onnx"])


def test_models_by_position_are_named_without_an_option() -> None:
    with pytest.raises(InputError, match=r"give each its own name with NAME=FILE$"):
        parse_models(["m.onnx", "other/m.onnx"], option="")


def _saved(folder: Path) -> Path:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    model = model_of([node], [info("x", ["n", -1, 4]), info("w", [])], [info("y", ["?", "?", "?"])])
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.promise("model-file-name-pinned")
def test_a_repeated_input_lists_the_models_inputs_with_their_open_dimensions(tmp_path: Path) -> None:
    file = _saved(tmp_path)
    assert list_inputs(file) == "'x' (nx?x4), 'w' (scalar)"
    for text, shapes in ((f"{file}:x=1x1x4,x=2x1x4", ()), (f"{file}:x=1x1x4", ("x=1x1x4",))):
        with pytest.raises(InputError, match=r"'x' of .* is given twice; .*'x' \(nx\?x4\), 'w' \(scalar\)"):
            parse_models([text], shapes)
    with pytest.raises(ModelError, match="cannot read"):
        parse_model(f"{tmp_path}/absent.onnx:x=1,x=2")


def test_an_input_left_open_is_written_as_the_option_would_pin_it() -> None:
    error = UnpinnedShape([OpenInput("ids", "nx128", "1x128"), OpenInput("sr", "?", "1")])
    told = str(unpinned_in_option(error, ModelArgument("my b.onnx", "bert", (("mask", (1, 128)),))))
    assert told == (
        "the model leaves dimensions open: 'ids' nx128, 'sr' ?; pin them with --model NAME=FILE:INPUT=DIMS, "
        "for example --model 'bert=my b.onnx:mask=1x128,ids=1x128,sr=1'"
    )
