"""What torch this machine has, read from files: importing it takes a second and may fail."""

import re
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = re.compile(r"nvidia-(cudnn|cublas|cuda-runtime)(-cu\d+)?$")


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Versions; empty where there is none."""

    torch: str = ""
    cuda: str = ""  # that torch was built for
    libraries: tuple[str, ...] = ()  # that pip brought along: `cudnn 9.10.2`
    driver: str = ""


def torch_facts(proc: Path = Path("/proc")) -> TorchFacts:
    """As this interpreter would find them."""
    spec = find_spec("torch")
    text = ""
    if spec is not None and spec.origin is not None:
        try:
            text = (Path(spec.origin).parent / "version.py").read_text(errors="replace")
        except OSError:
            text = "__version__ = 'unknown'"
    found = version_facts(text)
    return TorchFacts(found.torch, found.cuda, _libraries() if found.cuda else (), driver_version(proc))


def version_facts(text: str) -> TorchFacts:
    """What torch's `version.py` says of itself."""
    number = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return TorchFacts(number[1] if number else "", cuda[1] if cuda else "")


def driver_version(proc: Path) -> str:
    """The kernel driver's version."""
    try:
        text = (proc / "driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else "unknown"


def _libraries() -> tuple[str, ...]:
    names = {}
    for one in distributions():
        found = _LIBRARIES.match(one.metadata["Name"] or "")
        if found:
            names[found[1]] = f"{found[1]} {one.version}"
    return tuple(names[name] for name in sorted(names))
