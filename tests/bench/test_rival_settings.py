"""Rivals are tuned for the cores that there are."""

import pytest

from stageloom.edge_agent.bench.own_models import settings_for
from stageloom.edge_agent.bench.rival_settings import RivalSetting, by_deadline, rival_settings


def names(settings: list[RivalSetting] | tuple[RivalSetting, ...]) -> list[str]:
    return [one.name for one in settings]


@pytest.mark.parametrize(
    ("cores", "tuned"),
    [
        (1, ["ort_1x1", "ov_latency", "ov_1x1", "ov_throughput"]),
        (2, ["ort_1x2", "ort_2x1", "ov_latency", "ov_2x1", "ov_throughput"]),
        (3, ["ort_1x3", "ort_1x2", "ort_3x1", "ov_latency", "ov_3x1", "ov_throughput"]),
        (16, ["ort_1x16", "ort_8x2", "ort_16x1", "ov_latency", "ov_16x1", "ov_throughput"]),
    ],
)
def test_a_users_models_are_compared_with_settings_of_all_cores(cores: int, tuned: list[str]) -> None:
    assert names(settings_for("fp32", cores, openvino=True)) == ["naive", *tuned]


def test_a_settings_name_says_its_workers_and_threads() -> None:
    for one in (*rival_settings(16, openvino=True, bfloat16=False), by_deadline({}, 16)):
        shape = one.name.removesuffix("_spin").rpartition("_")[2].partition("x")
        if shape[1]:
            assert (one.options.workers, one.options.threads) == (int(shape[0]), int(shape[2]))


def test_a_benchmark_has_every_setting_of_the_machines_cores_once() -> None:
    assert names(rival_settings(2, openvino=True, bfloat16=True)) == [
        *("naive", "ort_1x2", "ort_2x1", "ort_1x2_spin", "ort_1x1", "ort_2x2", "ort_per_model"),
        *("ov_latency", "ov_2x1", "ov_throughput", "ov_1x2", "ov_per_model"),
        *("ov_latency_bf16", "ov_2x1_bf16", "ov_throughput_bf16", "ov_1x2_bf16", "ov_per_model_bf16"),
    ]
    assert names(rival_settings(16, openvino=True, bfloat16=False)) == [
        *("naive", "ort_1x16", "ort_8x2", "ort_16x1", "ort_1x16_spin", "ort_1x1", "ort_16x2"),
        *("ort_per_model", "ov_latency", "ov_16x1", "ov_throughput", "ov_1x16", "ov_per_model"),
    ]
    for cores in (1, 2, 3, 16):
        every = names(rival_settings(cores, openvino=True, bfloat16=True))
        assert len(every) == len(set(every))
