"""Models of the store."""

import shutil
import tempfile
from pathlib import Path

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.schema import model as schema
from stageloom.planner.schema.base import Done, Page
from stageloom.planner.store.models import model_detail, model_infos, named_models
from stageloom.shared.model_version import ModelReference


@handles(routes.MODEL_LIST)
def model_list(api: ApiContext, request: schema.ModelListRequest, call: ApiCall) -> Page[schema.ModelInfo]:
    infos = api.reader.read(model_infos, after=request.after, limit=request.limit + 1)
    shown = tuple(infos[: request.limit])
    last = str(ModelReference(shown[-1].model, shown[-1].version)) if len(infos) > request.limit else ""
    return Page(items=shown, next=last)


@handles(routes.MODEL_SHOW)
def model_show(api: ApiContext, request: schema.ModelShowRequest, call: ApiCall) -> schema.ModelDetail:
    return api.reader.read(model_detail, request.model)


@handles(routes.MODEL_ADD)
def model_add(api: ApiContext, request: schema.ModelAddRequest, call: ApiCall) -> schema.ModelAdded:
    assert call.upload is not None
    return api.store.add_model(request.model, call.upload, request.digest)


@handles(routes.MODEL_EXPORT)
def model_export(api: ApiContext, request: schema.ModelExportRequest, call: ApiCall) -> Path:
    (info,) = api.reader.read(named_models, [request.model])
    artifact = api.reader.load_artifact(info.digest)
    with (
        artifact.path.open("rb") as source,
        tempfile.NamedTemporaryFile(prefix=".export-", dir=api.config.data_dir, delete=False) as file,
    ):
        try:
            source.seek(artifact.onnx_offset)
            shutil.copyfileobj(source, file, 1 << 20)
        except BaseException:
            Path(file.name).unlink()
            raise
    return Path(file.name)


@handles(routes.MODEL_REMOVE)
def model_remove(api: ApiContext, request: schema.ModelRemoveRequest, call: ApiCall) -> Done:
    api.store.remove_model(request.model, force=request.force)
    return Done()
