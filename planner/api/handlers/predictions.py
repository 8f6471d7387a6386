"""Predictions of the twin."""

from concurrent.futures import Future

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.schema import prediction as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.predictions import newest_predictions
from stageloom.planner.store.store import ReadStore


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
