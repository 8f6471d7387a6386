"""Distributions of others, as an installer leaves them in a folder of the import path."""

from pathlib import Path


def install(folder: Path, name: str, group: str, points: dict[str, str], source: str | None = None) -> None:
    """`name` 1.0 with entry points; its module has the name with underscores, none where `source` is None."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {target}\n" for point, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    if source is not None:
        (folder / f"{name.replace('-', '_')}.py").write_text(source)
