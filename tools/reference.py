"""The reference pages of the documentation site, made from the code when the site is built.

`mkdocs.yml` names this file as a hook. Command lines come from the two applications, the API from its OpenAPI
document, settings and messages from their types; a docstring is written once, where the code is.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

PAGES: Final = ("stageloom", "stageloom-agent", "api", "settings", "messages")
"""Names of the pages that are made, in `docs/reference/`."""

_MESSAGES: Final = ("control", "telemetry", "bulk", "enrol")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages (an event of mkdocs)."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Every generated page: name to Markdown."""
    from stageloom.edge_agent.cli.app import app as agent
    from stageloom.planner.cli.app import app as planner

    made = (
        _commands("stageloom", get_command(planner)),
        _commands("stageloom-agent", get_command(agent)),
        _api(),
        _settings(),
        _messages(),
    )
    return {name: "\n".join(lines) for name, lines in zip(PAGES, made, strict=True)}


# -- command lines ----------------------------------------------------------------------------------------


def _commands(name: str, root: Any) -> Iterator[str]:
    yield f"# `{name}`\n"
    yield _help_text(root.help or "")
    yield _verbatim(root.epilog or "")
    for path, command in sorted(_leaves(name, root)):
        yield f"\n## {path}\n"
        yield _help_text(command.help or "")
        rows = [row for parameter in command.params if (row := _parameter(parameter))]
        if rows:
            yield "\n| | |\n| --- | --- |"
            yield from rows
            yield ""


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _leaves(f"{path} {name}", child)


def _parameter(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        names += f" `{parameter.metavar}`"
    text = " ".join((getattr(parameter, "help", None) or "").split())
    return "" if names == "`--help`" else f"| {_cell(names)} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _help_text(text: str) -> str:
    """Paragraphs; those that a form feed or a backspace mark as they are typed become code."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text.replace("\f", "")).strip())
    return "\n\n".join(
        _verbatim(paragraph) if paragraph.lstrip().startswith("\b") else " ".join(paragraph.split())
        for paragraph in paragraphs
    )


def _verbatim(text: str) -> str:
    lines = text.replace("\b\n", "").replace("\b", "").strip("\n")
    return f"```text\n{textwrap.dedent(lines)}\n```" if lines.strip() else ""


# -- the API ----------------------------------------------------------------------------------------------


def _api() -> Iterator[str]:
    from stageloom.planner.api.openapi import document
    from stageloom.planner.api.routes import ROUTES

    made = document(ROUTES)
    yield "# The planner's HTTP API\n"
    yield made["info"]["description"]
    yield "\nA running planner serves this as OpenAPI 3.1 at `/schema`."
    yield "\n| | | role | answers with |\n| --- | --- | --- | --- |"
    for route in ROUTES:
        anchor = route.name.replace(".", "")
        reply = getattr(route.reply, "__name__", str(route.reply))
        form = "" if route.form.value == "plain" else f" ({route.form.value})"
        call = f"[`{route.method} {route.path}`](#{anchor})"
        yield f"| {call} | {route.summary} | {route.role.value} | {reply}{form} |"
    for route in ROUTES:
        yield f"\n## {route.name} {{ #{route.name.replace('.', '')} }}\n"
        yield f"`{route.method} {route.path}`. {route.summary}\n"
        if route.request.__doc__:
            yield _paragraphs(route.request.__doc__)
        yield from _fields(route.request)
    yield "\n# Replies\n"
    for name, schema in sorted(made["components"]["schemas"].items()):
        yield f"\n## {name}\n"
        yield _paragraphs(schema.get("description", ""))
        yield _type(schema) if "enum" in schema else ""
        yield from _schema_rows(schema.get("properties", {}))


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))


def _fields(struct: type[msgspec.Struct]) -> Iterator[str]:
    _, components = msgspec.json.schema_components([struct], ref_template="{name}")
    yield from _schema_rows(components[struct.__name__].get("properties", {}), _comments(struct))


def _comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What a comment behind each field says."""
    return dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(struct), re.MULTILINE))


def _schema_rows(properties: dict[str, Any], about: Mapping[str, str] | None = None) -> Iterator[str]:
    if not properties:
        return
    head = ("field", "type", "default", *(["what it is"] if about else []))
    yield f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}"
    for name, schema in properties.items():
        value = schema.get("default")
        long = isinstance(value, dict) and value
        default = f"`{msgspec.json.encode(value).decode()}`" if "default" in schema and not long else ""
        told = f" {_cell(about.get(name, ''))} |" if about else ""
        yield f"| `{name}` | {_cell(_type(schema))} | {_cell(default)} |{told}"
    yield ""


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        inner = schema.get("items") or {}
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type(inner) if isinstance(inner, dict) else 'values'}{most}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None or high is not None:
        return f"{kind}, {_bound(low)} to {_bound(high)}"
    return f"{kind}, up to {schema['maxLength']} characters" if "maxLength" in schema else kind


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# -- settings and messages --------------------------------------------------------------------------------


def _settings() -> Iterator[str]:
    from stageloom.edge_agent.config import AgentConfig, ModelFile
    from stageloom.edge_agent.metrics.settings import MetricsSettings
    from stageloom.edge_agent.serving.settings import ServingSettings
    from stageloom.planner.config import SETTINGS, PlannerConfig
    from stageloom.shared.engine.interval_guard import GuardConfig
    from stageloom.shared.engine.trial import TrialConfig

    plain = PlannerConfig()
    yield "# Settings\n"
    yield "Both sides take them from the command line, the environment, a TOML file, in this order."
    yield "`stageloom config show` and `stageloom-agent config show` print those in force.\n"
    yield "## The planner\n"
    yield "Table `[planner]` of the file that `stageloom up --config` names; `STAGELOOM_PLANNER_NAME`.\n"
    yield "| setting | default | unit | what it is for |\n| --- | --- | --- | --- |"
    for name, setting in SETTINGS.items():
        default = "" if name == "data_dir" else str(getattr(plain, name))
        yield f"| `{name}` | {_cell(default)} | {_cell(setting.unit)} | {_cell(setting.reason)} |"
    yield "\n## The agent\n"
    yield "Table `[agent]` of `agent.toml` in its state directory; `STAGELOOM_AGENT_NAME`."
    yield from _fields(AgentConfig)
    for name, part in (
        ("models", ModelFile),
        ("trial", TrialConfig),
        ("guard", GuardConfig),
        ("serving", ServingSettings),
        ("metrics", MetricsSettings),
    ):
        yield f"\n### {name}\n"
        yield _paragraphs(part.__doc__ or "")
        yield from _fields(part)


def _messages() -> Iterator[str]:
    from importlib import import_module

    yield "# Messages between planner and device\n"
    yield "One msgpack map each, in frames that `shared/codec.py` bounds; see [the protocol](../protocol.md)."
    for conversation in _MESSAGES:
        module = import_module(f"stageloom.shared.messages.{conversation}")
        yield f"\n## {conversation}\n"
        yield _paragraphs(module.__doc__ or "")
        for name, kind in vars(module).items():
            if (
                isinstance(kind, type)
                and issubclass(kind, msgspec.Struct)
                and kind.__module__ == module.__name__
            ):
                yield f"\n### {name}\n"
                yield _paragraphs(kind.__doc__ or "")
                yield from _fields(kind)
