"""Templates to HTML, and the files beside them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stageloom.planner.api.page import words
from stageloom.shared.digest import digest_bytes

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}


class StaticFile(NamedTuple):
    """A file as it is served; `version` is in its address, so that browsers may keep it for ever."""

    body: bytes
    media_type: str
    version: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Style, script, and what others wrote, with licences; by name."""
    files = {}
    for path in sorted((_FOLDER / "static").iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            files[path.name] = StaticFile(body, _TYPES[path.suffix], digest_bytes([body])[:12])
    return files


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        name: getattr(words, name)
        for name in ("moment", "count", "size", "figure", "latency", "ratio", "generation")
    }
    environment.globals |= {
        "cause_text": words.cause_text,
        "static": lambda name: f"/ui/static/{name}?v={static_files()[name].version}",
    }
    return environment


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """A template's HTML; everything that is shown is escaped."""
    return _environment().get_template(template).render(values).encode("utf-8", "replace")
