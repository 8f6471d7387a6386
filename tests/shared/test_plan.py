"""Plans: round trips, golden bytes, and every way in which bytes are refused."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.digest import canonical, digest_bytes
from stageloom.shared.errors import PlanError
from stageloom.shared.launch_list import Barrier
from stageloom.shared.partition import parse_splits
from stageloom.shared.plan import (
    MAX_PLAN_BYTES,
    CombinedBlock,
    ExecutorOptions,
    IssueOrder,
    Member,
    ModelPlan,
    Place,
    PlacementPolicy,
    Plan,
    QueuePlan,
    QueueRule,
    Resource,
    StepChoice,
    Wait,
    decode_plan,
    plan_text,
)
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.stage_string import parse
from tests.shared.randoms import name_digest, plans, random_dag, random_stages, thorough

GOLDEN = Path(__file__).parents[1] / "data/golden"


def full_plan() -> Plan:
    """A plan in which no field has its default."""
    return Plan(
        models=(
            ModelPlan(
                name="inception_v3",
                artifact=name_digest("inception_v3"),
                cuts=(12, 40, 77),
                replicas=2,
                batch=4,
                batch_max_delay_us=2_000,
                launch_interval_us=33_000,
                work_conserving=False,
                weight=3,
                queue=QueuePlan(rule=QueueRule.PRIORITY, max_tasks=64, max_bytes=1 << 30),
            ),
            ModelPlan(name="squeezenet", artifact=name_digest("squeezenet")),
        ),
        combined=(
            CombinedBlock((Member(0, 0, 0), Member(1, 0, 0)), parse("0..11/12|20/*13|14/15-17|18-19")),
            CombinedBlock((Member(0, 1, 3),), parse("~0:0-4;1:5-200;0:201")),
        ),
        lanes=2,
        run_ahead=3,
        step_choice=StepChoice.WEIGHTED,
        wait=Wait.TIMEOUT,
        wait_timeout_us=500,
        max_skips=9,
        barrier=Barrier.DATA,
        executor=ExecutorOptions(name="torch_cuda", intra_op_threads=2, precision="fp16"),
    )


def full_plan_2() -> Plan:
    """As `full_plan`, with two executors and two pinned lanes."""
    plan = full_plan()
    return dataclasses.replace(
        plan,
        combined=(plan.combined[0], dataclasses.replace(plan.combined[1], executor=1)),
        further_executors=(ExecutorOptions(name="openvino", intra_op_threads=2),),
        resources=(Resource(cores=(0, 2)), Resource()),
        lane_resources=(0, 1),
    )


def placed_plan() -> Plan:
    """As `full_plan_2`, with blocks that are placed and a resource with a memory of its own."""
    plan = full_plan_2()
    own, other = plan.combined
    return dataclasses.replace(
        plan,
        combined=(
            dataclasses.replace(own, resources=(0,), further_places=(Place(1, 1, parse("0..20")),)),
            dataclasses.replace(other, resources=(1,), further_places=(Place(0),)),
        ),
        wait=Wait.NONE,
        resources=(Resource(cores=(0, 2)), Resource(memory=1)),
        placement=PlacementPolicy.DMDA,
    )


def split_plan() -> Plan:
    """As `full_plan_2`, with operators that are split and groups on both resources."""
    plan = full_plan_2()
    return dataclasses.replace(
        plan,
        models=(
            dataclasses.replace(plan.models[0], splits=parse_splits("0c96,12-14h28,20-40n1")),
            plan.models[1],
        ),
        combined=(
            dataclasses.replace(plan.combined[0], schedule=parse("0..4/5..10@0|1/11@1|12/13..20@1")),
            plan.combined[1],
        ),
        resources=(Resource(cores=(0, 2)), Resource(executor=1)),
    )


def lists(plan: Plan | None = None) -> Any:
    return msgpack.unpackb((plan or full_plan()).wire)


@pytest.mark.promise("stage-strings-plans-survive")
@thorough
@given(plans)
def test_every_plan_survives_its_wire_form(plan: Plan) -> None:
    again = decode_plan(plan.wire, plan.digest)
    assert again == plan
    assert (again.wire, again.digest) == (plan.wire, plan.digest)


@pytest.mark.promise("message-type-telemetry-row")
def test_golden_bytes_of_version_1_stay_decodable() -> None:
    for name, plan in {"plan_1_full": full_plan(), "plan_1_defaults": Plan(models=(), combined=())}.items():
        golden = (GOLDEN / f"{name}.bin").read_bytes()
        assert decode_plan(golden) == plan
        assert plan.wire == golden
        assert plan.digest == (GOLDEN / f"{name}.digest").read_text().strip()


def test_golden_bytes_of_version_2_stay_decodable() -> None:
    golden = (GOLDEN / "plan_2_full.bin").read_bytes()
    assert decode_plan(golden) == full_plan_2()
    assert full_plan_2().wire == golden
    assert full_plan_2().digest == (GOLDEN / "plan_2_full.digest").read_text().strip()


def test_golden_bytes_of_a_plan_that_places_its_blocks_stay_decodable() -> None:
    golden = (GOLDEN / "plan_2_placed.bin").read_bytes()
    assert decode_plan(golden) == placed_plan()
    assert placed_plan().wire == golden
    assert placed_plan().digest == (GOLDEN / "plan_2_placed.digest").read_text().strip()


def test_golden_bytes_of_a_plan_that_splits_operators_stay_decodable() -> None:
    golden = (GOLDEN / "plan_3_split.bin").read_bytes()
    assert decode_plan(golden) == split_plan()
    assert split_plan().wire == golden
    assert split_plan().digest == (GOLDEN / "plan_3_split.digest").read_text().strip()


def test_a_plan_shows_its_splits_and_who_runs_groups() -> None:
    text = plan_text(split_plan())
    assert " splits=0c96,12-14h28,20-40n1\n" in text
    assert "resource 1  cores=any lanes=1 executor=1\n" in text
    assert "0..4/5..10@0|1/11@1|12/13..20@1" in text


def test_what_version_3_adds_is_not_taken_where_nothing_is_split() -> None:
    wire = lists(split_plan())
    wire[8:] = [wire[8], wire[9], [-1, -1], [[], []]]
    wire[2][0][1] = [0, -4, 20]
    with pytest.raises(PlanError, match="canonical"):
        decode_plan(canonical(wire))


@pytest.mark.parametrize(
    "splits", [[0], [3, 0], [9, 1], [9, 0, 0], [1 << 30, 1], [-1, 1], ["0", 1], 7, None, [0, 1, 0, 1 << 21]]
)
def test_splits_beyond_their_bounds_are_refused(splits: Any) -> None:
    wire = lists(split_plan())
    wire[-1][0] = splits
    with pytest.raises(PlanError):
        decode_plan(canonical(wire))


@pytest.mark.parametrize(
    "text", ["0c", "c96", "1-0c9x", "0c09", "00c9", "0-0c9", "0c9,", "0c9;1c9", "0z9", "0c0"]
)
def test_splits_have_one_spelling(text: str) -> None:
    with pytest.raises(PlanError):
        parse_splits(text)


def test_the_issue_order_is_on_the_wire_only_where_it_is_not_the_devices_own() -> None:
    """So plans that say nothing of it keep their digest, and older devices read them."""
    plan = full_plan()
    row = msgpack.unpackb(plan.wire)[4]
    assert len(row) == 3
    scheduled = dataclasses.replace(
        plan, executor=dataclasses.replace(plan.executor, issue=IssueOrder.SCHEDULE)
    )
    assert msgpack.unpackb(scheduled.wire)[4] == [*row, "schedule"]
    assert decode_plan(scheduled.wire) == scheduled and scheduled.digest != plan.digest
    assert " issue=schedule " in plan_text(scheduled) and "issue=" not in plan_text(plan)
    for wrong in (["device"], ["backwards"], [1], ["schedule", "schedule"]):
        lists = msgpack.unpackb(plan.wire)
        lists[4] += wrong
        with pytest.raises(PlanError):
            decode_plan(canonical(lists))


def test_a_plan_that_version_1_can_express_is_not_taken_in_the_form_of_version_2() -> None:
    wire = lists(full_plan_2())
    for block in wire[2]:
        block[2] = 0
    with pytest.raises(PlanError, match="canonical"):
        decode_plan(canonical([*wire[:5], [], [], []]))


def leaves(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


HOSTILE: list[Any] = [
    None, True, False, -1, 1 << 63, 0.0, 1.0, float("nan"), float("inf"), "", "full", "x" * 400, "\n", b"",
    b"0" * 32, [], [[]], [None], {}, "0" * 32, [0] * 32, [1] * 5, msgpack.ExtType(5, b"a"),
    msgpack.Timestamp(1, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "whole", [full_plan(), full_plan_2(), placed_plan()], ids=["version 1", "version 2", "placed"]
)
def test_no_field_takes_a_value_of_another_kind_without_refusing_or_keeping_it_exactly(whole: Plan) -> None:
    """Put every hostile value into every place: either refused, or a plan with exactly those bytes."""
    accepted = 0
    for path in leaves(lists(whole)):
        for hostile in HOSTILE:
            wire = lists(whole)
            place = [wire]
            for index in (0, *path)[:-1]:
                place = place[index]
            place[(0, *path)[-1]] = hostile
            packed = msgpack.packb(place[0] if not path else wire)
            try:
                plan = decode_plan(packed)
            except PlanError as error:
                assert len(str(error)) < 400 and "\n" not in str(error)
            else:
                accepted += 1
                assert plan.wire == packed
    assert 0 < accepted < 600


@pytest.mark.promise("decoder-stage-string-parser")
@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_are_refused_or_another_plan(seed: int) -> None:
    random, wire = Random(seed), full_plan().wire
    for _ in range(200):
        flipped = bytearray(wire)
        for _ in range(random.choice([1, 1, 2, 8])):
            flipped[random.randrange(len(wire))] ^= 1 << random.randrange(8)
        try:
            plan = decode_plan(bytes(flipped))
        except PlanError:
            continue
        assert plan.wire == flipped


def test_every_truncation_and_every_trailing_byte_is_refused() -> None:
    wire = full_plan().wire
    for size in range(len(wire)):
        with pytest.raises(PlanError):
            decode_plan(wire[:size])
    for byte in range(256):
        with pytest.raises(PlanError):
            decode_plan(wire + bytes([byte]))


@thorough
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PlanError):
        decode_plan(raw)


def test_deep_nesting_is_refused_like_any_other_bytes() -> None:
    for depth in (600, 90_000):
        with pytest.raises(PlanError):
            decode_plan(b"\x91" * depth + b"\xc0")


def test_more_bytes_than_the_bound_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(PlanError, match="larger than"):
        decode_plan(b"\x90" * (MAX_PLAN_BYTES + 1))


def test_empty_lists_within_the_bound_are_refused() -> None:
    count = MAX_PLAN_BYTES - 5
    with pytest.raises(PlanError):
        decode_plan(b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count)


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_size_that_only_claims_to_be_large_is_refused(head: bytes) -> None:
    with pytest.raises(PlanError):
        decode_plan(head + b"\x00" * 20)


def test_duplicate_keys_are_refused_as_a_plan_holds_no_mapping() -> None:
    with pytest.raises(PlanError, match="max_map_len"):
        decode_plan(b"\x82\xa1a\x01\xa1a\x02")


@pytest.mark.promise("decoder-stage-string-parser")
def test_ranges_cannot_expand_without_bound_over_the_whole_plan() -> None:
    wire = lists()
    wire[2] = [[[0, 0, i], [0, -4, 65535]] for i in range(3)]
    with pytest.raises(PlanError, match="expand to more than"):
        decode_plan(canonical(wire))
    wire[2] = wire[2][:2]
    assert len(decode_plan(canonical(wire)).combined) == 2


def test_another_encoding_of_the_same_plan_is_refused() -> None:
    wire = full_plan().wire
    assert wire[:2] == b"\x95\x01"
    for other in (b"\x95\xcc\x01", b"\x95\xd0\x01", b"\xdc\x00\x05\x01"):
        with pytest.raises(PlanError, match="canonical"):
            decode_plan(other + wire[2:])


def test_members_are_triples() -> None:
    wire = lists()
    wire[2][0][0] = [0, 0, 0, 1]
    with pytest.raises(PlanError, match="triples"):
        decode_plan(canonical(wire))


def test_another_version_is_named() -> None:
    wire = lists()
    wire[0] = 4
    with pytest.raises(PlanError, match="plan format 4 is none of 1 to 3; upgrade the older side"):
        decode_plan(canonical(wire))


def test_bytes_with_another_digest_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(PlanError, match="do not have the digest"):
        decode_plan(b"\x91" * 1000, digest_bytes([b"other"]))


OUT_OF_BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("lanes is 0", {"lanes": 0}),
    ("lanes is 17", {"lanes": 17}),
    ("run_ahead is 0", {"run_ahead": 0}),
    ("wait_timeout_us is -1", {"wait_timeout_us": -1}),
    ("max_skips is 0", {"max_skips": 0}),
    ("66 models", {"models": full_plan().models * 33}),
    ("4098 combined blocks", {"combined": (CombinedBlock((), parse("0")),) * 4098}),
    ("executor is not", {"executor": ExecutorOptions(name="")}),
    ("intra_op_threads is 0", {"executor": ExecutorOptions(intra_op_threads=0)}),
    ("precision is not", {"executor": ExecutorOptions(precision="x" * 17)}),
    ("member is -1", {"combined": (CombinedBlock((Member(-1, 0, 0),), parse("0")),)}),
    ("names model 2", {"combined": (CombinedBlock((Member(2, 0, 0),), parse("0")),)}),
    ("memory node is 16", {"resources": (Resource(memory=16),)}),
    ("too many resources", {"combined": (CombinedBlock((), parse("0"), 0, (), (Place(0),) * 17),)}),
    ("resource is 17", {"combined": (CombinedBlock((), parse("0"), 0, (), (Place(17),)),)}),
]
MODEL_OUT_OF_BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("replicas is 0", {"replicas": 0}),
    ("replicas is 65", {"replicas": 65}),
    ("batch is 0", {"batch": 0}),
    ("batch_max_delay_us is -1", {"batch_max_delay_us": -1}),
    ("launch_interval_us is 3600000001", {"launch_interval_us": 3_600_000_001}),
    ("weight is 0", {"weight": 0}),
    ("cut is 0", {"cuts": (0,)}),
    ("model name is not", {"name": ""}),
    ("model name is not", {"name": "two\nlines"}),
    ("model name is not", {"name": "x" * 129}),
    ("max_tasks is 0", {"queue": QueuePlan(max_tasks=0)}),
    ("max_bytes is 0", {"queue": QueuePlan(max_bytes=0)}),
]


@pytest.mark.parametrize(("message", "change"), OUT_OF_BOUNDS)
def test_a_field_outside_its_bounds_is_refused_by_name(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=message):
        decode_plan(dataclasses.replace(full_plan(), **change).wire)


@pytest.mark.parametrize(("message", "change"), MODEL_OUT_OF_BOUNDS)
def test_a_models_field_outside_its_bounds_is_refused_by_name(message: str, change: dict[str, Any]) -> None:
    first, *others = full_plan().models
    plan = dataclasses.replace(full_plan(), models=(dataclasses.replace(first, **change), *others))
    with pytest.raises(PlanError, match=message):
        decode_plan(plan.wire)


def test_a_plan_with_an_unwritable_schedule_has_no_wire_form() -> None:
    with pytest.raises(PlanError, match="0 operators"):
        _ = Plan(models=(), combined=(CombinedBlock((), StageSchedule(())),)).wire


def test_the_digest_depends_on_every_field() -> None:
    plan = full_plan()
    digests = {plan.digest}
    paths = [path for path in leaves(lists()) if path]
    for path in paths:
        wire = lists()
        place = wire
        for index in path[:-1]:
            place = place[index]
        place[path[-1]] = "changed"
        digests.add(digest_bytes([msgpack.packb(wire)]))
    assert len(digests) == 1 + len(paths)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_of_three_models_takes_at_most_a_kibibyte(seed: int) -> None:
    """Three combined blocks over the operators of table II, each with a schedule that has few ranges."""
    random = Random(seed)
    sizes = {"inception_v3": 120, "resnet50": 87, "squeezenet": 51}
    models = tuple(
        ModelPlan(name=name, artifact=name_digest(name), cuts=(ops // 3, 2 * ops // 3))
        for name, ops in sizes.items()
    )
    combined = tuple(
        CombinedBlock(
            tuple(Member(model, 0, block) for model in range(3)),
            random_stages(random, random_dag(random, [ops // 3 for ops in sizes.values()], 0.1)),
        )
        for block in range(3)
    )
    assert len(Plan(models=models, combined=combined).wire) <= 1024


def test_the_text_names_every_model_block_and_stage_string() -> None:
    text = plan_text(full_plan())
    assert "combined inception_v3#0.0 squeezenet#0.0  0..11/12|20/*13|14/15-17|18-19\n" in text
    assert "combined inception_v3#1.3  ~0:0-4;1:5-200;0:201\n" in text
    assert "cuts=12,40,77 replicas=2 batch=4 interval_us=33000" in text
    assert text.count("\n") == 5


def test_the_text_names_executors_and_resources_where_a_plan_has_several() -> None:
    text = plan_text(full_plan_2())
    assert "\nexecutor 1  openvino threads=2 precision=fp32\n" in text
    assert "\nresource 0  cores=0,2 lanes=0\nresource 1  cores=any lanes=1\n" in text
    assert "combined inception_v3#1.3 executor=1  ~0:0-4;1:5-200;0:201\n" in text


def test_the_text_says_how_blocks_are_placed_and_where() -> None:
    text = plan_text(placed_plan())
    assert " barrier=data placement=dmda\n" in text
    assert "\nresource 1  cores=any lanes=1 memory=1\n" in text
    assert "#0.0 executor=0 on=0  0..11/12|20/*13|14/15-17|18-19  @1 executor=1 0..20\n" in text
    assert "#1.3 executor=1 on=1  ~0:0-4;1:5-200;0:201  @0 executor=0\n" in text


def test_structure_is_the_plan_but_for_its_launch_intervals() -> None:
    plan = full_plan()
    faster = dataclasses.replace(
        plan, models=tuple(dataclasses.replace(one, launch_interval_us=7) for one in plan.models)
    )
    assert faster.digest != plan.digest and faster.structure == plan.structure
    other = dataclasses.replace(plan, lanes=plan.lanes + 1)
    assert other.structure != plan.structure
