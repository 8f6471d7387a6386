"""Our executor on one GPU beside every rival.

    python -m benchmarks.gpu [--json] [--quick] [--device cpu] [--out FILE] [--cache DIR] [--limit SECONDS]

Needs torch, numpy, onnx, msgpack, msgspec and this repository; no network. Models with seeded weights,
the same weights, precision and channels-last layout for every variant, inputs resident on the device. In
order: probes of the device, every variant's correctness (logits against float32 on the CPU; ours stable
bit by bit over repeats with random delays), the table of baselines in interleaved random rounds, plans in
the engine under full queues, plan switches, open loads, and concurrency from kernel intervals. A row that
cannot run says why, and the rest goes on. `--out` grows row by row, so that a time limit loses nothing.

`device_us` is time per image (per round of the mix) by device events, runs back to back; `alone_us` by the
host's clock, each run waited for. Ratios are taken round by round; `again` rows are a baseline against
itself. `--precision tf32` gives the table in TF32. `--cache` keeps what torch.compile made, so that
`--only compile` can fill it in a run before.
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
from benchmarks.gpu.run import Run
from benchmarks.runner import arguments, emit, readable

_PACKAGES = ["torch", "triton", "numpy", "onnx", "onnxruntime", "cuda-bindings", "nvidia-ml-py", "msgspec"]
_PATIENCE_S = 60.0


def _settings(argv: Sequence[str] | None) -> tuple[Settings, bool, Path | None]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--executor", help="default torch_cuda, or torch_cpu on the host")
    parser.add_argument("--precision", choices=("fp16", "tf32", "fp32"))
    parser.add_argument("--model", dest="models", action="append", help="repeat; default the papers' three")
    parser.add_argument("--only", dest="parts", action="append", choices=(*PARTS, "compile"), help="repeat")
    parser.add_argument("--limit", dest="limit_s", type=float, metavar="SECONDS", help="of the whole run")
    parser.add_argument("--compile-limit", dest="compile_s", type=float, metavar="SECONDS")
    parser.add_argument("--no-children", dest="children", action="store_false", help="without processes")
    parser.add_argument("--cache", type=Path, help="folder for torch.compile, kept between runs")
    parser.add_argument("--out", type=Path, help="file that grows by a JSON line per row")
    given = vars(parser.parse_args(argv))
    device, executor = given.pop("device"), given.pop("executor")
    as_json, out = given.pop("json"), given.pop("out")
    executor = executor or f"torch_{device}"
    quick = given.pop("quick") or device == "cpu"
    settings = quick_settings(device, executor) if quick else Settings(executor=executor)
    for name in ("models", "parts"):
        given[name] = tuple(given[name]) if given[name] else None
    return (
        replace(settings, **{key: value for key, value in given.items() if value is not None}),
        as_json,
        out,
    )


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(f"stopped by signal {number}")


def main(argv: Sequence[str] | None = None) -> int:
    settings, as_json, out = _settings(argv)
    signal.signal(signal.SIGTERM, _stop)
    # A device that hangs cannot be interrupted; then at least it is said where.
    faulthandler.dump_traceback_later(settings.limit_s + _PATIENCE_S, repeat=True)
    with tempfile.TemporaryDirectory(prefix="stageloom-gpu-") as folder:
        os.environ[CACHE_VARIABLE] = str(settings.cache or Path(folder) / "inductor")
        results = Results(out)
        run = Run(settings, results, Deadline(settings.limit_s), Path(folder))
        try:
            run.all_parts()
        finally:
            faulthandler.cancel_dump_traceback_later()
            about = run.about()
            if not as_json:
                print(readable((), about))
            emit(results.report, as_json=as_json, packages=_PACKAGES, device=about)
            results.close()
            run.close()  # last: of a device that is lost nothing can be freed, and this raises
    return 0


if __name__ == "__main__":
    sys.exit(main())
