"""Load, clocks and power mode of machines whose files are recorded in tests/data/machines.json."""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageloom.edge_agent.machine import device, utilisation
from stageloom.edge_agent.machine.device import MachineWatch, cpu_name, device_class, driver_version
from stageloom.edge_agent.machine.utilisation import UNITS, Nvml, UtilisationChain, open_nvml
from stageloom.shared.messages.telemetry import Row, Utilisation, decode_row, encode_row

MACHINES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parents[1] / "data/machines.json").read_text(encoding="utf-8")
)


def refuse() -> Any:
    raise AssertionError("this source is not to be asked here")


def chain(
    root: Path,
    name: str,
    nvml: Callable[[], Nvml | None] = lambda: None,
    ask: Callable[[], str] = lambda: "",
) -> UtilisationChain:
    for path, text in MACHINES[name].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return UtilisationChain(sysfs=root / "sys", proc=root / "proc", root=root, nvml=nvml, ask=ask)


def values(of: UtilisationChain) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in of.read()}


class NvmlError(Exception):
    """As pynvml's."""


def library(**given: Any) -> Any:
    """A stand-in for pynvml: what is given is answered, an exception is raised, the rest is unsupported."""

    def answer(name: str) -> Callable[..., Any]:
        def ask(*_: Any) -> Any:
            found = given.get(name, NvmlError("Not Supported"))
            if isinstance(found, Exception):
                raise found
            return found

        return ask

    names = (
        "nvmlInit nvmlDeviceGetCount nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByUUID"
        " nvmlDeviceGetUUID nvmlDeviceGetUtilizationRates"
        " nvmlDeviceGetClockInfo nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit"
        " nvmlDeviceGetMemoryInfo nvmlDeviceGetCurrentClocksThrottleReasons"
    )
    return SimpleNamespace(
        NVMLError=NvmlError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, **{one: answer(one) for one in names.split()}
    )


@pytest.mark.promise("load-cannot-read-unsupported")
def test_a_jetson_is_read_from_sysfs_and_nvml_is_never_asked(tmp_path: Path) -> None:
    it = chain(tmp_path, "orin_nano", nvml=refuse, ask=refuse)
    assert it.source == "sysfs" and it.power_mode() == "MAXN_SUPER"
    found = values(it)
    assert found["gpu"] == pytest.approx(43.7) and found["gpu_clock"] == 612.0
    assert found["cpu_clock"] == pytest.approx((1728.0 + 729.6) / 2)
    # Only root may read the memory controller's activity there, and one reading of /proc/stat is no share.
    assert found["gpu_memory"] is None and found["cpu"] is None and found["gpu_power"] is None


def test_an_older_jetson_tells_its_memory_bus_and_an_idle_gpu_is_a_true_zero(tmp_path: Path) -> None:
    it = chain(tmp_path, "tx2", nvml=refuse, ask=refuse)
    found = values(it)
    assert found["gpu"] == 0.0
    assert found["gpu_memory"] == pytest.approx(25.0) and found["memory_clock"] == 1866.0
    assert it.power_mode() == "MAXP_CORE_ARM"


@pytest.mark.promise("load-cannot-read-unsupported")
def test_a_jetson_without_readable_files_is_unsupported_and_not_zero(tmp_path: Path) -> None:
    it = chain(tmp_path, "jetson_that_tells_nothing", nvml=refuse, ask=lambda: "MODE_30W")
    assert set(values(it).values()) == {None}
    assert {metric.text for metric in it.read()} == {"unsupported"}
    assert it.power_mode() == "MODE_30W", "nvpmodel was asked, as there is no status file"


THOR_BY_NVML: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=0),
    "nvmlDeviceGetClockInfo": 1386,
}


def test_a_thor_tells_its_clock_by_sysfs_and_its_load_by_nvml(tmp_path: Path) -> None:
    """Its devfreq node has another name than Orin's and no `load` (jetson_stats issue 885)."""
    it = chain(tmp_path, "thor", nvml=lambda: open_nvml(library=library(**THOR_BY_NVML)))
    assert it.source == "sysfs+nvml" and it.power_mode() == "120W"
    assert (values(it)["gpu"], values(it)["gpu_clock"]) == (97.0, 1386.0)


def test_a_load_of_nvml_that_knows_no_clock_is_no_load(tmp_path: Path) -> None:
    """On an Orin NVML says 0 whatever runs; so it may where another file system hides sysfs."""
    told = THOR_BY_NVML | {
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetClockInfo": 0,
    }
    it = chain(tmp_path, "thor", nvml=lambda: open_nvml(library=library(**told)))
    assert (values(it)["gpu"], values(it)["gpu_clock"]) == (None, 1386.0)


def cpuinfo(*parts: str) -> str:
    """Of a 64-bit ARM kernel, which names no model."""
    return "\n\n".join(
        f"processor\t: {core}\nCPU implementer\t: 0x41\nCPU part\t: {part}\nCPU revision\t: 3"
        for core, part in enumerate(parts)
    )


def test_arm_boards_of_two_kinds_are_two_device_classes(tmp_path: Path) -> None:
    """A Raspberry Pi 4 and a 5 share no costs, with a device tree and, as in many containers, without."""
    boards = {
        "pi4": (cpuinfo(*["0xd08"] * 4), "Raspberry Pi 4 Model B Rev 1.4\0"),
        "pi5": (cpuinfo(*["0xd0b"] * 4), "Raspberry Pi 5 Model B Rev 1.0\0"),
        "rock": (cpuinfo(*["0xd05"] * 4, *["0xd0b"] * 4), "Radxa ROCK 5B\0"),
    }
    found = {}
    for name, (cores, model) in boards.items():
        proc = tmp_path / name
        (proc / "device-tree").mkdir(parents=True)
        (proc / "cpuinfo").write_text(cores)
        without = device_class(mode="", proc=proc, root=proc).partition(";")[0]
        (proc / "device-tree/model").write_text(model)
        found[name] = without, device_class(mode="", proc=proc, root=proc).partition(";")[0]
    cores_here = f"x{len(os.sched_getaffinity(0))}"
    assert found == {
        "pi4": (f"ARM 0x41/0xd08 {cores_here}", f"Raspberry Pi 4 Model B Rev 1.4 {cores_here}"),
        "pi5": (f"ARM 0x41/0xd0b {cores_here}", f"Raspberry Pi 5 Model B Rev 1.0 {cores_here}"),
        "rock": (f"ARM 0x41/0xd05+0x41/0xd0b {cores_here}", f"Radxa ROCK 5B {cores_here}"),
    }


def test_a_processor_that_names_its_model_is_called_by_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\ncache size\t: 512 KB\n")
    assert cpu_name(tmp_path) == "AMD EPYC 7B13"
    assert cpu_name(tmp_path / "absent") == platform.machine()


def test_processors_of_one_name_and_other_instructions_are_two_device_classes(tmp_path: Path) -> None:
    """As virtual machines of two generations are: neither runs by what the other measured."""
    found = []
    for flags in ("sse2 avx2", "avx2 avx512f avx512_vnni", "avx2 avx512f avx512_vnni avx512_bf16 amx_bf16"):
        (tmp_path / "cpuinfo").write_text(f"model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: {flags}\n")
        found.append(device_class(mode="", proc=tmp_path, root=tmp_path).partition(";")[0])
    name = f"Intel(R) Xeon(R) Processor x{len(os.sched_getaffinity(0))}"
    assert found == [f"{name} avx2", f"{name} avx512_vnni", f"{name} amx_bf16"]


def test_jetson_clocks_and_the_release_are_part_of_what_costs_are_filed_under(tmp_path: Path) -> None:
    it = chain(tmp_path, "thor")
    assert it.power_mode() == "120W"
    (tmp_path / "sys/class/devfreq/gpu-gpc-0/min_freq").write_text("1575000000\n")
    assert it.power_mode() == "120W jetson_clocks"
    text = device_class(mode=it.power_mode(), proc=tmp_path / "proc", root=tmp_path)
    assert text.startswith(
        "NVIDIA Jetson AGX Thor Developer Kit, L4T 39.2.0, driver 595.78, 120W jetson_clocks; "
    )
    assert utilisation.l4t_release(tmp_path / "nowhere") == ""


@pytest.mark.promise("load-cannot-read-unsupported")
def test_nvml_is_asked_elsewhere_and_each_figure_by_itself(tmp_path: Path) -> None:
    nvml = library(
        nvmlInit=None,
        nvmlDeviceGetHandleByIndex="handle",
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=0, memory=3),
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetPowerUsage=0,  # a driver that does not know
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=1 << 30),
    )
    opened = open_nvml(library=nvml)
    assert opened is not None
    assert opened.memory_bytes() == 1 << 30 and opened.throttle_reasons() is None
    it = chain(tmp_path, "server", nvml=lambda: opened)
    found = values(it)
    assert it.source == "nvml" and it.power_mode() == "700 W"
    assert (found["gpu"], found["gpu_memory"], found["gpu_clock"]) == (0.0, 3.0, 1980.0)
    assert found["gpu_power"] is None and found["gpu_power_limit"] == 700.0


@pytest.mark.parametrize(
    ("visible", "order", "card"),
    [
        (None, "PCI_BUS_ID", 0),
        ("1", "PCI_BUS_ID", 1),
        ("2,0", "PCI_BUS_ID", 2),
        ("1", None, 0),  # CUDA counts the fastest first, NVML along the bus
        ("GPU-22222222-aaaa", None, 2),
        ("GPU-1111", None, 1),
        ("GPU-9", None, 0),
        ("MIG-22222222-aaaa", None, 0),
        ("", None, 0),
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_nvml_is_asked_for_the_card_that_cuda_uses(
    visible: str | None, order: str | None, card: int, *, as_bytes: bool
) -> None:
    nvml = library(nvmlInit=None, nvmlDeviceGetCount=3)
    uuids = [f"GPU-{str(number) * 8}-aaaa" for number in range(3)]
    nvml.nvmlDeviceGetHandleByIndex = lambda number: number
    nvml.nvmlDeviceGetUUID = lambda at: uuids[at].encode() if as_bytes else uuids[at]
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda at: 1000 * (100 + at)
    given = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    environment = {name: value for name, value in given.items() if value is not None}
    opened = open_nvml(library=nvml, environment=environment)
    assert opened is not None and opened.power_limit_w() == 100.0 + card


def test_a_power_limit_that_cannot_be_read_now_is_unknown_and_no_other_mode(tmp_path: Path) -> None:
    limits: list[Any] = [350_000, 350_000, NvmlError("GPU is lost"), 350_000]

    def limit(*arguments: object) -> int:
        found = limits.pop(0)
        if isinstance(found, Exception):
            raise found
        return int(found)

    nvml = library(nvmlInit=None, nvmlDeviceGetHandleByIndex="handle")
    nvml.nvmlDeviceGetEnforcedPowerLimit = limit
    it = chain(tmp_path, "server", nvml=lambda: open_nvml(library=nvml))
    assert [it.power_mode() for _ in range(3)] == ["350 W", "", "350 W"]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_nvml_without_a_driver_or_a_device_is_no_source(tmp_path: Path, broken: str) -> None:
    works = {"nvmlInit": None, "nvmlDeviceGetHandleByIndex": "handle", broken: NvmlError("no driver")}
    it = chain(tmp_path, "server", nvml=lambda: open_nvml(library=library(**works)))
    assert it.source == "none" and values(it)["gpu"] is None and it.power_mode() == ""


def test_the_processors_load_is_the_share_of_time_since_the_last_reading(tmp_path: Path) -> None:
    it = chain(tmp_path, "server")
    assert values(it)["cpu"] is None
    (tmp_path / "proc/stat").write_text("cpu  1200 0 600 8600 200 0 0 0 0 0\n")
    assert values(it)["cpu"] == pytest.approx(30.0)  # 300 of 1,000 ticks
    assert values(it)["cpu"] is None, "no time has passed: that is not a load of 0"
    assert utilisation.spent("cpu 1 2 3") is None and utilisation.spent("") is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [("NV Fan Mode:cool\nNV Power Mode: MODE_30W_4CORE\n5\n", "MODE_30W_4CORE"), ("command not found", "")],
)
def test_nvpmodels_answer_names_the_mode(text: str, mode: str) -> None:
    assert utilisation.queried_mode(text) == mode


def test_a_mode_that_the_table_does_not_name_has_its_number(tmp_path: Path) -> None:
    it = chain(tmp_path, "orin_nano", ask=refuse)
    (tmp_path / "etc/nvpmodel.conf").unlink()
    assert it.power_mode() == "mode 2"


def test_the_device_class_says_driver_and_power_mode(tmp_path: Path) -> None:
    chain(tmp_path, "server")
    assert driver_version(tmp_path / "proc") == "580.159.04" and driver_version(tmp_path) == ""
    text = device_class("fp16", mode="700 W", proc=tmp_path / "proc")
    assert text.startswith("NVIDIA H100 80GB HBM3, driver 580.159.04, 700 W; ") and text.endswith("; fp16")
    assert len(text) <= 128
    long = [device_class("fp16", mode="A" * 150 + end, proc=tmp_path / "proc") for end in ("1", "2", "1")]
    assert {len(one) for one in long} == {128} and long[0] == long[2] != long[1]


def test_what_a_machine_never_tells_is_reported_once_as_unsupported(tmp_path: Path) -> None:
    watch = MachineWatch(chain(tmp_path, "orin_nano", ask=refuse), lambda mode: f"class, {mode}")
    first = watch.look()
    assert {row.metric for row in first if isinstance(row, Utilisation)} == set(UNITS)
    assert all(decode_row(encode_row(Row(1, row))).data == row for row in first)
    again = [row for row in watch.look() if isinstance(row, Utilisation)]
    assert {row.metric for row in again} == {"gpu", "gpu_clock", "cpu_clock"}
    assert {row.metric for row in watch.clocks() if isinstance(row, Utilisation)} == {
        "gpu_clock",
        "cpu_clock",
    }
    assert watch.environment() == "class, MAXN_SUPER"


def test_a_mode_that_cannot_be_read_for_a_moment_has_not_changed(tmp_path: Path) -> None:
    watch = MachineWatch(chain(tmp_path, "orin_nano"), lambda mode: mode)
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    watch.look()
    assert watch.power_mode == "MAXN_SUPER"
    (tmp_path / "var/lib/nvpmodel/status").write_text("pmode:0000")
    watch.look()
    assert watch.power_mode == "15W"


def test_another_mode_is_told_from_whatever_else_an_environment_may_differ_in(tmp_path: Path) -> None:
    watch = MachineWatch(chain(tmp_path, "orin_nano", ask=refuse), lambda mode: f"class, {mode}; onnx-1")
    then = [
        watch.mode_then(f"{before}; onnx-{version}")
        for before in ("class, 15W", "class")
        for version in (1, 2)
    ]
    assert then == ["15W", "", "", ""]
    assert watch.mode_then(watch.environment()) == watch.mode_then("") == ""
    watch.power_mode = ""
    assert watch.mode_then("class, 15W; onnx-1") == "", "no mode is known now"


def test_another_mode_is_told_where_the_device_class_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = chain(tmp_path, "orin_nano", ask=refuse)
    runtimes = {f"runtime{number}": "1.2.3" for number in range(9)}
    monkeypatch.setattr(device, "installed", lambda: runtimes)

    def environment(mode: str) -> str:
        return device_class(mode=mode, proc=tmp_path / "proc", root=tmp_path)

    watch = MachineWatch(machine, environment)
    then = environment("15W")
    assert len(then) == len(watch.environment()) == 128
    assert (watch.mode_then(then), watch.mode_then(watch.environment())) == ("15W", "")
    runtimes["runtime8"] = "1.2.4"
    assert watch.mode_then(then) == "", "what is cut off is another, too"
