"""Predictions of the twin: a plan simulated where searches run, and what was measured since."""

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.api.jobs import Job
from stageloom.planner.api.work import changed, computed, waited
from stageloom.planner.schema import prediction as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.predictions import keep_prediction, newest_predictions
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError

if TYPE_CHECKING:
    from stageloom.planner.twin.simulation import Simulation

_WALL_S: Final = 0.5  # between two looks at whether it should end


@handles(routes.PREDICTION_LIST)
def prediction_list(
    api: ApiContext, request: schema.PredictionListRequest, call: ApiCall
) -> "Page[schema.PredictionInfo] | Future[Page[schema.PredictionInfo]]":
    return api.apart(prediction_page, request)


def prediction_page(store: ReadStore, request: schema.PredictionListRequest) -> Page[schema.PredictionInfo]:
    """One page of predictions with what was measured since.

    Raises:
        InputError: there is no such device, or `after` is no page's `next`.
    """
    from stageloom.planner.twin.predictions import measured_since  # numpy, which few requests need

    if request.device is not None:
        store.read(device_info, request.device)
    found = store.read(
        newest_predictions, request.device, before=position(request.after), limit=request.limit + 1
    )
    items = tuple(measured_since(store, found[: request.limit]))
    return Page(items=items, next=str(items[-1].number) if len(found) > request.limit else "")


@handles(routes.PREDICTION_CREATE)
def prediction_create(api: ApiContext, request: schema.PredictionCreateRequest, call: ApiCall) -> object:
    _check(request)
    api.reader.read(plan_info, request.plan)  # known before a job begins
    return partial(_predict, api, request)


def _check(request: schema.PredictionCreateRequest) -> None:
    """Raises:
    InputError: fields do not go together, or one is missing.
    """
    if request.rates and request.recording is not None:
        raise InputError("both --rate and --recording say what arrives", remedy="give one of them")
    named = [rate.model for rate in request.rates]
    for model in named:
        if named.count(model) > 1:
            raise InputError(f"the rates name {model} twice", remedy="give each model once")
    if request.arrivals is not None and not request.rates:
        raise InputError(
            f"--arrivals {request.arrivals.value} says how the tasks of --rate arrive, "
            "and there is no --rate",
            remedy="give --rate MODEL=PER_S, or leave --arrivals out",
        )
    if request.device is not None:
        return
    if not request.twin:
        raise InputError("nothing says what device to simulate", remedy="give --device or --twin")
    if not request.rates and request.recording is None:
        raise InputError("nothing says what arrives", remedy="give --rate, --recording or --device")


def _predict(api: ApiContext, request: schema.PredictionCreateRequest, job: Job) -> schema.PredictionInfo:
    from stageloom.planner.twin.doubts import doubt_of
    from stageloom.planner.twin.prepared import prepared  # numpy, which few requests need

    job.progress("reading what is known")
    asked = api.apart(prepared, request, api.clock.wall_us())
    made, simulation = waited(job, asked) if isinstance(asked, Future) else asked
    predicted = _simulated(api, simulation, job)
    doubt = doubt_of(predicted, None, simulation.bound.plan.lanes)
    made = structs.replace(made, predicted=predicted, doubt=doubt)
    number = changed(api, keep_prediction, made) if request.keep else 0
    return structs.replace(made, number=number)


def _simulated(api: ApiContext, simulation: "Simulation", job: Job) -> dict[str, float]:
    from stageloom.planner.twin.simulation import PARTS, advanced, begun, figures_of

    state = computed(api, job, begun, simulation)
    windows = []
    while state.done < PARTS:
        job.progress("simulating", done=state.done, size=PARTS)
        state = computed(api, job, advanced, state, simulation.seconds, _WALL_S)
        windows.append(state.windows)
    return computed(api, job, figures_of, windows)
