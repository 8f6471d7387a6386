"""Learned policies: which are kept, those from files, and as files."""

from typing import Annotated, Any, Final

from msgspec import Meta

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.planner.schema.prediction import Twin
from stageloom.shared.messages.base import Count, DeviceName, DigestText, Line, MicroSeconds, Real, ShortText

MODELS_MAX: Final = 256
"""Models that one policy is trained on."""

DigestBeginning = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[0-9a-f]*\Z")]


class PolicyListRequest(Request, frozen=True, kw_only=True):
    """Policies, newest first."""

    after: After = ""
    limit: PageSize = 64


class PolicyCriterion(Reply, frozen=True, kw_only=True):
    """One thing that a check asks of a policy; `reason` is a sentence, also where it passed."""

    name: ShortText
    passed: bool
    reason: Line
    figures: dict[ShortText, Real]


class PolicyLoadCheck(Reply, frozen=True, kw_only=True):
    """A policy beside the best seed under one load that its training never saw.

    `seed`: that plan's name. `figure`: what decides there, `throughput` or, where that is level, `p99`.
    `ratio`: above 1 where the policy is better, mean over arrivals; `low` and `high` end its 95 % interval.
    """

    load: ShortText
    seed: ShortText
    figure: ShortText
    ratio: Real
    low: Real
    high: Real
    policy_per_s: Real
    seed_per_s: Real
    policy_p99_s: Real
    seed_p99_s: Real


class PolicyVerdict(Reply, frozen=True, kw_only=True):
    """Whether a policy passed its check, and why not; `twin` and `arrivals` say what it was checked on."""

    policy: DigestText
    passed: bool
    reason: Line
    criteria: Annotated[tuple[PolicyCriterion, ...], Meta(max_length=16)]
    loads: Annotated[tuple[PolicyLoadCheck, ...], Meta(max_length=64)]
    twin: Line
    arrivals: Line


class PolicyCheckRequest(Request, frozen=True, kw_only=True):
    """Check a policy of maddpg on a twin, and keep the verdict. `policy`: its digest's beginning.

    The twin runs the plan that the policy was trained on; of a policy that does not tell it, or was adopted
    from another device class, the plan of `device`, where the policy is for that. `device` None: the first of
    the policy's class. `twin`: a device to simulate instead. `rates` None given: the loads are made of the
    rates of the policy's training.
    """

    policy: DigestBeginning
    device: DeviceName | None = None
    twin: Twin = ""
    rates: Annotated[tuple[ArrivalRate, ...], Meta(max_length=64)] = ()


class PolicyInfo(Reply, frozen=True, kw_only=True):
    """One trained policy; `device_class` empty: for any.

    `artifacts` are those of its models, with the models' names where these are known. `ratio` is what a task
    costs under it over what it costs without, on blocks or arrivals that it did not learn from. `verdict`:
    that of its check, None before one. `unchecked`: an operator lets it plan without having passed.
    `withheld`: why it has no say, empty where it has one. `unshown`: what of it cannot be shown, and why.
    """

    digest: DigestText
    policy: ShortText
    device_class: ShortText
    artifacts: Annotated[dict[str, str], Meta(max_length=MODELS_MAX)]
    settings: Annotated[dict[str, Any], Meta(max_length=256)]
    versions: Annotated[dict[str, ShortText], Meta(max_length=64)]
    ratio: Real
    steps: Count
    trained_at_us: MicroSeconds
    verdict: PolicyVerdict | None = None
    unchecked: bool = False
    withheld: Line = ""
    unshown: Line = ""


class PolicyImportRequest(Request, frozen=True, kw_only=True):
    """Keep a policy that was trained elsewhere; the body is its checkpoint.

    With `device` it is adopted for that device's class and for the artifacts here with the same graphs, else
    kept for the class that it names. It has no say before it passed its check, unless it is `unchecked`.
    """

    device: DeviceName | None = None
    unchecked: bool = False


class PolicyImportReply(Reply, frozen=True, kw_only=True):
    """The policy's digest, its class here, the class that it was trained for, and its models' artifacts.

    `verdict`: that of its check, where whoever imports it has it checked at once.
    """

    policy: DigestText
    device_class: ShortText
    trained_for: ShortText
    models: Annotated[tuple[DigestText, ...], Meta(max_length=64)]
    verdict: PolicyVerdict | None = None


class PolicyExportRequest(Request, frozen=True, kw_only=True):
    """A policy's checkpoint, by the beginning of its digest; of maddpg as `policy.import` takes it."""

    policy: DigestBeginning
