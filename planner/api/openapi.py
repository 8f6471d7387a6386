"""The OpenAPI document of the routes: schemas from the structs, so that it says what is checked."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stageloom.planner.api.problem import MEDIA_TYPE
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.schema.base import Done
from stageloom.planner.schema.job import JobInfo, ProblemDetails
from stageloom.shared.version import __version__

_PROBLEM: Final = {
    "description": "Refused",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_EVENT: Final = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_ABOUT: Final = """The planner of Stageloom: devices, models, plans, and who may change them.

Errors are problem details (RFC 9457): `detail` is the cause, `remedy` what to do about it. What takes long is
answered with a job: follow `/v1/jobs/{job}/events`. A request that creates something may carry an
`Idempotency-Key`: sent again with it, it is carried out once. Lists come in pages: `next` of one is `after`
of the following."""


def document(routes: Sequence[Route[Any, Any]]) -> dict[str, Any]:
    """OpenAPI 3.1 for these routes."""
    types = [ProblemDetails, JobInfo, Done, *(route.request for route in routes)]
    types += [route.reply for route in routes if route.form is not AnswerForm.DOWNLOAD]
    unique = list({str(kind): kind for kind in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    refs = {str(kind): schema for kind, schema in zip(unique, schemas, strict=True)}
    requests = {route.request.__name__ for route in routes} - {_name(route.reply) for route in routes}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, components[route.request.__name__], refs)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    kept = {name: schema for name, schema in components.items() if name not in requests}
    made: dict[str, Any] = _portable(
        {
            "openapi": "3.1.0",
            "info": {"title": "Stageloom planner", "version": __version__, "description": _ABOUT},
            "paths": paths,
            "components": {
                "schemas": kept,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"token": []}],
        }
    )
    return made


def _operation(route: Route[Any, Any], request: dict[str, Any], refs: dict[str, Any]) -> dict[str, Any]:
    fields, required = request.get("properties", {}), request.get("required", [])
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": fields[name]} for name in route.path_fields
    ]
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"{request.get('description', '')}\n\nFor the role {route.role.value}.".strip(),
        "tags": [route.name.partition(".")[0]],
        "x-role": route.role.value,
        "responses": _responses(route, refs),
    }
    if route.has_body:
        body = {name: fields[name] for name in route.other_fields}
        needed = [name for name in required if name in body]
        schema = {"type": "object", "properties": body, "required": needed, "additionalProperties": False}
        operation["requestBody"] = {
            "required": bool(needed),
            "content": {"application/json": {"schema": schema}},
        }
    else:
        parameters += [_query(name, fields[name], name in required) for name in route.other_fields]
    if route.form is AnswerForm.UPLOAD:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.creates:
        schema = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[ -~]+$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema})
    return {**operation, "parameters": parameters}


def _query(name: str, schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """A query parameter; None of an optional one is said by leaving it out."""
    alternatives = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
    if len(alternatives) == 1:
        schema = {
            **alternatives[0],
            **{key: value for key, value in schema.items() if key == "default" and value},
        }
    return {"name": name, "in": "query", "required": required, "schema": schema}


def _responses(route: Route[Any, Any], refs: dict[str, Any]) -> dict[str, Any]:
    if route.form is AnswerForm.JOB:
        status, about, schema = "202", f"A job; its result: {_name(route.reply)}", refs[str(JobInfo)]
    else:
        status, about = "201" if route.creates else "200", "Done"
        schema = None if route.form in (AnswerForm.DOWNLOAD, AnswerForm.EVENTS) else refs[str(route.reply)]
    media = {
        AnswerForm.DOWNLOAD: ("application/octet-stream", {"type": "string", "format": "binary"}),
        AnswerForm.EVENTS: ("text/event-stream", _EVENT),
    }.get(route.form, ("application/json", schema))
    responses = {status: {"description": about, "content": {media[0]: {"schema": media[1]}}}}
    refusals = [400, 401, 403, 404, 409, 422, 429, 503, 507]
    if route.has_body or route.form is AnswerForm.UPLOAD:
        refusals += [408, 413]
    return responses | {str(code): _PROBLEM for code in refusals}


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _portable(value: Any) -> Any:
    """Patterns as ECMA 262 writes them: `$` for Python's end of text."""
    if isinstance(value, dict):
        return {
            key: item.replace(r"\Z", "$") if key == "pattern" and isinstance(item, str) else _portable(item)
            for key, item in value.items()
        }
    return [_portable(item) for item in value] if isinstance(value, list | tuple) else value
