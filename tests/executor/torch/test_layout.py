"""Places of tensors: views, concatenations in place, and what must not share."""

import random

import pytest

from stageloom.edge_agent.executor.cuda.layout import Call, CallKind, TensorForm, lay_out
from stageloom.edge_agent.executor.torch.executor import GraphCache
from stageloom.shared.launch_list import Item

K = 1024


def _forms(names: str, channels: int = 4) -> dict[str, TensorForm]:
    return {name: TensorForm((1, channels, 8, 8), (), K) for name in names}


def _items(*streams: int) -> list[Item]:
    return [Item(0, (i,), stream, (), i) for i, stream in enumerate(streams)]


def test_what_only_a_concatenation_reads_lies_in_its_place_there() -> None:
    """a and b are made and joined as c; d is made from c."""
    calls = [
        Call(0, CallKind.KERNEL, ("x",), ("a",)),
        Call(0, CallKind.KERNEL, ("x",), ("b",)),
        Call(0, CallKind.CONCAT, ("a", "b"), ("c",), 1),
        Call(0, CallKind.KERNEL, ("c",), ("d",)),
    ]
    forms = {**_forms("xabd"), "c": TensorForm((1, 8, 8, 8), (), 2 * K)}
    found = lay_out(_items(0), calls, {"x"}, forms)
    assert {name: (s.of, s.start) for name, s in found.slices.items()} == {"a": ("c", 0), "b": ("c", 4)}
    assert set(found.offsets) == {"c", "d"}
    assert found.nbytes == 3 * K


def test_a_concatenation_of_concatenations_nests() -> None:
    calls = [
        Call(0, CallKind.KERNEL, ("x",), ("a",)),
        Call(0, CallKind.KERNEL, ("x",), ("b",)),
        Call(0, CallKind.CONCAT, ("a", "b"), ("c",), 1),
        Call(0, CallKind.KERNEL, ("x",), ("e",)),
        Call(0, CallKind.CONCAT, ("c", "e"), ("f",), 1),
    ]
    forms = {
        **_forms("xabe"),
        "c": TensorForm((1, 8, 8, 8), (), 2 * K),
        "f": TensorForm((1, 12, 8, 8), (), 3 * K),
    }
    found = lay_out(_items(0), calls, {"x"}, forms)
    assert {name: (s.of, s.start) for name, s in found.slices.items()} == {
        "a": ("c", 0),
        "b": ("c", 4),
        "c": ("f", 0),
        "e": ("f", 8),
    }
    assert set(found.offsets) == {"f"}


@pytest.mark.parametrize("why", ["read elsewhere", "at a border", "joined twice", "a view"])
def test_what_something_else_needs_is_copied(why: str) -> None:
    calls = [
        Call(0, CallKind.KERNEL, ("x",), ("a",)),
        Call(0, CallKind.KERNEL, ("x",), ("b",)),
    ]
    borders = {"x"}
    if why == "read elsewhere":
        calls.append(Call(0, CallKind.KERNEL, ("a",), ("d",)))
    if why == "at a border":
        borders.add("a")
    if why == "a view":
        calls[0] = Call(0, CallKind.VIEW, ("x",), ("a",))
    reads = ("a", "a", "b") if why == "joined twice" else ("a", "b")
    calls.append(Call(0, CallKind.CONCAT, reads, ("c",), 1))
    forms = {**_forms("xabd"), "c": TensorForm((1, 12, 8, 8), (), 3 * K)}
    found = lay_out(_items(0), calls, borders, forms)
    assert set(found.slices) == {"b"}


def test_a_view_keeps_what_it_views_alive() -> None:
    """v views a; b is made while v is still to be read, so it must not lie where a does."""
    calls = [
        Call(0, CallKind.KERNEL, ("x",), ("a",)),
        Call(0, CallKind.VIEW, ("a",), ("v",)),
        Call(0, CallKind.KERNEL, ("x",), ("b",)),
        Call(0, CallKind.KERNEL, ("v", "b"), ("c",)),
    ]
    found = lay_out(_items(0), calls, {"x", "c"}, _forms("xabc"))
    assert set(found.offsets) == {"a", "b"}
    assert found.nbytes == 2 * K


def test_branches_written_into_one_result_keep_it_alive_from_the_first_on() -> None:
    """The joined tensor is written on two streams; nothing of either stream may lie in it meanwhile."""
    items = [Item(0, (0,), 0, (), 0), Item(0, (1,), 1, (), 0), Item(0, (2,), 0, (1,), 1)]
    calls = [
        Call(0, CallKind.KERNEL, ("x",), ("p",)),
        Call(0, CallKind.KERNEL, ("p",), ("a",)),
        Call(1, CallKind.KERNEL, ("x",), ("q",)),
        Call(1, CallKind.KERNEL, ("q",), ("b",)),
        Call(2, CallKind.CONCAT, ("a", "b"), ("c",), 1),
    ]
    forms = {**_forms("xpqab"), "c": TensorForm((1, 8, 8, 8), (), 2 * K)}
    found = lay_out(items, calls, {"x"}, forms)
    assert set(found.slices) == {"a", "b"}
    assert found.nbytes == 4 * K


def test_pools_of_graphs_are_kept_by_use_and_bounded_by_bytes() -> None:
    cache: GraphCache[str] = GraphCache(10)
    assert cache.put("A", "a", 4) == cache.put("B", "b", 4) == {}
    cache.touch("A")
    assert cache.put("C", "c", 4) == {"b": 4}
    assert cache.put("D", "d", 20) == {"a": 4, "c": 4}, "the newcomer stays, however large"
    assert cache.nbytes == 20
    cache.drop("D", "d")
    cache.drop("D", "d")
    assert cache.nbytes == 0


def test_a_pool_counts_until_its_last_graph_is_gone_and_is_given_up_as_a_whole() -> None:
    cache: GraphCache[str] = GraphCache(10)
    cache.put("A", "a", 6)
    cache.put("A", "b", 0)
    cache.drop("A", "a")
    assert cache.nbytes == 6
    assert cache.has_room("A", 10) and not cache.has_room("B", 5)
    cache.put("A", "c", 1)
    assert cache.put("B", "d", 4) == {"b": 7, "c": 7}
    assert cache.put("B", "e", 7, wanted=False) == {"e": 11}, "what nobody has asked for gives way"
    assert cache.nbytes == 11, "its pool has grown all the same"


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_holds_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    cache: GraphCache[int] = GraphCache(100)
    held: dict[int, tuple[int, set[int]]] = {}
    for key in range(200):
        pool, grown = rng.randrange(20), rng.randint(0, 60)
        size, keys = held.get(pool, (0, set()))
        held[pool] = size + grown, keys | {key}
        given_up = cache.put(pool, key, grown)
        held = {pool: of for pool, of in held.items() if not of[1] <= given_up.keys()}
        assert not any(keys & given_up.keys() for _, keys in held.values())
        assert cache.nbytes == sum(size for size, _ in held.values())
        assert cache.nbytes <= 100 or len(held) == 1
