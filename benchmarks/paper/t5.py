"""T5 (Raffel et al. 2020) as a graph of unfused operators: encoder and decoder, no weights, no files."""

from typing import Final

from benchmarks.eop.networks import TOKENS, GraphMaker
from stageloom.shared.graph import Graph

WIDTH: Final = 512
HEADS: Final = 8
INNER: Final = 2048
_SIZE: Final = WIDTH // HEADS


def t5(layers: int = 6) -> Graph:
    """T5-small by its published sizes: so many layers in each stack, 128 tokens on either side.

    Embeddings are look-ups and left out. Each stack works out its position bias once, from distances.
    """
    of = GraphMaker("T5")
    asked, said = of.input(1, TOKENS, WIDTH), of.input(1, TOKENS, WIDTH)
    bias = _position_bias(of)
    for _ in range(layers):
        asked = _feed_forward(of, _attention(of, asked, asked, bias))
    known = _normalised(of, asked)
    bias = of.pointwise("add", _position_bias(of), of.input(1, HEADS, TOKENS, TOKENS))  # later words masked
    for _ in range(layers):
        said = _attention(of, said, said, bias)
        said = _feed_forward(of, _attention(of, said, known, None))
    return of.graph(_normalised(of, said))


def _position_bias(of: GraphMaker) -> int:
    """Distances of words, put into buckets by their size and its logarithm, and a bias looked up."""
    rows, columns = (of.reshaped("reshape", of.input(1, TOKENS), 1, TOKENS, 1) for _ in range(2))
    distance = of.several("subtract", [columns, rows], [(1, TOKENS, TOKENS)], TOKENS * TOKENS)[0]
    far = of.pointwise("absolute", distance)
    near = of.pointwise("less", far)
    bucket = of.chain(far, "divide", "log", "multiply", "cast", "minimum")
    side = of.pointwise("multiply", of.pointwise("greater", distance))
    found = of.pointwise("add", of.pointwise("where", near, far, bucket), side)
    looked_up = of.several("gather", [found], [(1, TOKENS, TOKENS, HEADS)])[0]
    return of.reshaped("transpose", looked_up, 1, HEADS, TOKENS, TOKENS)


def _attention(of: GraphMaker, value: int, read: int, bias: int | None) -> int:
    """Heads over the words of `read`, without scaling; added to what comes in."""
    own = _normalised(of, value)
    source = own if read == value else read
    query, key, values = (_heads(of, of.dense(one, WIDTH)) for one in (own, source, source))
    turned = of.reshaped("transpose", key, 1, HEADS, _SIZE, TOKENS)
    flop = 2 * HEADS * TOKENS * TOKENS * _SIZE
    scores = of.several("batch_matmul", [query, turned], [(1, HEADS, TOKENS, TOKENS)], flop)[0]
    if bias is not None:
        scores = of.pointwise("add", scores, bias)
    weights = of.pointwise("softmax", scores, flop=12)
    mixed = of.several("batch_matmul", [weights, values], [(1, HEADS, TOKENS, _SIZE)], flop)[0]
    rows = of.reshaped("reshape", of.reshaped("transpose", mixed, 1, TOKENS, HEADS, _SIZE), 1, TOKENS, WIDTH)
    return of.pointwise("add", of.dense(rows, WIDTH), value)


def _heads(of: GraphMaker, value: int) -> int:
    rows = of.reshaped("reshape", value, 1, TOKENS, HEADS, _SIZE)
    return of.reshaped("transpose", rows, 1, HEADS, TOKENS, _SIZE)


def _feed_forward(of: GraphMaker, value: int) -> int:
    inner = of.pointwise("relu", of.dense(_normalised(of, value), INNER))
    return of.pointwise("add", of.dense(inner, WIDTH), value)


def _normalised(of: GraphMaker, value: int) -> int:
    """By the root of the mean square; there is no mean to subtract."""
    square = of.pointwise("power", value)
    mean = of.several("mean", [square], [(1, TOKENS, 1)], TOKENS * WIDTH)[0]
    scaled = of.pointwise("multiply", value, of.chain(mean, "add", "rsqrt"))
    return of.pointwise("multiply", scaled, weights=WIDTH)
