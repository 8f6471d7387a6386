"""What an import may use. Model files are hostile until proven otherwise."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class ImportLimits:
    """Limits of one import; each refusal names the field to raise."""

    file_bytes: int = 2 * GIB - 1  # the model file with its external data; a protobuf cannot be larger
    memory_bytes: int = 4 * GIB  # address space of the importing child process
    tensor_bytes: int = GIB  # one run-time value of batch 1, or one folded constant
    constant_bytes: int = 2 * GIB - (1 << 24)  # all weights once constants are folded
    nodes: int = 100_000  # nodes of the normalised graph
    wall_s: float = 300.0
    cpu_s: int = 600
