"""What an import found, as one value that prints as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from stageloom.shared.ids import Digest


@dataclass(frozen=True)
class TensorReport:
    """An input or output of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


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
    """Everything that a person or the planner wants to know of an imported model."""

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
    inputs: tuple[TensorReport, ...]
    outputs: tuple[TensorReport, ...]
    batchable: bool
    batch_reason: str  # why not, empty if batchable
    size: int  # bytes of the artifact
    opset: int

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ImportReport":
        """The inverse of `to_json`."""
        fields = dict(value)
        fields["base_cuts"] = tuple(fields["base_cuts"])
        fields["cut_bytes"] = tuple(fields["cut_bytes"])
        fields["partitions"] = tuple(
            PartitionReport(p["name"], tuple(p["cuts"]), p["blocks"], tuple(p["operators"]))
            for p in fields["partitions"]
        )
        for key in ("opaque", "joined"):
            fields[key] = tuple(WholeReport(**o) for o in fields[key])
        for key in ("inputs", "outputs"):
            fields[key] = tuple(TensorReport(t["name"], t["dtype"], tuple(t["shape"])) for t in fields[key])
        return cls(**fields)
