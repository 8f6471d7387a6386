"""Build the agent's Debian package.

    python -m deploy.deb [--out DIR] [--extra onnx]... [--json]

The package brings the agent's wheels, at the versions of constraints.txt, for the processor and the Python
that build it; installing it needs no network. On a device it makes an environment of its own in
/opt/stageloom, the account `stageloom`, and registers the unit stageloom-agent. Needs Python 3.11 or later,
dpkg-deb, and a package index while it builds.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from deploy.own_wheel import ROOT, build_wheel
from stageloom.shared.version import __version__

SCRIPTS: Final = ("preinst", "postinst", "prerm", "postrm")
PROGRAM: Final = "stageloom-agent"
UNIT: Final = "stageloom-agent.service"
_HERE: Final = Path(__file__).parent
_SHARE: Final = Path("usr/share/stageloom-agent")


def control_text(*, architecture: str, python: tuple[int, int], size_kib: int) -> str:
    """The package's control file. Compiled wheels fit one minor version of Python: that is a dependency."""
    major, minor = python
    return (
        "Package: stageloom-agent\n"
        f"Version: {__version__}\n"
        f"Architecture: {architecture}\n"
        "Maintainer: Stageloom maintainers <stageloom@localhost>\n"
        f"Installed-Size: {size_kib}\n"
        f"Depends: python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1}), python3-venv, systemd\n"
        "Section: net\n"
        "Priority: optional\n"
        "Description: runs several neural networks on one device by a planned schedule\n"
        " The edge agent of Stageloom: it takes plans from a planner, or makes its own by measuring,\n"
        " and serves tasks of several ONNX models under deadlines. It lives in /opt/stageloom,\n"
        " an environment made from the wheels in this package.\n"
    )


def lay_out(tree: Path, wheels: list[Path], *, extras: str, architecture: str) -> None:
    """Write the package's files below `tree`: wheels, the unit, the link to the program, DEBIAN/."""
    share, unit_folder = tree / _SHARE, tree / "usr/lib/systemd/system"
    for folder in (share / "wheels", unit_folder, tree / "usr/bin", tree / "DEBIAN"):
        folder.mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel, share / "wheels" / wheel.name)
    (share / "requirement").write_text(f"stageloom[{extras}]=={__version__}\n")
    (tree / "usr/bin" / PROGRAM).symlink_to(f"/opt/stageloom/bin/{PROGRAM}")
    # As it is shipped: its paths and account are the package's, and of the groups that own GPUs' device files
    # it names the one that Debian's base has everywhere. A unit with a group that is missing does not start.
    shutil.copy(ROOT / "deploy" / UNIT, unit_folder / UNIT)
    doc = tree / "usr/share/doc/stageloom-agent"
    doc.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", doc / "copyright")
    for name in SCRIPTS:
        shutil.copy(_HERE / name, tree / "DEBIAN" / name)
        (tree / "DEBIAN" / name).chmod(0o755)
    size_kib = sum(path.lstat().st_size for path in tree.rglob("*") if not path.is_dir()) // 1024
    control = control_text(
        architecture=architecture, python=(sys.version_info[0], sys.version_info[1]), size_kib=size_kib
    )
    (tree / "DEBIAN/control").write_text(control)


def gather_wheels(folder: Path, extras: str) -> list[Path]:
    """The agent's wheel and those of everything that it needs; an sdist is no wheel and refused by pip."""
    own = build_wheel(folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), f"{own}[{extras}]"], check=True)
    return sorted(folder.glob("*.whl"))


def build(out: Path, extras: str) -> Path:
    """The package, in `out`."""
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="stageloom-deb-") as scratch:
        wheels_folder, tree = Path(scratch) / "wheels", Path(scratch) / "tree"
        wheels_folder.mkdir()
        lay_out(tree, gather_wheels(wheels_folder, extras), extras=extras, architecture=architecture)
        out.mkdir(parents=True, exist_ok=True)
        package = out / f"stageloom-agent_{__version__}_{architecture}.deb"
        # Wheels are compressed already, and a device unpacks gzip faster than xz.
        command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(tree), str(package)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return package


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.deb", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "var/deb", help="folder for the package")
    parser.add_argument(
        "--extra",
        action="append",
        metavar="NAME",
        help="onnx (the default), openvino, serving, metrics; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print the package's path and size as JSON")
    given = parser.parse_args()
    if missing := [name for name in ("dpkg", "dpkg-deb") if shutil.which(name) is None]:
        parser.error(f"{' and '.join(missing)} not found: build the package on Debian or Ubuntu")
    extras = ",".join(["edge", *(given.extra or ["onnx"])])
    try:
        package = build(given.out, extras)
    except subprocess.CalledProcessError as error:
        remedy = "the index must have a wheel of each package for this Python and this processor"
        parser.exit(1, f"{error.cmd[0]} failed, see above; {remedy}\n")
    size_mb = package.stat().st_size / 1e6
    shown = {"package": str(package), "mb": round(size_mb, 1), "extras": extras}
    print(json.dumps(shown) if given.json else f"{package}: {size_mb:.1f} MB, sudo dpkg -i {package}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
