"""What plans may take: a setting, the machine, its control groups."""

from pathlib import Path

from stageloom.edge_agent.worker.resources import MemoryBudget, budget

MIB = 1 << 20


def machine(root: Path, available_mib: int, groups: dict[str, tuple[str, int, int]], line: str) -> Path:
    """A file system with this much memory; groups: folder to (limit, used bytes, cached bytes)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {available_mib << 10} kB\nSwapFree: 0 kB\n"
    )
    (root / "proc/self/cgroup").write_text(line)
    for folder, (limit, used, cached) in groups.items():
        at = root / "sys/fs/cgroup" / folder
        at.mkdir(parents=True, exist_ok=True)
        first = folder.startswith("memory")
        (at / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (at / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        name = "total_inactive_file" if first else "inactive_file"
        (at / "memory.stat").write_text(f"anon 5\n{name} {cached}\n")
    return root


def test_a_setting_is_what_all_plans_share() -> None:
    assert budget(100, 30) == MemoryBudget(70, 100)
    assert budget(100, 130) == MemoryBudget(0, 100)


def test_a_tenth_of_what_is_free_stays_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000, {}, "0::/\n")
    assert budget(0, 7, root) == MemoryBudget(900 * MIB, 900 * MIB + 7)


def test_the_tightest_group_up_to_the_root_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    groups = {
        "a/b": ("max", 1, 0),
        "a": (str(300 * MIB), 250 * MIB, 50 * MIB),
        "": (str(500 * MIB), 100 * MIB, 0),
    }
    root = machine(tmp_path, 1000, groups, "0::/a/b\n")
    assert budget(0, 0, root).room_bytes == 90 * MIB


def test_groups_of_version_1(tmp_path: Path) -> None:
    groups = {"memory/docker": (str(200 * MIB), 100 * MIB, 0)}
    root = machine(tmp_path, 1000, groups, "5:cpu:/docker\n4:memory:/docker\n")
    assert budget(0, 0, root).room_bytes == 90 * MIB


def test_a_machine_that_says_nothing_has_no_limit(tmp_path: Path) -> None:
    assert budget(0, 0, tmp_path).room_bytes > 1 << 50


def test_this_machine_has_some() -> None:
    found = budget(0, 0)
    assert 0 < found.room_bytes < 1 << 50
