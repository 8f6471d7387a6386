"""The table of verbs: each wish is one type, one verb, one handler; paths and names tell them apart."""

from collections import Counter
from importlib import import_module
from pkgutil import iter_modules

from stageloom.planner import schema
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.routes import ROUTES
from stageloom.planner.schema.base import Request


def requests() -> set[type[Request]]:
    """Every request that the schema declares."""
    for module in iter_modules(schema.__path__):
        import_module(f"{schema.__name__}.{module.name}")
    return {kind for kind in Request.__subclasses__() if kind.__module__.startswith(schema.__name__)}


def test_each_request_exists_once_and_belongs_to_one_verb() -> None:
    assert Counter(route.request for route in ROUTES) == Counter(requests())
    shapes = Counter(
        (route.method, route.path_fields, route.other_fields, route.request.__doc__)
        for route in ROUTES
        if route.other_fields and route.request.__doc__
    )
    assert [shape for shape, number in shapes.items() if number > 1] == []


def test_each_verb_has_one_handler_and_a_name_and_place_of_its_own() -> None:
    assert len({handler_of(route) for route in ROUTES}) == len(ROUTES)
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_what_a_path_names_is_a_field_of_its_request() -> None:
    for route in ROUTES:
        assert set(route.path_fields) <= set(route.request.__struct_fields__)
