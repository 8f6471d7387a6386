"""LSTM, GRU and plain recurrent networks, unrolled over time.

Shapes follow ONNX: X [time, batch, input], W [directions, gates * hidden, input], R [directions, gates *
hidden, hidden], B [directions, 2 * gates * hidden]; with layout 1 the batch comes first in X, Y and the
states. The input's product for all steps is one matrix product; each step adds one of the state.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.node import Lowered, Node, operator

Activation = Callable[[Tensor], Tensor]


_ACTIVATIONS: dict[str, tuple[float, float, Callable[[Tensor, float, float], Tensor]]] = {
    "sigmoid": (0.0, 0.0, lambda x, a, b: torch.sigmoid(x)),
    "tanh": (0.0, 0.0, lambda x, a, b: torch.tanh(x)),
    "relu": (0.0, 0.0, lambda x, a, b: torch.relu(x)),
    "softsign": (0.0, 0.0, lambda x, a, b: functional.softsign(x)),
    "softplus": (0.0, 0.0, lambda x, a, b: functional.softplus(x)),
    "affine": (1.0, 0.0, lambda x, a, b: a * x + b),
    "leakyrelu": (0.01, 0.0, lambda x, a, b: functional.leaky_relu(x, a)),
    "elu": (1.0, 0.0, lambda x, a, b: functional.elu(x, a)),
    "hardsigmoid": (0.2, 0.5, lambda x, a, b: (a * x + b).clamp(0.0, 1.0)),
    "scaledtanh": (1.0, 1.0, lambda x, a, b: a * torch.tanh(b * x)),
    "thresholdedrelu": (1.0, 0.0, lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x))),
}
"""Per name the defaults of alpha and beta, and the function of both."""


_WITH_ALPHA = {"affine", "leakyrelu", "elu", "hardsigmoid", "scaledtanh", "thresholdedrelu"}
_WITH_BETA = {"affine", "hardsigmoid", "scaledtanh"}
"""Values of `activation_alpha` and `activation_beta` are given to these alone, one after another."""


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    if name not in _ACTIVATIONS:
        raise Unsupported(f"a recurrent network with {name}")
    default_alpha, default_beta, function = _ACTIVATIONS[name]
    a, b = default_alpha if alpha is None else float(alpha), default_beta if beta is None else float(beta)
    return lambda x: function(x, a, b)


class _Network:
    """Directions, lengths and layout, which the three kinds share; `cell` computes one step."""

    def __init__(self, node: Node, gates: int, defaults: Sequence[str]) -> None:
        self.gates = gates
        self.hidden = node.integer("hidden_size", node.shape(2)[-1])
        direction = node.text("direction", "forward")
        self.backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        self.batch_first = bool(node.integer("layout", 0))
        self.clip = node.attribute("clip")
        shape = node.shape(0)
        self.batch, self.steps = (shape[0], shape[1]) if self.batch_first else (shape[1], shape[0])
        given = node.attribute("activations") or list(defaults) * len(self.backwards)
        names = [(name.decode() if isinstance(name, bytes) else name).lower() for name in given]
        alphas, betas = (iter(node.attribute(f"activation_{name}") or []) for name in ("alpha", "beta"))
        made = [
            _activation(
                name,
                next(alphas, None) if name in _WITH_ALPHA else None,
                next(betas, None) if name in _WITH_BETA else None,
            )
            for name in names
        ]
        self.activations = [made[i : i + len(defaults)] for i in range(0, len(made), len(defaults))]

    def bounded(self, x: Tensor) -> Tensor:
        """Clip the input of an activation if the node asks for it."""
        return x if self.clip is None else x.clamp(-float(self.clip), float(self.clip))

    def states(self, first: Tensor | None, like: Tensor) -> list[Tensor]:
        """Return the initial state of each direction. [batch, hidden]"""
        if first is None:
            zeros = torch.zeros((self.batch, self.hidden), dtype=like.dtype, device=like.device)
            return [zeros] * len(self.backwards)
        return list((first.transpose(0, 1) if self.batch_first else first).unbind(0))

    def run(
        self,
        x: Tensor,
        w: Tensor,
        bias: Sequence[Tensor | None],
        lengths: Tensor | None,
        first: Sequence[Sequence[Tensor]],
        cell: Callable[[int, Tensor, Sequence[Tensor]], Sequence[Tensor]],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all outputs [time, directions, batch, hidden], last states [directions, batch, hidden].

        `cell(direction, product, states)` returns the next states, the output first.
        """
        x = x.transpose(0, 1) if self.batch_first else x
        outputs, finals = [], []
        for d, backwards in enumerate(self.backwards):
            products = functional.linear(x, w[d], bias[d])  # [time, batch, gates * hidden]
            states = [kind[d] for kind in first]
            rows: list[Tensor] = [products] * self.steps
            for t in reversed(range(self.steps)) if backwards else range(self.steps):
                after = cell(d, products[t], states)
                if lengths is None:
                    states, rows[t] = list(after), after[0]
                else:  # past a sample's end its state stays and its output is zero
                    runs = (t < lengths).unsqueeze(-1)
                    states = [torch.where(runs, new, old) for new, old in zip(after, states, strict=True)]
                    rows[t] = torch.where(runs, after[0], torch.zeros_like(after[0]))
            outputs.append(torch.stack(rows))
            finals.append(states)
        made = torch.stack(outputs, 1)
        return made, [torch.stack([states[k] for states in finals]) for k in range(len(first))]

    def arranged(self, made: Tensor, finals: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs in the node's layout."""
        if not self.batch_first:
            return (made, *finals)
        return (made.permute(2, 0, 1, 3), *(final.transpose(0, 1) for final in finals))

    def biases(self, b: Tensor | None, *, joined: bool) -> list[Tensor | None]:
        """Return what each direction adds to the input's product: both biases, or the input's alone."""
        if b is None:
            return [None] * len(self.backwards)
        half = self.gates * self.hidden
        return [row[:half] + row[half:] if joined else row[:half] for row in b.unbind(0)]


@operator("RNN")
def rnn(node: Node) -> Lowered:
    net = _Network(node, 1, ["tanh"])

    def run(
        x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def cell(d: int, product: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
            return [net.activations[d][0](net.bounded(product + functional.linear(states[0], r[d])))]

        made = net.run(x, w, net.biases(b, joined=True), lengths, [net.states(first, x)], cell)
        return net.arranged(*made)

    return run


@operator("GRU")
def gru(node: Node) -> Lowered:
    """Gates in the order update, reset, hidden."""
    net = _Network(node, 3, ["sigmoid", "tanh"])
    reset_after = bool(node.integer("linear_before_reset", 0))
    h = net.hidden

    def run(
        x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def cell(d: int, product: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
            gate, hide = net.activations[d]
            state, recurrent = states[0], r[d]
            own = None if b is None else b[d][3 * h :]
            gates = product[:, : 2 * h] + functional.linear(
                state, recurrent[: 2 * h], None if own is None else own[: 2 * h]
            )
            update, reset = gate(net.bounded(gates)).chunk(2, -1)
            last = None if own is None else own[2 * h :]
            if reset_after:
                inner = reset * functional.linear(state, recurrent[2 * h :], last)
            else:
                inner = functional.linear(reset * state, recurrent[2 * h :], last)
            hidden = hide(net.bounded(product[:, 2 * h :] + inner))
            return [(1 - update) * hidden + update * state]

        made = net.run(x, w, net.biases(b, joined=False), lengths, [net.states(first, x)], cell)
        return net.arranged(*made)

    return run


@operator("LSTM")
def lstm(node: Node) -> Lowered:
    """Gates in the order input, output, forget, cell; `P` are peepholes of input, output, forget."""
    net = _Network(node, 4, ["sigmoid", "tanh", "tanh"])
    coupled = bool(node.integer("input_forget", 0))
    h = net.hidden

    def run(
        x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        first: Tensor | None = None, first_cell: Tensor | None = None, peep: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def cell(d: int, product: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
            gate, squash, show = net.activations[d]
            state, memory = states
            i, o, f, c = (product + functional.linear(state, r[d])).chunk(4, -1)
            if peep is not None:
                i, f = i + peep[d][:h] * memory, f + peep[d][2 * h :] * memory
            i = gate(net.bounded(i))
            f = 1 - i if coupled else gate(net.bounded(f))
            memory = f * memory + i * squash(net.bounded(c))
            if peep is not None:
                o = o + peep[d][h : 2 * h] * memory
            return [gate(net.bounded(o)) * show(memory), memory]

        states = [net.states(first, x), net.states(first_cell, x)]
        made = net.run(x, w, net.biases(b, joined=True), lengths, states, cell)
        return net.arranged(*made)

    return run
