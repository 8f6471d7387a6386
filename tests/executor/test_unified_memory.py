"""What a plan may take of memory that GPU and processor share."""

from pathlib import Path

import pytest

from stageloom.edge_agent.executor.cuda.unified_memory import free_device_bytes

MIB = 1 << 20


def _machine(root: Path, *, model: str, total_mib: int, available_mib: int, free_mib: int) -> None:
    (root / "device-tree").mkdir()
    (root / "device-tree/model").write_text(model)
    (root / "meminfo").write_text(
        f"MemTotal:       {total_mib << 10} kB\nMemFree:        {free_mib << 10} kB\n"
        f"MemAvailable:   {available_mib << 10} kB\n"
    )


@pytest.mark.parametrize(
    ("total_mib", "available_mib", "left_mib"),
    [
        (64_000, 50_000, 50_000 - 4_000),  # a sixteenth
        (2_000, 1_500, 1_500 - 256),  # but 256 MiB at least
        (2_000, 100, 0),
    ],
)
def test_a_jetson_has_what_the_kernel_would_give_less_a_reserve(
    total_mib: int, available_mib: int, left_mib: int, tmp_path: Path
) -> None:
    """CUDA tells what is idle, here 10 MiB: reading a model from disk has filled the page cache."""
    model = "NVIDIA Jetson Orin NX\0"
    _machine(tmp_path, model=model, total_mib=total_mib, available_mib=available_mib, free_mib=10)
    assert free_device_bytes(10 * MIB, tmp_path, tmp_path) == left_mib * MIB


def test_a_card_has_what_cuda_says(tmp_path: Path) -> None:
    _machine(tmp_path, model="a board", total_mib=64_000, available_mib=50_000, free_mib=40_000)
    assert free_device_bytes(10 * MIB, tmp_path, tmp_path) == 10 * MIB


def test_a_jetson_whose_kernel_does_not_say_has_what_cuda_says(tmp_path: Path) -> None:
    _machine(tmp_path, model="NVIDIA Jetson Nano", total_mib=4_000, available_mib=1, free_mib=1)
    (tmp_path / "meminfo").unlink()
    assert free_device_bytes(7 * MIB, tmp_path, tmp_path) == 7 * MIB
