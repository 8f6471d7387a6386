"""What an installation takes on disk, by extra and by package, against the limits that are promised.

    python -m benchmarks.installs [--json] [--quick]

Each set of extras goes into an empty virtual environment, at the versions of constraints.txt, from a wheel
of this checkout. `mb` is what that adds to site-packages, and what the limits are for; `total_mb` includes
the pip and setuptools that Python puts there. MB are 10^6 bytes of files. In the environment of
`planner-lite` a planner then imports a model and searches a plan, without Ray and numba.
The environments lie in the system's temporary folder and are removed. Ends with 1 above a limit.

pip needs a package index, so this does not run in CI.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.runner import Report, progress, run
from deploy.own_wheel import ROOT, build_wheel

LIMITS_MB: Final = {"planner-lite": 180.0, "edge,onnx": 260.0, "edge,openvino": 380.0, "planner": 700.0}
_LARGE: Final = "planner"  # left out by --quick
_MODEL: Final = """
import sys, onnx
from onnx import TensorProto, helper
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Sigmoid", ["x"], ["b"]),
         helper.make_node("Add", ["a", "b"], ["y"])]
graph = helper.make_graph(nodes, "fork", ends[:1], ends[1:])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), sys.argv[1])
"""
"""A program that writes a model of three operators, two of them independent."""


class Installation:
    """A virtual environment with some extras of the wheel."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self._wheel = wheel
        self.programs = folder / "bin"
        venv.create(folder, with_pip=True)
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        self.empty_mb = self.megabytes()
        self.install(extras)

    def install(self, extras: str) -> None:
        """Add extras, at the versions of constraints.txt."""
        command = [str(self.programs / "python"), "-m", "pip", "install", "--quiet"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*command, *constraints, f"{self._wheel}[{extras}]"], check=True)

    def megabytes(self) -> float:
        """All files of site-packages."""
        return sum(path.lstat().st_size for path in self.site.rglob("*") if path.is_file()) / 1e6

    def by_package(self) -> dict[str, float]:
        """MB of each distribution's files in site-packages, the largest first."""
        sizes: dict[str, float] = {}
        for package in metadata.distributions(path=[str(self.site)]):
            files = [Path(str(package.locate_file(file))).resolve() for file in package.files or ()]
            own = [file for file in files if file.is_relative_to(self.site.resolve()) and file.is_file()]
            sizes[str(package.metadata["Name"])] = sum(file.lstat().st_size for file in own) / 1e6
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def search_without_ray(installation: Installation, folder: Path) -> str:
    """`up`, `model add` and `plan create --scheduler ios`; the scheduler that made the plan."""
    installation.install("onnx")
    programs, model, home = installation.programs, folder / "fork.onnx", str(folder / "home")
    subprocess.run([str(programs / "python"), "-c", _MODEL, str(model)], check=True)

    def command(*words: str) -> list[str]:
        return [str(programs / "stageloom"), *words, "--data-dir", home, "--json"]

    up = command("up", "--listen", "127.0.0.1:0")
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as planner:
        assert planner.stdout is not None
        try:
            if not planner.stdout.readline():
                raise SystemExit("the planner does not start")
            subprocess.run(command("model", "add", str(model)), check=True, stdout=subprocess.DEVNULL)
            create = command("plan", "create", "--model", "fork", "--scheduler", "ios")
            made = json.loads(subprocess.run(create, check=True, stdout=subprocess.PIPE).stdout)
        finally:
            planner.terminate()
    return str(made["scheduler"])


def measure(report: Report, options: argparse.Namespace) -> int:
    """1 if an installation is larger than promised, or does not work."""
    over = []
    with tempfile.TemporaryDirectory(prefix="stageloom-installs-") as scratch:
        wheel = build_wheel(Path(scratch))
        for extras, limit_mb in LIMITS_MB.items():
            if options.quick and extras == _LARGE:
                continue
            progress(f"installing [{extras}]")
            folder = Path(scratch) / extras.replace(",", "-")
            installation = Installation(folder, wheel, extras)
            total_mb = installation.megabytes()
            size_mb = total_mb - installation.empty_mb
            rows = [
                {"extras": extras, "package": name, "mb": round(package_mb, 1)}
                for name, package_mb in installation.by_package().items()
            ]
            sizes = {"mb": size_mb, "total_mb": total_mb, "limit_mb": limit_mb}
            report.add({f"{extras}.{name}": value for name, value in sizes.items()}, rows)
            if size_mb > limit_mb:
                over.append(f"[{extras}] takes {size_mb:.0f} MB, above {limit_mb:.0f} MB")
            if extras == "planner-lite":
                progress("a model and a plan without Ray")
                if search_without_ray(installation, Path(scratch)) != "ios":
                    over.append("planner-lite searched with another scheduler than the one named")
            shutil.rmtree(folder)
    for line in over:
        progress(line)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(run(measure))
