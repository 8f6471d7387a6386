"""What a Jetson's system is: releases, toolkit, memory; and how to install what NVIDIA has own wheels of."""

import json
import re
from pathlib import Path
from typing import Final

from stageloom.edge_agent.machine.utilisation import is_tegra, l4t_release, text_of

_JETPACKS: Final = {"35": "5", "36": "6", "38": "7", "39": "7"}
"""JetPack by the first number of Jetson Linux."""

_VENDORS: Final = ("onnx", "onnx-gpu", "torch")
"""Extras that name what NVIDIA has own wheels of."""

_PAGE: Final = "docs/operations.md, On a Jetson"


def jetpack(root: Path = Path("/")) -> str:
    """The JetPack's first number; "" where the release is unknown or this is no Jetson."""
    return _JETPACKS.get(l4t_release(root).partition(".")[0], "")


def toolkit_version(root: Path = Path("/")) -> str:
    """The version of the CUDA toolkit below /usr/local/cuda; "" without one."""
    try:
        found = json.loads(text_of(root / "usr/local/cuda/version.json") or "")
        return str(found["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        return ""


def memory_text(proc: Path = Path("/proc")) -> str:
    """Memory in all and what the kernel would hand out, for people; "" where it does not say."""
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text_of(proc / "meminfo") or "", re.M))
    if len(sizes) < 2:
        return ""
    total, available = (int(sizes[name]) / (1 << 20) for name in ("MemTotal", "MemAvailable"))
    return f"memory {total:.1f} GiB, {available:.1f} available"


def how_to_install(extra: str, proc: Path = Path("/proc"), root: Path = Path("/")) -> str:
    """What brings the packages of an extra.

    For torch and onnxruntime on a Jetson no command: pip would put a wheel of the registry in the place of
    NVIDIA's, and that one finds no kernels or no driver there.
    """
    if extra not in _VENDORS or not is_tegra(proc, root):
        return f"pip install 'stageloom[edge,{extra}]'"
    name = jetpack(root)
    return f"take NVIDIA's wheel{f' for JetPack {name}' if name else ''} ({_PAGE})"
