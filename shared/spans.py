"""Spans for OpenTelemetry, made of records that exist already and sent in one go, off every hot path.

The packages of the extra `otel` are imported when something is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from stageloom.shared.errors import UnavailableError
from stageloom.shared.version import __version__

_MODULES: Final = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace")
_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class RecordedSpan:
    """What lasted from `began_us` to `ended_us`, Unix time. `failed`: why it came to nothing."""

    name: str
    began_us: int
    ended_us: int
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    failed: str = ""
    children: "tuple[RecordedSpan, ...]" = ()


def require_packages() -> None:
    """Have what `send_spans` imports.

    Raises:
        UnavailableError: the packages are not installed.
    """
    try:
        for name in _MODULES:
            import_module(name)
    except ImportError as error:
        raise UnavailableError(
            f"{error.name or error} cannot be imported, which spans need",
            remedy="pip install 'stageloom[otel]'",
        ) from error


def send_spans(spans: Sequence[RecordedSpan], url: str, service: str) -> int:
    """Send a trace per span to an OTLP collector such as `http://localhost:4318`; how many spans that were.

    Raises:
        UnavailableError: the packages are not installed, or the collector did not take all of them.
    """
    require_packages()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    made = InMemorySpanExporter()
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("stageloom")
    for span in spans:
        _make(tracer, span, None)
    finished = made.get_finished_spans()
    exporter: Any = OTLPSpanExporter(endpoint=url.rstrip("/") + _PATH, timeout=_TIMEOUT_S)
    try:
        for some in _parts(finished):
            if exporter.export(some) is not SpanExportResult.SUCCESS:
                raise UnavailableError(
                    f"the collector at {url} did not take the spans", remedy="see its log, and the address"
                )
    finally:
        exporter.shutdown()
    return len(finished)


_AT_ONCE: Final = 2_000  # spans in a request, which collectors bound


def _parts(spans: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(spans), _AT_ONCE):
        yield spans[first : first + _AT_ONCE]


def _make(tracer: Any, span: RecordedSpan, context: Any) -> None:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    made = tracer.start_span(
        span.name, context, attributes=dict(span.attributes), start_time=span.began_us * 1000
    )
    if span.failed:
        made.set_status(Status(StatusCode.ERROR, span.failed))
    for child in span.children:
        _make(tracer, child, set_span_in_context(made))
    made.end(max(span.ended_us, span.began_us) * 1000)
