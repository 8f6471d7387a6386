"""Our executor on one GPU beside every rival.

    python -m benchmarks.gpu [--json] [--quick] [--device cpu] [--out FILE] [--cache DIR] [--limit SECONDS]

Needs torch, numpy, onnx, msgpack, msgspec and this repository; no network. Models with seeded weights,
the same weights, precision and channels-last layout for every variant, inputs resident on the device. In
order: probes of the device, every variant's correctness (logits against float32 on the CPU; ours stable
bit by bit over repeats with random delays), the table of baselines in interleaved random rounds, the same
in TF32, plans in the engine under full queues, plan switches and open loads, and concurrency from kernel
intervals. A row that cannot run says why, and the rest goes on. `--out` grows row by row, so that a time
limit loses nothing.

`device_us` is time per image (per round of the mix) by device events, runs back to back; `alone_us` by the
host's clock, each run waited for. Ratios are taken round by round; `again` rows are a baseline against
itself. `--cache` keeps what torch.compile made, so that `--only compile` can fill it in a run before.
"""

import faulthandler
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.gpu.results import PARTS, Deadline, Results, Settings, quick_settings
from benchmarks.gpu.rivals import CACHE_VARIABLE
from benchmarks.runner import arguments, emit, readable, versions

_PACKAGES = ["torch", "triton", "numpy", "onnx", "onnxruntime", "cuda-bindings", "nvidia-ml-py", "msgspec"]
_PATIENCE_S = 60.0


def _settings(argv: Sequence[str] | None) -> tuple[Settings, bool, Path | None]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--executor", default=None, help="default torch_cuda, or torch_cpu on the host")
    parser.add_argument("--precision", choices=("fp16", "tf32", "fp32"), default=None)
    parser.add_argument("--model", action="append", help="repeat; default the three of the papers")
    parser.add_argument("--only", action="append", choices=(*PARTS, "compile"), help="repeat; default all")
    parser.add_argument("--limit", type=float, default=None, metavar="SECONDS", help="of the whole run")
    parser.add_argument("--compile-limit", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--no-children", action="store_true", help="leave out what needs other processes")
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder for torch.compile, kept between runs"
    )
    parser.add_argument("--out", type=Path, default=None, help="file that grows by a JSON line per row")
    args = parser.parse_args(argv)
    executor = args.executor or f"torch_{args.device}"
    quick = args.quick or args.device == "cpu"
    found = quick_settings(args.device, executor) if quick else Settings(executor=executor)
    given = {
        "precision": args.precision,
        "models": tuple(args.model) if args.model else None,
        "parts": tuple(args.only) if args.only else None,
        "limit_s": args.limit,
        "compile_s": args.compile_limit,
        "children": False if args.no_children else None,
        "cache": args.cache,
    }
    chosen = replace(found, **{name: value for name, value in given.items() if value is not None})
    return chosen, args.json, args.out


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(f"stopped by signal {number}")


def main(argv: Sequence[str] | None = None) -> int:
    settings, as_json, out = _settings(argv)
    signal.signal(signal.SIGTERM, _stop)
    # A device that hangs cannot be interrupted; then at least it is said where.
    faulthandler.dump_traceback_later(settings.limit_s + _PATIENCE_S, repeat=True)
    with tempfile.TemporaryDirectory(prefix="stageloom-gpu-") as folder:
        os.environ[CACHE_VARIABLE] = str(settings.cache or Path(folder) / "inductor")
        from benchmarks.gpu.run import Run

        results = Results(out)
        run = Run(settings, results, Deadline(settings.limit_s), Path(folder))
        try:
            run.all_parts()
        finally:
            faulthandler.cancel_dump_traceback_later()
            about = run.about()
            table = readable(results.report.rows, {**about, **versions(_PACKAGES)})
            print(table, file=sys.stderr if as_json else sys.stdout)
            if as_json:
                emit(results.report, as_json=True, packages=_PACKAGES, device=about)
            results.close()
            run.close()  # last: of a device that is lost nothing can be freed, and this raises
    return 0


if __name__ == "__main__":
    sys.exit(main())
