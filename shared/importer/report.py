"""The report of an import: a value that prints as JSON, and rows for a table."""

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from stageloom.shared.errors import DecodeError
from stageloom.shared.graph import Tensor
from stageloom.shared.ids import Digest
from stageloom.shared.text import counted

_MIB = 1 << 20
_SHOWN_CUTS = 12
NEVER_RAN = "no run could be tried"
"""How `batch_reason` begins where onnxruntime refused every input that the import tried."""


@dataclass(frozen=True)
class PartitionReport:
    """One choice of cuts; `operators` counts per block as the papers do, without the classifier."""

    name: str
    cuts: tuple[int, ...]
    blocks: int
    operators: tuple[int, ...]


@dataclass(frozen=True)
class WholeReport:
    """An operator of several nodes that stays whole, and why."""

    operator: int
    name: str
    kind: str
    nodes: int
    why: str


@dataclass(frozen=True)
class ImportReport:
    """Size, structure and cost of an imported model. Bytes and counts are for batch 1."""

    digest: Digest
    name: str
    operators: int  # in the artifact, classifier included
    paper_operators: int  # without the classifier, as the papers count
    fused_units: int
    critical_path: int  # fused units on the longest dependent chain
    gflop: float
    parameters: int
    memory_bytes: int  # weights plus the most that is live at once, batch 1, in sequence
    weight_bytes: int
    activation_bytes: int
    base_cuts: tuple[int, ...]
    cut_bytes: tuple[int, ...]  # what crosses each base cut
    partitions: tuple[PartitionReport, ...]
    opaque: tuple[WholeReport, ...]  # control flow, custom operators, sequences, strings
    joined: tuple[WholeReport, ...]  # ordinary operators that hold values of sizes known only while running
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batchable: bool
    batch_reason: str  # why not, empty if batchable
    size: int  # bytes of the artifact
    opset: int

    @property
    def never_ran(self) -> str:
        """What its user should know if onnxruntime refused every input that the import tried; else empty."""
        if not self.batch_reason.startswith(NEVER_RAN):
            return ""
        reason = self.batch_reason.removeprefix(NEVER_RAN).lstrip(": ")
        return (
            f"onnxruntime ran it on none of the inputs that were tried, so that tasks may fail: {reason}; "
            "pin the shapes that it was exported for, or check it with valid values by "
            "`stageloom-agent verify FILE --range INPUT=LO:HI`"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ImportReport":
        """Read what `to_json` returned.

        Raises:
            DecodeError: a field is missing or has another type.
        """
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise DecodeError(f"the report of an import is unreadable: {error}") from error


def report_rows(report: ImportReport) -> list[tuple[str, str]]:
    """Return pairs of label and text, for a table or plain lines."""
    rows = [
        ("name", report.name),
        ("artifact", report.digest),
        ("size", f"{report.size / _MIB:.1f} MiB"),
        ("operators", f"{report.operators} ({report.paper_operators} without the classifier)"),
        ("fused units", f"{report.fused_units}, critical path {report.critical_path}"),
        ("work", f"{report.gflop:.2f} GFLOP, {report.parameters / 1e6:.2f} M parameters"),
        (
            "memory",
            f"{report.memory_bytes / _MIB:.1f} MiB: weights {report.weight_bytes / _MIB:.1f},"
            f" activations {report.activation_bytes / _MIB:.1f}",
        ),
        ("batch", "any" if report.batchable else f"1 only: {report.batch_reason}"),
    ]
    rows += [("notice", report.never_ran)] if report.never_ran else []
    rows += [("input", _tensor(tensor)) for tensor in report.inputs]
    rows += [("output", _tensor(tensor)) for tensor in report.outputs]
    shown = ", ".join(
        f"{cut} ({size / 1024:.0f} KiB)"
        for cut, size in list(zip(report.base_cuts, report.cut_bytes, strict=True))[:_SHOWN_CUTS]
    )
    more = f" and {len(report.base_cuts) - _SHOWN_CUTS} more" if len(report.base_cuts) > _SHOWN_CUTS else ""
    rows.append(("base cuts", f"{shown}{more}" if shown else "none"))
    rows += [
        (
            f"partition {p.name}",
            f"{counted(p.blocks, 'block')} of {', '.join(map(str, p.operators))} operators",
        )
        for p in report.partitions
    ]
    rows += [
        (label, f"operator {o.operator} ({o.kind} {o.name!r}, {counted(o.nodes, 'node')}): {o.why}")
        for label, wholes in (("opaque", report.opaque), ("joined", report.joined))
        for o in wholes
    ]
    return rows


def _tensor(tensor: Tensor) -> str:
    return f"{tensor.name} {tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
