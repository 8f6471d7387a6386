"""Looking at a model without keeping it, and the report as text."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageloom.shared.importer.api import import_model
from stageloom.shared.importer.limits import ImportLimits
from stageloom.shared.importer.process import Progress
from stageloom.shared.importer.report import ImportReport, TensorReport
from stageloom.shared.text import counted

_MIB = 1 << 20
_SHOWN_CUTS = 12


def inspect_model(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    *,
    limits: ImportLimits | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import into a folder that is gone afterwards.

    Raises:
        ModelError, UnpinnedShape, StorageError: as `import_model`.
    """
    with tempfile.TemporaryDirectory(prefix="stageloom-inspect-") as folder:
        return import_model(path, shapes=shapes, out_dir=Path(folder), limits=limits, progress=progress)


def report_rows(report: ImportReport) -> list[tuple[str, str]]:
    """The report as pairs of label and text, for a table or plain lines."""
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


def _tensor(tensor: TensorReport) -> str:
    return f"{tensor.name} {tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
