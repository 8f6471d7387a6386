"""How much is measured, and how long the parts may take."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.compiled import MODES, Zoo


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. Times in seconds; the shares are of what is left when the part begins."""

    device: str = "cuda"
    executor: str = "torch_cuda"
    precision: str = "fp16"
    models: tuple[str, ...] = ("inception_v3", "resnet50", "squeezenet")
    zoo: Zoo = field(default_factory=Zoo)
    quick: bool = False
    limit_s: float = 460.0
    compile_s: float = 110.0
    modes: tuple[str, ...] = MODES
    parts: tuple[str, ...] = ()  # all of them
    cache: Path | None = None  # of torch.compile, kept between runs
    children: bool = True
    batches: tuple[int, ...] = (8, 16, 64)
    instances: tuple[int, ...] = (2, 4, 8, 16)
    mix_instances: tuple[int, ...] = (1, 2, 4)
    repeats: int = 100  # of the bit-stability check

    def wants(self, part: str) -> bool:
        """Whether a part is to run."""
        return not self.parts or part in self.parts


PARTS = ("correctness", "probes", "table", "tf32", "serving", "switching", "concurrency")
"""In the order in which they run; what they build on is always made."""


def quick_settings(device: str, executor: str) -> Settings:
    """Tiny models and a handful of repeats: that the code is whole, and nothing about speed."""
    return Settings(
        device=device,
        executor=executor,
        precision="fp32" if device == "cpu" else "fp16",
        models=("squeezenet", "inception_v3"),
        zoo=Zoo(width=0.125, size=75),
        quick=True,
        limit_s=600.0,
        compile_s=30.0,
        modes=("default",),
        batches=(2,),
        instances=(2,),
        mix_instances=(1, 2),
        repeats=3,
    )
