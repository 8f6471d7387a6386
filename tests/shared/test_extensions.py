"""What other distributions add: each broken one is named with its distribution, and harms no other."""

import sys
from pathlib import Path

import pytest

from stageloom.edge_agent.config import AgentConfig, ModelFile
from stageloom.edge_agent.executor.executors import added_executors, make_executor
from stageloom.edge_agent.executor.null import NullExecutor
from stageloom.edge_agent.lifecycle.alone import require_names
from stageloom.edge_agent.machine.doctor import extensions_check
from stageloom.edge_agent.machine.executors import added_problems, machine_facts
from stageloom.shared.errors import ExecutorError, ExtensionError, SettingError
from stageloom.shared.extensions import ExtensionGroup, extensions
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.costs import StageCosts
from stageloom.shared.search.interface import Budget, Limits
from stageloom.shared.search.job import SearchJob
from stageloom.shared.search.registry import (
    added_schedulers,
    help_line,
    reads_costs,
    require_scheduler,
    scheduler,
    searches,
)
from stageloom.shared.search.rivals import added_policies, policy
from tests.search.graphs import DIAMOND, model, union
from tests.shared.strangers import install

SCHEDULERS, EXECUTORS, POLICIES = (group.value for group in ExtensionGroup)
_MAKES = "from stageloom.shared.schedule import *\ndef mine(*_): return "
GREETING = "Says what it does.\n\nAnd more."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def call(name: str) -> object:
    return scheduler(name)(union(DIAMOND), StageCosts((1.0,) * 4), Limits(s=1), Budget())


def test_an_added_scheduler_is_known_by_metadata_alone_and_imported_when_it_is_used(folder: Path) -> None:
    source = f'''
from stageloom.shared.search.baselines import sequential

def mine(graph, costs, limits, budget):
    """{GREETING}"""
    return sequential(graph, costs, limits, budget)
'''
    install(folder, "good-one", SCHEDULERS, {"mine": "good_one:mine"}, source)
    assert added_schedulers().usable["mine"].distribution == "good-one 1.0"
    require_scheduler("mine")
    assert reads_costs("mine") and not searches("mine")
    assert "good_one" not in sys.modules
    assert call("mine") == call("sequential")
    assert help_line("mine") == "Says what it does"
    with pytest.raises(SettingError, match=r"no scheduler 'nine'; choose one of beam, .*mine"):
        require_scheduler("nine")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, r"does not load: ModuleNotFoundError: No module named 'strange_one'"),
        ("raise SystemExit(3)", "does not load: SystemExit: 3"),
        ("raise ValueError('no licence')", "does not load: ValueError: no licence"),
        ("other = 3", "does not load: AttributeError"),
        ("mine = 3", "does not load: TypeError: a scheduler is a function, not int"),
        ("class mine: pass", "a scheduler is a function, not type"),
        ("def mine(graph, costs, limits, budget): return 1 / 0", "failed: ZeroDivisionError"),
        ("def mine(graph, costs): return None", "failed: TypeError"),
        ("def mine(*_): return None", "made a wrong schedule: answers: a NoneType is no schedule"),
        (
            _MAKES + "stage_schedule([[[0]]])",
            "made a wrong schedule: complete: operator 1 never runs",
        ),
        (
            _MAKES + "stage_schedule([[[3]], [[0]], [[1]], [[2]]])",
            "made a wrong schedule: legal",
        ),
        (
            _MAKES + "stage_schedule([[[0]], [[1], [2]], [[3]]])",
            "made a wrong schedule: limits: stage 1 has 2 groups, more than s = 1",
        ),
        (
            _MAKES + "StageSchedule((Stage((('a',),)),))",
            "made a wrong schedule: answers: a schedule of wrong values",
        ),
    ],
)
def test_a_broken_scheduler_is_named_with_its_distribution_and_a_remedy(
    folder: Path, body: str | None, said: str
) -> None:
    install(folder, "strange-one", SCHEDULERS, {"mine": "strange_one:mine"}, body)
    with pytest.raises(ExtensionError, match=said) as refused:
        call("mine")
    assert str(refused.value).startswith("mine of strange-one 1.0 ")
    assert refused.value.remedy == "repair that package, or uninstall it"
    call("ios")
    sys.modules.pop("strange_one", None)


def test_names_that_are_taken_or_not_to_be_typed_are_refused_and_the_rest_stands(folder: Path) -> None:
    install(
        folder, "bold-one", SCHEDULERS, {"ios": "bold_one:a", "Mine!": "bold_one:b", "fine": "bold_one:c"}
    )
    install(folder, "late-one", SCHEDULERS, {"both": "late_one:a"})
    install(folder, "first-one", SCHEDULERS, {"both": "first_one:a"})
    found = added_schedulers()
    assert list(found.usable) == ["fine"]
    assert {name: str(error).partition(";")[0] for name, error in found.problems.items()} == {
        "Mine!": "Mine! of bold-one 1.0 has a name that is not of lower-case letters, digits and _",
        "both": found.problems["both"].cause,
        "ios": "ios of bold-one 1.0 has the name of one of Stageloom's own",
    }
    assert all(name in str(found.problems["both"]) for name in ("first-one 1.0", "late-one 1.0"))
    with pytest.raises(ExtensionError, match="both of "):
        require_scheduler("both")
    require_scheduler("ios")


def test_an_entry_point_that_is_no_module_and_name_is_a_problem_and_a_joined_agent_looks_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(folder, "odd-one", EXECUTORS, {"odd": "my-pkg:f", "gone": "gone_two:f"})
    found = added_executors()
    assert list(found.usable) == ["gone"]
    assert found.problems["odd"].cause == "odd of odd-one 1.0 points to 'my-pkg:f', which is no module:name"
    told = added_problems()
    assert list(told) == ["gone", "odd"] and all(told.values())
    require_names(AgentConfig(executor="odd"))
    assert found.problems["odd"].cause in caplog.text
    with pytest.raises(ExtensionError, match=r"odd of odd-one 1.0 points to"):
        require_names(AgentConfig(executor="odd", models=(ModelFile(name="a", path="a"),)))


def test_an_added_policy_turns_one_search_into_another(folder: Path) -> None:
    source = """
from dataclasses import replace
from stageloom.shared.search.rivals import Rival
wide = Rival("two lanes", lambda job: replace(job, lanes=2), frozenset({"lanes"}))
wrong = Rival("nothing", lambda job: 3, frozenset())
other = 3
"""
    points = {name: f"policy_one:{name}" for name in ("wide", "wrong", "other")}
    install(folder, "policy-one", POLICIES, points, source)
    digest, graph = model("diamond", DIAMOND)
    job = SearchJob(models=(ModelChoice(name="diamond", artifact=digest, graph=graph),))
    assert list(added_policies().usable) == ["other", "wide", "wrong"]
    assert policy("wide").plan(job).lanes == 2 and policy("wide").decides == {"lanes"}
    with pytest.raises(ExtensionError, match=r"wrong of policy-one 1.0 returned a int, not a SearchJob"):
        policy("wrong").plan(job)
    with pytest.raises(ExtensionError, match="a policy is a Rival, not int"):
        policy("other")
    with pytest.raises(SettingError, match=r"there is no policy 'narrow'; choose one of batching, .*wide"):
        policy("narrow")


def test_an_agent_offers_an_added_executor_without_importing_it_and_makes_it_by_name(folder: Path) -> None:
    source = """
from stageloom.edge_agent.executor.null import NullExecutor
class Mine(NullExecutor):
    name = "mine"
class Misnamed(NullExecutor):
    name = "yours"
class Bare:
    name = "bare"
"""
    points = {"mine": "executor_one:Mine", "misnamed": "executor_one:Misnamed", "bare": "executor_one:Bare"}
    install(folder, "executor-one", EXECUTORS, {**points, "onnx": "executor_one:Mine"}, source)
    install(folder, "gone-one", EXECUTORS, {"gone": "gone_one:Gone"})
    assert added_problems() == {
        "bare": "",
        "gone": "the package of gone-one 1.0 is not there",
        "mine": "",
        "misnamed": "",
    }
    told = {fact.name: fact.problem for fact in machine_facts("onnx", 1).executors}
    assert told["mine"] == "" and told["gone"]
    require_names(AgentConfig(executor="mine"))
    assert "executor_one" not in sys.modules
    assert isinstance(make_executor("mine"), NullExecutor)
    with pytest.raises(ExecutorError, match=r"misnamed of executor-one 1.0 .*calls itself 'yours'"):
        make_executor("misnamed")
    with pytest.raises(ExecutorError, match=r"bare of executor-one 1.0 .*TypeError: it has no close"):
        make_executor("bare")
    with pytest.raises(ExecutorError, match=r"gone of gone-one 1.0 does not load: ModuleNotFoundError"):
        make_executor("gone")
    with pytest.raises(ExecutorError, match=r"no executor is called 'nine'; use one of null, .*mine"):
        make_executor("nine")
    found = extensions_check(added_executors())
    assert found.result == "warn"
    assert found.detail == "onnx of executor-one 1.0 has the name of one of Stageloom's own"


def test_nothing_is_added_where_nothing_is_installed() -> None:
    for group in ExtensionGroup:
        found = extensions(group, ())
        assert not found.usable and not found.problems
        assert extensions_check(found).detail == "none"
