"""Write seeded ONNX files of the networks that the papers measure."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo import ZOO, parameters, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chosen models; one line or one JSON object per run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--model", action="append", choices=sorted(ZOO), help="repeat; default all")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=None, help="side of the image in pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.model or ZOO:
        path = options.out_dir / f"{name}.onnx"
        weights = parameters(write(name, path, width=options.width, size=options.size, seed=options.seed))
        rows.append(
            {"model": name, "path": str(path), "parameters": weights, "size_bytes": path.stat().st_size}
        )
        if not options.json:
            print(f"{name:18} {weights / 1e6:7.2f} M parameters  {path}")
    if options.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
