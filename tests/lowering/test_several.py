"""Units of several operators, and further kernels of one: equal results in every buffer they may get."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from stageloom.edge_agent.executor.torch.kernels import Instruments, wrong_ones
from stageloom.edge_agent.lowering.batch import LoweredModel
from stageloom.edge_agent.lowering.convolve import searching
from stageloom.edge_agent.lowering.cudnn_graph import library
from stageloom.edge_agent.lowering.dtypes import Precision, use_tf32
from stageloom.edge_agent.lowering.model import neighbours
from stageloom.edge_agent.lowering.program import Alternative, Unit
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import OpId, TensorId
from stageloom.shared.merge import merge_key
from tests.executor.models import artifact_of, difference, random_inputs, reference
from tests.executor.small_models import Builder
from tests.lowering.running import lowered


class Bench:
    """Runs units of a model on onnxruntime's tensors, so that each is judged alone."""

    def __init__(self, artifact: Artifact, model: LoweredModel, bound: float = 1e-5) -> None:
        self.bound = bound
        self.graph = artifact.graph
        self.model = model
        self.wanted = reference(
            artifact, random_inputs(artifact.graph, 3), [t.name for t in self.graph.tensors]
        )

    def tensor(self, tensor: TensorId) -> Tensor:
        made = self.model.allocate(tensor)
        return made.copy_(torch.from_numpy(self.wanted[self.graph.tensors[tensor].name]))

    def slices(self, unit: Unit, offset: int) -> list[Tensor]:
        """Buffers that lie inside larger ones, as the inputs of a Concat do; all in one if they fit.

        At an aligned offset a library may take a slice for the packed buffer that it wrote before.
        """
        shapes = [self.model.specs[t].shape for t in unit.outputs]
        channels = sum(s[1] for s in shapes)
        order = torch.channels_last if len(shapes[0]) == 4 else torch.contiguous_format
        shape = (shapes[0][0], channels + 2 * offset, *shapes[0][2:])
        spec = self.model.specs[unit.outputs[0]]
        large = torch.full(shape, torch.nan, dtype=spec.dtype, device=self.model.device)
        large = large.contiguous(memory_format=order)
        return list(torch.split(large[:, offset : offset + channels], [s[1] for s in shapes], 1))

    def packed(self, unit: Unit) -> list[Tensor]:
        """Buffers of their own."""
        return [self.model.allocate(t).fill_(torch.nan) for t in unit.outputs]

    def check(self, unit: Unit, refuses: tuple[str, ...] = ()) -> set[str]:
        """Every alternative, into packed buffers, into slices and into memory of torch's.

        Those whose name begins as one of `refuses` may have no kernel, or one that an executor would not let
        run: cudnn's plan for float32 with an addend reads what it is to write. Returns the names of those
        that ran.
        """
        args = [self.tensor(t) for t in unit.inputs]
        before = [a.clone() for a in args]
        ran = set()
        for way in unit.alternatives:
            with torch.inference_mode():
                self.agree(unit, way, way.run(args))
                for outs in (self.packed(unit), self.slices(unit, 16), self.slices(unit, 3)):
                    if not way.fits(args, outs):
                        continue
                    if refuses and way.name.startswith(refuses) and not self.offered(unit, way, args, outs):
                        continue
                    way.run_into(args, outs)
                    ran.add(way.name)
                    self.agree(unit, way, outs)
            assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
        return ran

    def offered(self, unit: Unit, way: Alternative, args: list[Tensor], outs: list[Tensor]) -> bool:
        """Whether a library has such a kernel, and the comparison with the plain one lets it run."""
        try:
            way.run_into(args, outs)
        except RuntimeError:
            return False
        instruments = Instruments(lambda launch: [0.0])
        wrong = wrong_ones([unit.alternatives[0], way], args, outs, self.bound, instruments)
        addend = len(unit.inputs) > 1 and outs[0].dtype is torch.float32
        assert not wrong or addend, (way.name, unit.ops, wrong)
        return not wrong

    def agree(self, unit: Unit, way: Alternative, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(unit.outputs, values, strict=True):
            wanted = self.wanted[self.graph.tensors[tensor].name]
            assert difference(value.float().cpu().numpy(), wanted) < self.bound, (way.name, unit.ops)


def classes(artifact: Artifact) -> list[list[OpId]]:
    """Operators that may merge, per class."""
    found: dict[object, list[OpId]] = defaultdict(list)
    for op in range(len(artifact.graph.operators)):
        if (key := merge_key(artifact.graph, OpId(op))) is not None:
            found[key].append(OpId(op))
    return [ops for ops in found.values() if len(ops) > 1]


@pytest.mark.promise("merge-stage-convolution-equal")
@pytest.mark.parametrize(
    "name", ["squeezenet", "googlenet", pytest.param("inception_v3", marks=pytest.mark.full)]
)
def test_a_merge_stage_is_one_convolution_with_equal_outputs(name: str) -> None:
    artifact = artifact_of(name)
    lowering, model = lowered(artifact)
    bench = Bench(artifact, model)
    groups = classes(artifact)
    assert len(groups) >= 8
    for ops in groups:
        unit = lowering.merged(1, ops)
        assert unit.ops == tuple(ops)
        bench.check(unit)
    assert lowering.merged(1, groups[0]) is lowering.merged(1, list(reversed(groups[0])))


def test_operators_that_may_not_merge_are_refused() -> None:
    lowering, _ = lowered(artifact_of("squeezenet"))
    with pytest.raises(ValueError, match="may not merge"):
        lowering.merged(1, [OpId(0), OpId(1)])


def test_neighbours_along_the_channels_are_one_tensor_and_others_are_not() -> None:
    large = torch.arange(2 * 10 * 3 * 3.0).reshape(2, 10, 3, 3).contiguous(memory_format=torch.channels_last)
    one, two, three = large[:, 1:4], large[:, 4:6], large[:, 6:10]
    whole = neighbours([one, two, three])
    assert whole is not None and torch.equal(whole, large[:, 1:10])
    assert whole.data_ptr() == one.data_ptr()
    assert neighbours([one, three]) is None
    assert neighbours([two, one]) is None
    assert neighbours([one, two.clone()]) is None


@pytest.mark.promise("units-write-wherever-they")
@pytest.mark.parametrize("name", ["squeezenet", "resnet50"])
def test_every_alternative_kernel_gives_the_same_wherever_it_writes(name: str) -> None:
    artifact = artifact_of(name)
    _, model = lowered(artifact)
    bench = Bench(artifact, model)
    names = set()
    for unit in model.units:
        if len(unit.alternatives) > 1:
            names |= {way.name for way in unit.alternatives}
            bench.check(unit)
    assert names == {"nodes", "gemm"}


def test_an_alternative_is_chosen_by_name() -> None:
    _, model = lowered(artifact_of("squeezenet"))
    unit = next(u for u in model.units if len(u.alternatives) > 1)
    assert unit.way("gemm") is unit.alternatives[1]
    with pytest.raises(KeyError):
        unit.way("none of them")


def block(*, relu: bool) -> Artifact:
    """Convolution, BatchNormalization (its input is read twice, so it stays), Add, Relu."""
    b = Builder(4)
    conv = b.node("Conv", "x", b.weight(8, 8, 3, 3, scale=0.1), b.weight(8), pads=[1, 1, 1, 1])
    norm = b.node(
        "BatchNormalization", conv, b.weight(8), b.weight(8), b.weight(8), b.weight(8, positive=True)
    )
    y = b.node("Add", norm, b.node("Sigmoid", "x"))
    y = b.node("Relu", y) if relu else y
    return b.artifact({"x": (1, 8, 6, 6)}, {y: (1, 8, 6, 6), conv: (1, 8, 6, 6)})


@pytest.mark.parametrize("relu", [False, True])
def test_joined_operators_hide_what_lies_between_them_and_fold_the_normalisation(relu: bool) -> None:
    artifact = block(relu=relu)
    lowering, model = lowered(artifact)
    bench = Bench(artifact, model)
    ops = {o.kind: OpId(i) for i, o in enumerate(artifact.graph.operators)}
    assert "BatchNormalization" in ops, "the importer left it, as its input is an output"
    for unit in model.units:
        bench.check(unit)
    tail = [ops["BatchNormalization"], ops["Add"], *([ops["Relu"]] if relu else [])]
    joined = lowering.joined(1, tail)
    assert len(joined.inputs) == 2 and len(joined.outputs) == 1
    bench.check(joined)
    whole = lowering.joined(1, [ops["Conv"], *tail])
    assert len(whole.outputs) == 2, "the convolution's own result is wanted, too"
    with_sigmoid = lowering.joined(1, list(map(OpId, range(len(artifact.graph.operators)))))
    assert len(with_sigmoid.inputs) == 1


@pytest.mark.parametrize("relu", [False, True])
def test_a_chain_is_folded_into_one_convolution(relu: bool) -> None:
    from benchmarks.whole_model import WholeModel

    b = Builder(4)
    conv = b.node("Conv", "x", b.weight(8, 8, 3, 3, scale=0.1), b.weight(8), pads=[1, 1, 1, 1])
    parameters = (b.weight(8), b.weight(8), b.weight(8), b.weight(8, positive=True))
    y = b.node("Add", "z", b.node("BatchNormalization", conv, *parameters))
    y = b.node("Relu", y) if relu else y
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((1, 8, 6, 6)).astype(np.float32) for name in ("x", "z")}
    model = b.model({"x": (1, 8, 6, 6), "z": (1, 8, 6, 6)}, {y: (1, 8, 6, 6)})
    (plain, *others) = WholeModel(model, feeds).ways()
    assert [way.name for way in others] == ["folded"]
    args = [torch.from_numpy(feeds[name]) for name in ("x", "z")]
    wanted = plain.run(args)[0]
    out = torch.full_like(wanted, torch.nan)
    others[0].run_into(args, (out,))
    for found in (others[0].run(args)[0], out):
        assert difference(found.numpy(), wanted.numpy()) < 1e-6


def test_joining_an_operator_that_runs_elsewhere_is_refused() -> None:
    b = Builder()
    rois, zero = b.constant(np.array([[0, 0, 5, 5]], np.float32)), b.constant(np.array([0]))
    picked = b.node("RoiAlign", "x", rois, zero, output_height=3, output_width=3)
    artifact = b.artifact({"x": (1, 4, 8, 8)}, {picked: (1, 4, 3, 3)})
    lowering, _ = lowered(artifact)
    with pytest.raises(ExecutorError, match="cannot be joined"):
        lowering.joined(1, [OpId(0)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "inception_v3"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("tf32", 5e-3), ("fp16", 1e-2)])
def test_every_kernel_on_a_cuda_device_gives_the_same(
    name: str, precision: str, bound: float, tf32_as_before: None
) -> None:
    artifact = artifact_of(name)
    lowering, model = lowered(artifact, precision=Precision(precision), device=torch.device("cuda"))
    bench = Bench(artifact, model, bound)
    units: dict[int, list[OpId]] = defaultdict(list)
    for op, operator in enumerate(artifact.graph.operators):
        units[operator.fused_unit].append(OpId(op))
    every = [
        *model.units,
        *(lowering.merged(1, ops) for ops in classes(artifact)),
        *(lowering.joined(1, ops) for ops in units.values() if len(ops) > 1),
    ]
    use_tf32(lowering.precision is Precision.TF32)
    with searching():
        ran = {way for unit in every for way in bench.check(unit, refuses=("cudnn",))}
    assert "cudnn fused" in ran
    assert library() is None or {"cudnn graph 0", "cudnn graph 1", "cudnn graph copied"} <= ran
