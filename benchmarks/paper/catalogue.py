"""All tables and figures, in the order of the index. Ids begin with the paper's."""

from typing import Final

from benchmarks.paper import (
    eop,
    ios_schedules,
    ios_spaces,
    kept_results,
    opara,
    top_search,
    top_serving,
    top_shapes,
)
from benchmarks.paper.backlog_series import BACKLOG
from benchmarks.paper.finding import Reproduce, Reproduction
from benchmarks.paper.kept_results import GPG_TRAINING, GPU, STARONNX_BATCHES, STARONNX_FILES, files
from benchmarks.paper.pays_series import PAYS

_TWINS: Final = ("planner/twin/devices",)
_PAIRS: Final = (*_TWINS, "planner/twin/device_pairs")
_OWN: Final = ("benchmarks/paper/devices",)
_POLICY: Final = ("shared/policy/gpg/default.checkpoint",)
_DRAWN: Final = ("benchmarks/ios_networks.json",)
_COSTS: Final = "cost model (V100)"


def _top(id: str, title: str, says: str, where: str, reproduce: Reproduce, *read: str) -> Reproduction:
    return Reproduction(f"top-{id}", "top", title, says, where, reproduce, read)


def _ios(id: str, title: str, says: str, where: str, reproduce: Reproduce, *read: str) -> Reproduction:
    return Reproduction(f"ios-{id}", "ios", title, says, where, reproduce, read)


def _eop(id: str, says: str, reproduce: Reproduce) -> Reproduction:
    title = id.replace("-", " ").capitalize()
    return Reproduction(f"eop-{id}", "eop", title, says, "cost model (i7-7700, RTX 2060)", reproduce, _PAIRS)


_TOP: Final = (
    _top("table-1", "Table I",
        "Four devices with their cores and peaks.",
        "device files", ios_spaces.top_table_1, *_TWINS),
    _top("table-2", "Table II",
        "Three networks with their blocks and operators.",
        "importer", ios_spaces.top_table_2),
    _top("figure-2", "Figure 2",
        "ResNet-50 under IOS: once tasks overlap, latency rises although less than half of the GPU is used.",
        "twin (RTX 3080)", top_serving.figure_2, *_OWN),
    _top("figure-3", "Figure 3",
        "Two models under POS: latency rises when their rates differ, though fewer tasks come.",
        "twin (RTX 3080)", top_serving.figure_3, *_OWN),
    _top("figure-13", "Figure 13",
        "The time of dynamic programming explodes with the sub-blocks; GPG stays a tenth of it and is "
        "barely dearer.",
        "cost model (A100), processor time", top_search.figure_13, *_POLICY, *_TWINS),
    _top("figure-14", "Figure 14",
        "One model on the server: TOP serves 14 to 180 % more than frameworks.",
        "twin (A100)", top_serving.figure_14, *_TWINS),
    _top("figure-15", "Figure 15",
        "Three models on the server: TOP serves 63 % more than POS.",
        "twin (A100)", top_serving.figure_15, *_TWINS),
    _top("figure-16", "Figure 16",
        "TOP uses 26 % more of the GPU than IOS with one model, and 14 % more than POS with three.",
        "twin (A100)", top_serving.figure_16, *_TWINS),
    _top("figure-17", "Figure 17",
        "TOP keeps the variance of the queues below its threshold; under POS it grows and grows.",
        "twin (A100, Xavier NX, Nano); agent where kept", top_serving.figure_17, *_TWINS, PAYS, BACKLOG),
    _top("figure-18", "Figure 18",
        "More sub-blocks per combined block gain until the device is full, at H = 2, 2, 3 and 4, and cost "
        "more time.",
        "twin", top_shapes.figure_18, *_TWINS),
    _top("figure-19", "Figure 19",
        "Of a step of training the search for endings takes the most time.",
        "CPU, processor time", top_search.figure_19, *_POLICY, *_TWINS),
    _top("figure-20", "Figure 20",
        "The richer the device, the fewer the stages and the more the groups in each.",
        "twin", top_shapes.figure_20, *_TWINS),
    _top("figure-21", "Figure 21",
        "GPG converges within 6000 steps, about 20 hours.",
        "CPU, kept", kept_results.top_figure_21, *files(GPG_TRAINING)),
    _top("figure-22", "Figure 22",
        "MADDPG converges within 8000 steps, about a week.",
        "", kept_results.top_figure_22),
    _top("figure-23", "Figure 23",
        "Also where all models share their input TOP serves more than POS.",
        "twin (A100)", top_serving.figure_23, *_TWINS),
    _top("figure-24", "Figure 24",
        "More concurrency raises the throughput of one model, and scheduled together even more.",
        "twin (A100)", top_shapes.figure_24, *_TWINS),
    _top("figure-24-gpu", "Figure 24, on a GPU",
        "More concurrency raises the throughput of one model, and scheduled together even more.",
        "H200, kept", kept_results.top_figure_24_gpu, *files(GPU)),
    _top("figure-25", "Figures 25 and 26",
        "The larger the batch, the more slender the graph; throughput saturates at 64 and utilisation at "
        "about 90 %.",
        "twin (A100)", top_shapes.figures_25_26, *_TWINS),
    _top("figure-26-gpu", "Figure 26, on a GPU",
        "Throughput rises with the batch and saturates at 64.",
        "H200, kept", kept_results.top_figure_26_gpu, *files(GPU)),
    _top("figure-27", "Figure 27",
        "At every batch TOP serves more than all others.",
        "twin (A100)", top_shapes.figure_27, *_TWINS),
    _top("section-6-f", "Section VI-F",
        "Online the policy answers within 0.05 ms, and a device rebuilds its graphs within 3 s.",
        "CPU, processor time", top_search.section_6_f),
)  # fmt: skip

_IOS: Final = (
    _ios("table-1", "Table 1",
        "The largest block of each network has few states but very many schedules.",
        "search space", ios_spaces.table_1, *_DRAWN),
    _ios("table-2", "Table 2",
        "Four networks with their blocks and operators.",
        "importer", ios_spaces.table_2, *_DRAWN),
    _ios("table-3-batches", "Table 3 (1)",
        "A schedule made for a batch is the best at that batch; others cost up to 15 %.",
        _COSTS, ios_schedules.table_3_batches, *_OWN),
    _ios("table-3-devices", "Table 3 (2)",
        "A schedule made for a device is the best on it; the other costs up to 11 %.",
        "cost model (V100, K80)", ios_schedules.table_3_devices, *_OWN),
    _ios("figure-6", "Figure 6",
        "IOS with both strategies is the best of five schedules on four networks.",
        _COSTS, ios_schedules.figure_6, *_OWN),
    _ios("figure-6-gpu", "Figure 6, on a GPU",
        "IOS is 1.1 to 1.5 times as fast as the sequential schedule, and gains little on ResNet-50.",
        "H200, kept", kept_results.ios_figure_6_gpu, *files(GPU)),
    _ios("figure-7", "Figure 7",
        "IOS is 1.1 to 1.5 times as fast as frameworks on cuDNN.",
        "H200, kept", kept_results.ios_figure_7, *files(GPU)),
    _ios("figure-8", "Figure 8",
        "IOS keeps 58 % more warps active.",
        "H200, kept", kept_results.ios_figure_8, *files(GPU)),
    _ios("figure-9", "Figure 9",
        "Smaller limits r and s shorten the search and lengthen the latency.",
        _COSTS, ios_schedules.figure_9, *_OWN),
    _ios("figure-10", "Figure 10",
        "The last block of Inception V3 has two stages for batch 1 and four, one of them merged, for batch "
        "32.",
        _COSTS, ios_schedules.figure_10, *_OWN),
    _ios("figure-11", "Figure 11",
        "IOS serves more at every batch; beyond 128 throughput saturates.",
        _COSTS, ios_schedules.figure_11, *_OWN),
    _ios("figure-16", "Figure 16",
        "Every block of Inception V3 gains, later ones more, up to 2.3 times.",
        _COSTS, ios_schedules.figure_16, *_OWN),
)  # fmt: skip

_REST: Final = (
    Reproduction("opara-table-1", "opara", "Table I",
        "Allocating streams takes Opara up to two orders of magnitude less time than Nimble.",
        "CPU, processor time", opara.table_1),
    Reproduction("opara-figure-5", "opara", "Figure 5",
        "Opara is up to 1.68 times a sequential CUDA graph and up to 1.29 times the best rival.",
        "H200, kept", kept_results.opara_figure_5, files(GPU)),
    Reproduction("opara-figure-9", "opara", "Figures 8 and 9",
        "Opara gains at every batch, less and less.",
        "cost model (A100)", opara.figure_9, _TWINS),
    Reproduction("staronnx-figure-2", "staronnx", "Figure 2",
        "For each rate one batch has the least latency; larger rates need larger batches.",
        "CPU, kept", kept_results.staronnx_figure_2, files(STARONNX_BATCHES)),
    Reproduction("staronnx-figure-3", "staronnx", "Figure 3",
        "The integration costs nothing noticeable over native ONNX Runtime, and beats Triton.",
        "CPU, kept", kept_results.staronnx_figure_3, files(*STARONNX_FILES)),
    Reproduction("staronnx-figure-4", "staronnx", "Figure 4",
        "Models in two parts over two resources serve more, at a latency that rises less.",
        "CPU, kept", kept_results.staronnx_figure_4, files(*STARONNX_FILES)),
    _eop("table-1",
        "Eight models with 91 to 903 operators.",
        eop.table_1),
    _eop("table-2",
        "5 to 35 % of a model's operators take over 95 % of its time.",
        eop.table_2),
    _eop("table-4",
        "EOP is up to 4.9 times as fast as fixed splits.",
        eop.table_4),
    _eop("table-5",
        "Each kind of operator has a share at which a split pays.",
        eop.table_5),
    _eop("figure-7",
        "Kinds of operators speed up differently with their size.",
        eop.figure_7),
    _eop("figure-8",
        "EOP is 1.25 to 3.5 times as fast as processor, card and fixed splits.",
        eop.figure_8),
    _eop("figure-9",
        "The gains stay over batches, input sizes and layers.",
        eop.figure_9),
    _eop("figure-10",
        "The time does not grow from 12 to 192 attention layers.",
        eop.figure_10),
    _eop("figure-11",
        "Joint tuning of neighbours gains on top of splitting operators by themselves.",
        eop.figure_11),
)  # fmt: skip

CATALOGUE: Final = (*_TOP, *_IOS, *_REST)
