"""Attention as one operator, rotary position embeddings, and recurrent (linear) attention."""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from stageloom.edge_agent.lowering.dtypes import Unsupported
from stageloom.edge_agent.lowering.families.indexing import inside
from stageloom.edge_agent.lowering.node import Lowered, Node, operator


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] -> [batch, heads, length, size]"""
    batch, length, hidden = x.shape
    return x.reshape(batch, length, heads, hidden // heads).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """[batch, heads, length, size] -> [batch, length, heads * size]"""
    batch, heads, length, size = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * size)


class _Attention:
    """Softmax(Q K^T scale + bias) V with what ONNX adds around it, as in opsets 23 to 25."""

    def __init__(self, node: Node) -> None:
        self.flat = node.rank(0) == 3
        self.q_heads = node.integer("q_num_heads", 0)
        self.kv_heads = node.integer("kv_num_heads", 0)
        self.causal = bool(node.integer("is_causal", 0))
        self.softcap = node.number("softcap", 0.0)
        self.mode = node.integer("qk_matmul_output_mode", 0)
        self.scale = node.attribute("scale")
        self.left, self.right = node.integer("left_window_size", -1), node.integer("right_window_size", -1)
        precision = node.attribute("softmax_precision")
        self.softmax_dtype = None if precision is None else node.real(int(precision))
        self.outputs = tuple(node.wants(i) for i in range(4))
        plain = not (node.has(3) or node.has(4) or node.has(6) or self.softcap or self.outputs[3])
        # On a CPU nothing is gained, and in float16 the last bit differs from the operator's text.
        plain &= node.device.type == "cuda"
        self.fused = plain and self.softmax_dtype is None and self.left < 0 and self.right < 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        past_k: Tensor | None = None,
        past_v: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        if self.flat:
            q = _split_heads(q, self.q_heads)
            k, v = _split_heads(k, self.kv_heads), _split_heads(v, self.kv_heads)
        offset = 0 if past_k is None else past_k.shape[2]
        k = k if past_k is None else torch.cat((past_k, k), 2)
        v = v if past_v is None else torch.cat((past_v, v), 2)
        present = (k, v)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores: Tensor | None = None
        if self.fused:
            made = functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=None if self.scale is None else float(self.scale)
            )
        else:
            bias = self._bias(q, k, mask, offset, valid)
            made, scores = self._scored(q, k, v, bias)
        made = _join_heads(made) if self.flat else made
        return tuple(
            value if wanted else None
            for value, wanted in zip((made, *present, scores), self.outputs, strict=True)
        )

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, and the scores at the point that `mode` asks for."""
        root = math.sqrt(1.0 / math.sqrt(q.shape[-1]) if self.scale is None else float(self.scale))
        own = q.dtype
        if own == torch.float16:  # fused kernels hold scores in float32 as well
            q, k, v, bias = q.float(), k.float(), v.float(), None if bias is None else bias.float()
        scores = torch.matmul(q * root, k.transpose(2, 3) * root)
        shown = [scores]
        if self.softcap > 0:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        shown.append(scores)
        if bias is not None:
            scores = scores + bias
        shown.append(scores)
        weights = torch.softmax(scores.to(self.softmax_dtype or scores.dtype), -1)
        if bias is not None:  # a row that attends to nothing is zero, not NaN
            empty = bias.amax(-1, keepdim=True) == -torch.inf
            weights = torch.where(empty, torch.zeros_like(weights), weights)
        weights = weights.to(q.dtype)
        shown.append(weights)
        return torch.matmul(weights, v).to(own), shown[self.mode].to(own)

    def _bias(
        self, q: Tensor, k: Tensor, mask: Tensor | None, offset: int, valid: Tensor | None
    ) -> Tensor | None:
        """What is added to the scores: the mask, causality, the window, and the end of a padded cache."""
        rows, columns = q.shape[2], k.shape[2]
        bias = None
        if mask is not None:
            short = columns - mask.shape[-1]
            if mask.dtype == torch.bool:
                bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            else:
                bias = mask.to(q.dtype)
            bias = functional.pad(bias, (0, short), value=-torch.inf) if short > 0 else bias
        column = torch.arange(columns, device=q.device)
        row = torch.arange(rows, device=q.device)[:, None] + offset
        if valid is not None:  # per sample: [batch, 1, rows, 1]
            row = row + (valid.to(torch.int64).reshape(-1, 1, 1, 1) - rows)
        blocked = None
        if self.causal:
            blocked = column > row
        if self.left >= 0:
            blocked = _either(blocked, row - column > self.left)
        if self.right >= 0:
            blocked = _either(blocked, column - row > self.right)
        if valid is not None:
            blocked = _either(blocked, column >= valid.to(torch.int64).reshape(-1, 1, 1, 1))
        if blocked is None:
            return bias
        hidden = torch.zeros(blocked.shape, dtype=q.dtype, device=q.device).masked_fill(blocked, -torch.inf)
        return hidden if bias is None else bias + hidden


def _either(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask | other


@operator("Attention")
def attention(node: Node) -> Lowered:
    return _Attention(node)


@operator("RotaryEmbedding")
def rotary_embedding(node: Node) -> Lowered:
    """Rotates pairs of features; pairs are neighbours if `interleaved`, else half the width apart."""
    interleaved, heads = bool(node.integer("interleaved", 0)), node.integer("num_heads", 0)
    width, flat = node.integer("rotary_embedding_dim", 0), node.rank(0) == 3

    def run(x: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor | None = None) -> Tensor:
        shape = x.shape
        x = x.reshape(*shape[:2], heads, -1) if flat else x.transpose(1, 2)
        size = width or x.shape[3]
        rotated, kept = x[..., :size], x[..., size:]
        if positions is not None:
            places = inside(positions.to(torch.int64), cosine.shape[0])
            cosine, sine = functional.embedding(places, cosine), functional.embedding(places, sine)
        cosine, sine = cosine.unsqueeze(2), sine.unsqueeze(2)
        if interleaved:
            one, two = rotated[..., 0::2], rotated[..., 1::2]
        else:
            one, two = rotated.chunk(2, -1)
        real, imaginary = cosine * one - sine * two, sine * one + cosine * two
        if interleaved:
            rotated = torch.stack((real, imaginary), -1).flatten(-2)
        else:
            rotated = torch.cat((real, imaginary), -1)
        made = torch.cat((rotated, kept), -1)
        return made.reshape(shape) if flat else made.transpose(1, 2)

    return run


@operator("LinearAttention")
def linear_attention(node: Node) -> Lowered:
    """A state S per head: S <- exp(decay) S + k (x) beta (v - S^T k), read as scale * q S. Parts by rule."""
    rule = node.text("update_rule", "gated_delta")
    q_heads, kv_heads = node.integer("q_num_heads", 0), node.integer("kv_num_heads", 0)
    gating, correcting = rule in ("gated", "gated_delta"), rule in ("delta", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise Unsupported(f"LinearAttention by the rule {rule}")
    scale = node.number("scale", 0.0) or 1.0 / math.sqrt(node.shape(0)[-1] // q_heads)
    repeats, steps = q_heads // kv_heads, node.shape(0)[1]
    key_size, value_size = node.shape(1)[-1] // kv_heads, node.shape(2)[-1] // kv_heads

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Tensor | None = None,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        dtype, state_dtype = q.dtype, q.dtype if past is None else past.dtype
        batch = q.shape[0]
        q4, k4, v4 = (_split_heads(x, h).float() for x, h in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
        state = (
            torch.zeros((batch, kv_heads, key_size, value_size), device=q.device)
            if past is None
            else past.float()
        )
        rows = []
        for t in range(steps):
            key, value = k4[:, :, t], v4[:, :, t]
            if gating:
                assert decay is not None
                gate = decay[:, t].reshape(batch, kv_heads, -1).float()
                state = state * torch.exp(gate).unsqueeze(-1)
            if correcting:
                assert beta is not None
                found = (state * key.unsqueeze(-1)).sum(2)
                value = beta[:, t].unsqueeze(-1).float() * (value - found)
            state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
            read = state.repeat_interleave(repeats, 1) if repeats > 1 else state
            rows.append(scale * (q4[:, :, t].unsqueeze(-1) * read).sum(2))
        return _join_heads(torch.stack(rows, 2)).to(dtype), state.to(state_dtype)

    return run


@operator("CausalConvWithState")
def causal_convolution(node: Node) -> Lowered:
    """A depthwise convolution over the past only; what it needs of it is passed on as state."""
    channels, reach = node.shape(0)[1], node.shape(1)[2] - 1
    activation = node.text("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise Unsupported(f"CausalConvWithState with {activation}")

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        before = torch.zeros_like(x[:, :, :1]).expand(-1, -1, reach) if past is None else past
        padded = torch.cat((before, x), 2)
        made = functional.conv1d(padded, weight, bias, groups=channels)
        made = made if activation == "none" else functional.silu(made)
        return made, padded[:, :, padded.shape[2] - reach :]

    return run
