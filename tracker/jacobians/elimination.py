"""Vector-Jacobian products of a block at single rows, in the order of multiplication that costs least.

A block restricted to rows is a graph of linear layers, z = W x + b, with maps between them that cost little: activations, norms,
gates, rotary positions, attention of a row (`row_attention`). Reverse mode multiplies cotangents with one factor after another.
Where a map S merges several linear layers of one input into fewer numbers, P (S W) costs less than (P S) W, as S W is cheap:

    attention     S: (d, 3 d), blocks for each head      2 d^3 operations for d cotangents, not 6 d^3
    gated MLP     S: (f, 2 f), two diagonals             2 f d^2, not 4 f d^2

A map whose derivative is diagonal costs a product with the diagonal, whatever the activation. A parallel block (GPT-NeoX) takes
10 d^3 operations instead of 14 d^3, a sequential one 12 d^3 instead of 16 d^3. This is vertex elimination on the graph of linear
layers (Griewank & Walther, Evaluating Derivatives, 2008, chapter 9).

The function runs once, and each linear layer and attention in it begins a new autograd graph. The derivatives of the maps between
them are found by probing these graphs: a diagonal is S^T 1, the blocks of attention are S^T e_i for the e coordinates of all
heads at once, a norm follows from four products. That a map has such a derivative is a guess, which a random product checks, for
each map and in the end for J (`Elimination.error`). A map of no known form takes one product for each cotangent, as in reverse
mode.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tracker.devices import raise_device_errors
from tracker.jacobians.restriction import RowAttention, running_rows
from tracker.jacobians.row_attention import Expansion, by_formula
from tracker.linalg.jacobian import GradientsStayOn, RowFunction, for_each
from tracker.linalg.linear import FreeBuffers, inner_products, linear_layer, rows_of_identity
from tracker.linalg.precision import relative_error
from tracker.linalg.transfer import read, standard_normal

# Largest relative error of a derivative that is taken as diagonal
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
MERGING = 3  # arrays of the size of merged layers, which they take while they are made
ARGUMENT = -1  # the source that is the function's own argument


@dataclass(eq=False)
class Layer:
    """A linear layer z = W x + b of one vector for each row."""

    target: Tensor  # x (R, *1, p), in the graph of the map before it
    weight: Float[Tensor, "o p"]
    z: Tensor  # (R, *1, o), the leaf of the maps that use it
    first: int  # the first layer with the same input


@dataclass(eq=False)
class Attention:
    """The attention of each row, expanded to first order."""

    target: Float[Tensor, "R H 1 f"]  # the output, in the graph of the maps to query, key and value
    parts: Sequence[Tensor]  # query, key and value in that graph
    expansion: Expansion
    z: Tensor  # the leaf of the maps that use it


@dataclass(eq=False)
class Diagonal:
    """A derivative (p, c p) that consists of c diagonal matrices, beside each other or interleaved."""

    entries: Float[Tensor, "R cp"]
    parts: int = 1
    interleaved: bool = False
    is_identity: bool = False

    def pull(self, P: Float[Tensor, "_ C p"]) -> Float[Tensor, "_ C cp"]:
        """Return P S."""
        if self.is_identity:
            return P
        if self.parts == 1:
            return P * self.entries[:, None]
        return (P.unsqueeze(self._axis) * self._by_part().unsqueeze(1)).flatten(2)

    def times(self, W: Float[Tensor, "cp m"]) -> Float[Tensor, "p R m"]:
        """Return S W."""
        by_part = self._by_part()
        entries, rows = (
            by_part.unbind(self._axis),
            W.unflatten(0, by_part.shape[1:]).unbind(int(self.interleaved)),
        )
        return _sum(
            [part.mT[..., None] * row[:, None] for part, row in zip(entries, rows, strict=True)]
        )

    def rows_times(self, W: Float[Tensor, "p m"], rows: slice) -> Float[Tensor, "_ C m"]:
        """Return some rows of S W."""
        return W[rows][None] if self.is_identity else self.entries[:, rows, None] * W[rows]

    @property
    def _axis(self) -> int:
        """The axis of the parts, in the last two."""
        return -1 if self.interleaved else -2

    def _by_part(self) -> Float[Tensor, "R _ _"]:
        return self.entries.unflatten(1, (-1, self.parts) if self.interleaved else (self.parts, -1))


@dataclass(eq=False)
class Normalization:
    """The derivative diag(a) + p 1^T + q h^T of a norm of h, or of any function of each coordinate, their sum and square sum."""

    a: Float[Tensor, "R d"]
    left: Float[Tensor, "R d 2"]  # p and q
    right: Float[Tensor, "R 2 d"]  # 1 and h

    def pull(self, P: Float[Tensor, "_ C d"]) -> Float[Tensor, "R C d"]:
        """Return P S."""
        return (P * self.a[:, None]).baddbmm_(P @ self.left, self.right)


def find_normalization(
    transposed: Callable[[Tensor], Tensor],
    forward: Callable[[Tensor], Tensor],
    h: Float[Tensor, "R d"],
) -> Normalization:
    """Return the form that a derivative S has if it is a norm's, from two products S^T u and two S v.

    With u = 1 on half of the coordinates and 0 on the others, S^T u is (p . u) + (q . u) h on the others, which gives both
    factors and so a on the half. S 1 and S h then give p and q.
    """
    h = h - h.mean(1, keepdim=True)
    # Orthogonal to 1, and as long; NaN if all are alike
    h = h / h.square().mean(1, keepdim=True).sqrt()
    a = torch.empty_like(h)
    for half, other in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        u = torch.zeros_like(h)
        u[:, half] = 1
        product = transposed(u)
        offset, slope = _line(h[:, other], product[:, other])
        a[:, half] = product[:, half] - offset - slope * h[:, half]
    basis = torch.stack([torch.ones_like(h), h], -1)  # (R, d, 2)
    products = torch.stack([forward(v) for v in basis.unbind(-1)], -1)
    return Normalization(a, (products - a[..., None] * basis) / h.shape[1], basis.mT)


def _line(
    h: Float[Tensor, "R n"], y: Float[Tensor, "R n"]
) -> tuple[Float[Tensor, "R 1"], Float[Tensor, "R 1"]]:
    """Return offset and slope of the line y(h), by least squares."""
    centre, mean = h.mean(1, keepdim=True), y.mean(1, keepdim=True)
    deviation = h - centre
    slope = (deviation * (y - mean)).sum(1, keepdim=True) / deviation.square().sum(1, keepdim=True)
    return mean - slope * centre, slope


@dataclass(eq=False)
class Merge:
    """The part S W of a map of linear layers with one input."""

    first: int  # the first of the layers
    compute: Callable[[], Float[Tensor, "p R m"]]
    _matrices: Tensor | None = None

    def pull(self, P: Float[Tensor, "_ C p"]) -> Float[Tensor, "R C m"]:
        """Return P S W."""
        if self._matrices is None:
            self._matrices = self.compute()
        if len(P) == 1:
            product = inner_products(P, self._matrices.flatten(1).mT[None])[0]
            return product.unflatten(1, self._matrices.shape[1:]).transpose(0, 1)
        # Kept in this order, so that only the first chunk of cotangents copies them.
        by_row = self._matrices.transpose(0, 1).contiguous()
        self._matrices = by_row.transpose(0, 1)
        return inner_products(P, by_row.mT)


@dataclass(eq=False)
class Map:
    """The derivative of a map from the outputs of earlier nodes, its sources, to its target, in parts."""

    target: Tensor
    diagonals: dict[int, Diagonal] = field(default_factory=dict)  # by source
    merges: list[Merge] = field(default_factory=list)
    normalization: Normalization | None = None
    normalized: list[int] = field(default_factory=list)  # sources whose sum it takes
    others: list[int] = field(default_factory=list)  # sources without a known form
    # By source, the product with `_probe(target)`
    probed: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Cotangents:
    """Cotangents of a source, (R or 1, C, m): a sum of dense ones and of rows of a diagonal matrix."""

    dense: Tensor | None = None
    diagonal: Diagonal | None = None

    def add(self, dense: Float[Tensor, "_ C m"]) -> None:
        """Add cotangents."""
        self.dense = dense if self.dense is None else self.dense + dense


class Elimination:
    """A function of rows, run once and differentiated by its linear layers.

    Attributes:
        y: its value (R, d).
        rounded: whether its own code rounds to a lower precision than that of x.
    """

    def __init__(
        self,
        run: Callable[[RowAttention], RowFunction],
        x: Float[Tensor, "R d"],
        known_heads: "dict[Any, Heads | None]",
        memory: int,
        buffers: FreeBuffers | None = None,
    ) -> None:
        """Run the function.

        Args:
            run: returns the function with an attention of rows, as `restriction.restrict` takes it.
            x: the rows.
            known_heads: how attentions of a size depend on a layer; filled in, and used again for other blocks.
            memory: bytes that merged layers may take.
            buffers: memory for copies of weights.

        Raises:
            NotSliceable: if the block's code raises on sequences of length one.
        """
        self._x = x.detach().clone().requires_grad_()
        self._known_heads, self._memory = known_heads, memory
        self._merged = 0  # bytes of the merged layers
        self._nodes: list[Layer | Attention] = []
        f = run(partial(by_formula, evaluate=self._attention))
        with (
            running_rows(buffers) as roundings,
            torch.enable_grad(),
            GradientsStayOn(),
            _Cut(self._nodes, len(x)),
        ):
            self._y = f(self._x.clone())  # a block may work in place, which a leaf does not allow
        self.y, self.rounded = self._y.detach(), roundings.seen
        self._maps: list[Map] | None = None

    def _attention(self, expansion: Expansion, *parts: Tensor) -> Tensor:
        """Return the attention's output at the beginning of a new graph."""
        output = expansion(*parts)
        if not output.requires_grad:
            return output
        z = output.detach().requires_grad_()
        self._nodes.append(Attention(output, parts, expansion, z))
        return z.clone()

    def _leaf(self, source: int) -> Tensor:
        return self._x if source == ARGUMENT else self._nodes[source].z

    def pullback(self, u: Float[Tensor, "C R d"]) -> Float[Tensor, "C R d"]:
        """Return J^T u; of the rows of an identity (`linear.identity_matrix`) by the fewest operations."""
        if self._maps is None:
            self._maps = self._differentiate()
        *maps, last = self._maps
        rows = rows_of_identity(u)
        sums: dict[int, Cotangents] = {}
        inputs: dict[int, Cotangents] = {}  # of the input of layers, by the first of them
        u = u.transpose(0, 1)
        if rows is None:
            self._through(last, u, sums, inputs)
        else:
            sums = {
                source: Cotangents(diagonal=diagonal) for source, diagonal in last.diagonals.items()
            }
            self._by_products(last, u, sums)
        for i in reversed(range(len(self._nodes))):
            node, of_output = self._nodes[i], sums.pop(i, None)
            if isinstance(node, Attention):
                if of_output is not None:
                    self._through(maps[i], self._formed(of_output, i, rows), sums, inputs)
                continue
            if of_output is not None:
                inputs.setdefault(node.first, Cotangents()).add(
                    _times(of_output, node.weight, rows)
                )
            if (of_input := inputs.pop(i, None)) is not None:
                assert of_input.dense is not None
                self._through(maps[i], of_input.dense, sums, inputs)
        if ARGUMENT not in sums:
            return torch.zeros_like(u).transpose(0, 1)
        return self._formed(sums[ARGUMENT], ARGUMENT, rows).transpose(0, 1)

    def _through(
        self,
        map: Map,
        P: Float[Tensor, "_ C p"],
        sums: dict[int, Cotangents],
        inputs: dict[int, Cotangents],
    ) -> None:
        """Pull cotangents of a map's target back to its sources, or to the input of merged layers."""
        for source, diagonal in map.diagonals.items():
            sums.setdefault(source, Cotangents()).add(diagonal.pull(P))
        for merge in map.merges:
            inputs.setdefault(merge.first, Cotangents()).add(merge.pull(P))
        if map.normalization:
            product = map.normalization.pull(P)
            for source in map.normalized:
                sums.setdefault(source, Cotangents()).add(product)
        self._by_products(map, P, sums)

    def _by_products(
        self, map: Map, P: Float[Tensor, "_ C p"], sums: dict[int, Cotangents]
    ) -> None:
        """Pull cotangents back to the sources without a known form."""
        if not map.others:
            return
        leaves = [self._leaf(source) for source in map.others]
        gradients = _gradients(map.target, leaves, P.expand(len(self._x), -1, -1))
        for source, gradient in zip(map.others, gradients, strict=True):
            sums.setdefault(source, Cotangents()).add(gradient)

    def _formed(
        self, cotangents: Cotangents, source: int, rows: slice | None
    ) -> Float[Tensor, "R C m"]:
        """Return cotangents with the rows of the diagonal in them."""
        dense, diagonal = cotangents.dense, cotangents.diagonal
        if diagonal is None:
            assert dense is not None
            return dense.expand(len(self._x), -1, -1)
        assert rows is not None
        C, m = rows.stop - rows.start, self._leaf(source)[0].numel()
        formed = self._x.new_zeros(len(self._x), C, m)
        formed[:, :, rows].diagonal(dim1=-2, dim2=-1).copy_(diagonal.entries[:, rows])
        return formed if dense is None else formed.add_(dense)

    def error(self, J: Float[Tensor, "R d d"], identity: bool) -> Tensor:
        """Return the relative error of J^T u against reverse mode, for a random u.

        Args:
            J: the Jacobian.
            identity: whether the identity has been subtracted from it.
        """
        u = standard_normal(self.y.shape, self.y)
        expected = self._reverse(u) - identity * u
        return relative_error((u[:, None] @ J)[:, 0], expected, u, u.dtype)

    def _reverse(self, u: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        """Return J^T u by reverse mode."""
        sums: dict[int, Tensor] = {}
        for i in reversed(range(len(self._nodes) + 1)):
            if i < len(self._nodes) and i not in sums:
                continue
            target, of_target = self._target(i), u if i == len(self._nodes) else sums.pop(i)
            if i < len(self._nodes) and isinstance(node := self._nodes[i], Layer):
                of_target = of_target.flatten(1) @ node.weight
            for source, gradient in self._gradients_of(
                target, of_target.view(target.shape), i
            ).items():
                sums[source] = sums[source] + gradient if source in sums else gradient
        return sums.get(ARGUMENT, torch.zeros_like(u))

    def _target(self, i: int) -> Tensor:
        return self._y if i == len(self._nodes) else self._nodes[i].target

    def _gradients_of(self, target: Tensor, u: Tensor, before: int) -> dict[int, Tensor]:
        """Return the gradients with respect to the sources before a node that a target depends on."""
        if not target.requires_grad:
            return {}
        sources = range(ARGUMENT, before)
        leaves = [self._leaf(source) for source in sources]
        gradients = torch.autograd.grad(target, leaves, u, retain_graph=True, allow_unused=True)
        return {
            source: gradient
            for source, gradient in zip(sources, gradients, strict=True)
            if gradient is not None
        }

    def _differentiate(self) -> list[Map]:
        """Return the maps to the input of each node, and to the value."""
        maps, guesses = [], []
        for i in range(len(self._nodes) + 1):
            target, node = self._target(i), None if i == len(self._nodes) else self._nodes[i]
            map = Map(target)
            maps.append(map)
            if isinstance(node, Layer) and node.first < i:  # the map of the first is used
                continue
            if isinstance(node, Attention) and (merges := self._merges_of_heads(node, i)):
                map.merges = merges
                continue
            u = _probe(target)
            map.probed = {
                source: gradient.flatten(1)
                for source, gradient in self._gradients_of(target, u, i).items()
            }
            of_ones = self._gradients_of(target, torch.ones_like(target), i)
            map.others = list(of_ones)
            for source, entries in of_ones.items():
                product = map.probed[source]
                for diagonal in _guesses(u.flatten(1), entries.flatten(1), is_value=node is None):
                    error = _largest_error(diagonal.pull(u.flatten(1)[:, None])[:, 0], product)
                    is_identity = (diagonal.entries == 1).all() & (diagonal.parts == 1)
                    guesses.append((map, source, diagonal, error, is_identity.to(error)))
        outcomes = read([torch.stack(guess[3:]) for guess in guesses])
        for (map, source, diagonal, *_), (error, is_identity) in zip(
            guesses, outcomes, strict=True
        ):
            if error <= EXACT[self._x.dtype] and source in map.others:
                map.others.remove(source)
                diagonal.is_identity = bool(is_identity)
                map.diagonals[source] = diagonal
        for map in maps[:-1]:
            self._merge_diagonals(map)
        self._find_normalizations(maps[:-1])
        return maps

    def _find_normalizations(self, maps: Sequence[Map]) -> None:
        """Give maps whose other sources are added up and normalized that form."""
        guesses = []
        for map in maps:
            values = [self._leaf(source).detach().flatten(1) for source in map.others]
            if (
                not values
                or len({value.shape for value in values}) > 1
                or values[0].shape[1] != map.target[0].numel()
            ):
                continue
            target = map.target
            try:
                normalization = _guessed_normalization(
                    target, self._leaf(map.others[0]), _sum(values)
                )
            except RuntimeError as error:  # a custom function that is differentiable once
                raise_device_errors(error)
                continue
            expected = normalization.pull(_probe(target).flatten(1)[:, None])[:, 0]
            errors = [_largest_error(map.probed[source], expected) for source in map.others]
            guesses.append((map, normalization, torch.stack(errors).amax()))
        for (map, normalization, _), error in zip(
            guesses, read([guess[2] for guess in guesses]), strict=True
        ):
            if error <= EXACT[self._x.dtype]:
                map.normalization, map.normalized, map.others = normalization, map.others, []

    def _merge_diagonals(self, map: Map) -> None:
        """Merge linear layers of one input whose outputs have more coordinates than the target."""
        by_input: dict[int, list[tuple[int, Tensor]]] = {}
        for source in map.diagonals:
            if source != ARGUMENT and isinstance(node := self._nodes[source], Layer):
                by_input.setdefault(node.first, []).append((source, node.weight))
        for first, layers in by_input.items():
            several = sum(map.diagonals[source].parts for source, _ in layers) > 1
            if several and self._may_merge(map.target, layers[0][1]):
                parts = [(map.diagonals.pop(source), W) for source, W in layers]
                map.merges.append(Merge(first, partial(_merged_diagonals, parts)))

    def _may_merge(self, target: Tensor, weight: Tensor) -> bool:
        """Whether there is memory for merged layers, which are kept, and for what makes them."""
        size = target.numel() * weight.shape[-1] * self._x.itemsize
        if self._merged + MERGING * size > self._memory:
            return False
        self._merged += size
        return True

    def _merges_of_heads(self, node: Attention, i: int) -> list[Merge]:
        """Return the merges of the layers of query, key and value; none if they are not of layers, head by head."""
        query, expansion = node.parts[0].detach(), node.expansion
        H = query.shape[1]
        by_input: dict[int, list[tuple[Tensor | None, Tensor | None, Tensor]]] = {}
        for name, part in zip(("query", "key", "value"), node.parts, strict=True):
            if not part.requires_grad:  # the queries of rows with other sources
                continue
            u = _probe(part)
            of_random = self._gradients_of(part, u, i)
            source = next(iter(of_random), ARGUMENT)
            if (
                len(of_random) != 1
                or source == ARGUMENT
                or not isinstance(layer := self._nodes[source], Layer)
            ):
                return []
            heads = self._heads(name, part, u, source, of_random[source])
            if heads is None:
                return []
            B = heads.blocks(part, layer.z)  # (R or 1, G, e, m)
            if name == "query":
                left, S = None, expansion.by_query.mT @ B
            elif name == "key":
                left, S = (
                    expansion.by_score.mT,
                    query @ B.repeat_interleave(H // part.shape[1], dim=1),
                )
            else:
                left, S = (
                    expansion.by_value,
                    None if heads.selects else B.repeat_interleave(H // part.shape[1], dim=1),
                )
            by_input.setdefault(layer.first, []).append((left, S, layer.weight[heads.entries]))
        if not all(self._may_merge(node.target, parts[0][2]) for parts in by_input.values()):
            return []
        return [Merge(first, partial(_merged_heads, parts)) for first, parts in by_input.items()]

    def _heads(
        self, name: str, part: Tensor, u: Tensor, source: int, of_u: Tensor
    ) -> "Heads | None":
        """Return which coordinates of a source belong to which head; None if heads share some, or have different numbers.

        What was found in another block is used again: `error` would show that it does not hold.
        """
        z = self._leaf(source)
        key = name, part.shape[1:], z.shape[1:]
        if key not in self._known_heads:
            G = part.shape[1]
            alone = u * torch.eye(G, dtype=u.dtype, device=u.device).view(G, 1, G, 1, 1)
            (gradient,) = _gradients(part, [z], alone.flatten(2).transpose(0, 1))  # (R, G, m)
            depends = gradient.ne(0).any(0).cpu()
            sizes = depends.sum(1)
            separate = bool(
                (depends.sum(0) <= 1).all() and (sizes == sizes[0]).all() and sizes[0] > 0
            )
            entries = depends.nonzero()[:, 1].view(G, -1).to(z.device) if separate else None
            self._known_heads[key] = (
                entries if entries is None else Heads(entries, _selects(entries, u, of_u))
            )
        return self._known_heads[key]


@dataclass(frozen=True)
class Heads:
    """How query, key or value depend on the output of a linear layer."""

    entries: Int[Tensor, "G m"]  # the coordinates that belong to each head
    selects: bool  # whether a head is these coordinates themselves

    def blocks(self, part: Float[Tensor, "R G 1 e"], z: Tensor) -> Float[Tensor, "_ G e m"]:
        """Return the derivative of each head with respect to its coordinates."""
        _, G, _, e = part.shape
        eye = torch.eye(e, dtype=part.dtype, device=part.device)
        if self.selects:
            return eye.expand(1, G, -1, -1)
        # (R, e, *)
        (gradient,) = _gradients(
            part, [z], eye[None, :, None].expand(len(part), -1, G, -1).flatten(2)
        )
        return (
            gradient.index_select(2, self.entries.flatten())
            .unflatten(2, self.entries.shape)
            .transpose(1, 2)
        )


def _selects(entries: Int[Tensor, "G m"], u: Float[Tensor, "R G 1 e"], of_u: Tensor) -> bool:
    return entries.shape[1] == u.shape[-1] and torch.equal(of_u.flatten(1)[:, entries], u[:, :, 0])


class _Cut(TorchFunctionMode):
    """While active, the output of a linear layer of one vector for each row begins a new graph."""

    def __init__(self, nodes: list[Layer | Attention], R: int) -> None:
        super().__init__()
        self.nodes, self.R = nodes, R

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        layer = linear_layer(function, arguments, keywords)
        if layer is not None:
            x, weight, bias = layer
            if x.requires_grad and len(x) == self.R and x.numel() == self.R * x.shape[-1]:
                z = torch.nn.functional.linear(x.detach(), weight, bias).requires_grad_()
                alike = (
                    i
                    for i, node in enumerate(self.nodes)
                    if isinstance(node, Layer) and node.target is x
                )
                self.nodes.append(Layer(x, weight, z, next(alike, len(self.nodes))))
                return z.clone()  # a block may work in place, which a leaf does not allow
        return function(*arguments, **keywords)


def _guessed_normalization(target: Tensor, leaf: Tensor, h: Float[Tensor, "R d"]) -> Normalization:
    """Return `find_normalization` of the map from a leaf to a target, S v as the derivative of S^T u with respect to u."""
    zero = torch.zeros_like(target).requires_grad_()
    with torch.enable_grad():
        (back,) = torch.autograd.grad(target, leaf, zero, create_graph=True)

    def transposed(u: Tensor) -> Tensor:
        return torch.autograd.grad(target, leaf, u.view(target.shape), retain_graph=True)[
            0
        ].flatten(1)

    def forward(v: Tensor) -> Tensor:
        return torch.autograd.grad(back, zero, v.view(back.shape), retain_graph=True)[0].flatten(1)

    return find_normalization(transposed, forward, h)


def _guesses(
    u: Float[Tensor, "R p"], entries: Float[Tensor, "R m"], is_value: bool
) -> Iterator[Diagonal]:
    """Yield the forms that a derivative may have, by the sizes of target and source."""
    p, m = u.shape[1], entries.shape[1]
    if m == p:
        yield Diagonal(entries)
    elif m == 2 * p and not is_value:
        yield from (Diagonal(entries, 2, interleaved) for interleaved in (False, True))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


def _probe(like: Float[Tensor, "R ..."]) -> Tensor:
    """Return random cotangents, the same for every row."""
    return standard_normal(like.shape[1:], like).expand_as(like)


def _largest_error(value: Float[Tensor, "R m"], expected: Float[Tensor, "R m"]) -> Tensor:
    return ((value - expected).norm(dim=1) / expected.norm(dim=1)).amax()


def _times(
    cotangents: Cotangents, W: Float[Tensor, "o p"], rows: slice | None
) -> Float[Tensor, "_ C p"]:
    """Return the product of the cotangents of a layer's output with its weight."""
    product = None
    if cotangents.diagonal is not None:
        assert rows is not None
        product = cotangents.diagonal.rows_times(W, rows)
    if cotangents.dense is not None:
        X = cotangents.dense
        of_dense = inner_products(X.flatten(0, 1)[None], W.mT[None])[0].unflatten(0, X.shape[:2])
        product = of_dense if product is None else of_dense + product
    assert product is not None
    return product


def _gradients(
    target: Tensor, leaves: Sequence[Tensor], P: Float[Tensor, "R C p"]
) -> list[Float[Tensor, "R C m"]]:
    """Return the products of cotangents with the derivative of a target with respect to leaves."""

    def products(u: Float[Tensor, "R p"]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(target, leaves, u.reshape(target.shape), retain_graph=True)

    return [gradient.flatten(2) for gradient in for_each(products, P, 1)]


def _merged_diagonals(parts: Sequence[tuple[Diagonal, Tensor]]) -> Float[Tensor, "p R m"]:
    return _sum([diagonal.times(W) for diagonal, W in parts])


def _merged_heads(
    parts: Sequence[tuple[Tensor | None, Tensor | None, Tensor]],
) -> Float[Tensor, "p R m"]:
    """Return the sum of left * (S W) over parts, as products of heads.

    Args:
        parts: of each, left (R, H, f or 1, 1) or None for 1, S (R, H, f or 1, m) or None for the identity, and the rows of W
            for the G heads of keys (G, m, d).
    """
    merged = None
    for left, S, W in parts:
        G = len(W)
        if S is None:
            product = W[:, None, :, None]
        else:
            S = _by_group(S, G)
            product = (S.reshape(G, -1, S.shape[-1]) @ W).view(*S.shape[:-1], -1)
        if left is not None and merged is not None:
            left = _by_group(left, G)
            merged.view(torch.broadcast_shapes(left.shape, product.shape)).addcmul_(left, product)
            continue
        term = (product if left is None else _by_group(left, G) * product).flatten(0, 2)
        merged = term if merged is None else merged + term
    assert merged is not None
    return merged


def _by_group(X: Float[Tensor, "R H f m"], G: int) -> Float[Tensor, "G _ f R m"]:
    return X.unflatten(1, (G, -1)).permute(1, 2, 3, 0, 4)
