"""What is coupled beyond what each block has by itself: python examples/unrelated_blocks.py [--prompts 8] [--out DIR]

Compares the mis-couplings of SmolLM2-135M and Gemma 3 270M, blocks alone, with two null levels: that of independent U' and V',
and that of blocks turned as a whole, J' -> Q J' Q^T, which keeps each block's trace and u_k . v_k. The same is done for
J0 = J - (tr J / d) I in the bases of its own singular vectors. All blocks are then turned at random, to see how far chance moves
the means over pairs. Writes tables to DIR/tables.md, and two figures. What to install: examples/smollm2.py. What came out:
docs/studies/smollm2.md.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose, pi, sqrt
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from smollm2 import DISTANCES, MODELS, PROMPTS, TOKENS, load
from torch import Tensor

import tracker
from checkpoints import nano
from tracker.figures.drawing import BLUE, DIVERGING, GREY, ORANGE
from tracker.measures import coupling
from tracker.measures.coupling import DEFINITIONS, Moments, Overlap

KS = (10, 50)
SHOWN = {
    "miscoupling": "m_K",
    "offdiag_normalized": "eq. 14",
    "offdiag": "eq. 13",
    "miscoupling_release": "release",
}
DRAWN = ("miscoupling", "offdiag_normalized")
TITLES = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
LARGEST = 0.15  # of the colour scale
# Of SmolLM2, for the simulation
PAIRS = ((0, 1), (4, 5), (14, 15), (13, 17), (15, 23), (24, 8), (29, 13))
PAIRS_OF_NANO = ((0, 1), (3, 2), (1, 5))


@dataclass(frozen=True)
class Blocks:
    """Jacobians J (prompt, layer, d, d) with their top K singular triplets."""

    J: Tensor
    U: Tensor
    s: Tensor
    V: Tensor

    def first(self, K: int) -> "Blocks":
        return Blocks(self.J, self.U[..., :K], self.s[..., :K], self.V[..., :K])

    def parts(self) -> tuple[Moments, Overlap]:
        """Return what the null levels need."""
        basis = coupling.overlap(self.U.double(), self.V.double(), [self.s.shape[-1]])
        moments = coupling.moments(self.J.double(), self.s[..., 0].double())
        return moments, Overlap(basis.diagonal, basis.squares[..., 0], basis.fourths[..., 0])


def decompose(J: Tensor, K: int) -> Blocks:
    U, s, Vh = torch.linalg.svd(J)
    return Blocks(J, U[..., :K], s[..., :K], Vh.mT[..., :K])


def without_isotropic(J: Tensor) -> Tensor:
    """Return J0 = J - (tr J / d) I."""
    return J - J.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(
        J.shape[-1], dtype=J.dtype
    )


def observed(of: Blocks) -> dict[str, Tensor]:
    """Return the mis-couplings (prompt, layer, other)."""
    A = torch.stack([of.U.mT @ (of.J[:, l, None] @ of.V) for l in range(of.J.shape[1])], 1)
    return {definition.name: definition.formula(A, of.s[:, :, None]) for definition in DEFINITIONS}


def turned_levels(of: Blocks) -> dict[str, Tensor]:
    """Return the null levels of blocks turned as a whole."""
    moments, basis, d = *of.parts(), of.J.shape[-1]
    return {name: coupling.null_level(name, of.s.double(), moments, basis, d) for name in SHOWN}


def independent_levels(of: Blocks) -> dict[str, Tensor]:
    """Return the null levels of independent random U' and V'."""
    K, d, L = of.s.shape[-1], of.J.shape[-1], of.J.shape[1]
    moments, _ = of.parts()
    size = moments.frobenius(d) / d
    norm = torch.linalg.vector_norm(of.s, dim=-1).double()
    page = 1 + (K * size / norm) ** 2
    levels = {
        "miscoupling": page.sqrt(),
        "miscoupling_release": (page - 2 * sqrt(2 / pi) * size * of.s.sum(-1) / norm**2).sqrt(),
        "offdiag": sqrt(K * (K - 1)) * size,
        "offdiag_normalized": torch.full_like(size, sqrt((K - 1) / K)),
    }
    return {name: level[..., None].expand(-1, -1, L) for name, level in levels.items()}


def by_distance(values: Tensor, distances: Sequence[int] = DISTANCES) -> np.ndarray:
    """Return means of (..., layer, other) over the pairs that many blocks apart."""
    layers = torch.arange(values.shape[-1])
    apart = (layers[:, None] - layers).abs()
    return np.array([float(values[..., apart == n].mean()) for n in distances])


def turned_at_random(of: Blocks, draws: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the means by distance (draw, distance) when every block is turned by a random rotation, the same for all prompts."""
    generator, (L, d, K) = torch.Generator().manual_seed(seed), of.U.shape[1:]
    found = {name: [] for name in DRAWN}
    for _ in range(draws):
        frames, triangles = torch.linalg.qr(torch.randn(L, d, d, generator=generator))
        Q = frames * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        # (P, d, L, 2K), in common coordinates
        turned = (Q @ torch.cat([of.U, of.V], -1)).transpose(1, 2)
        values = {name: torch.full((len(of.J), L, L), torch.nan) for name in DRAWN}
        for l in range(L):
            others = [m for m in range(L) if abs(l - m) in DISTANCES]
            # In those of block l
            own = (Q[l].mT @ turned[:, :, others].flatten(2)).unflatten(-1, (len(others), 2, K))
            JV = (of.J[:, l] @ own[..., 1, :].flatten(2)).unflatten(-1, (len(others), K))
            A = torch.einsum("pdmi,pdmj->pmij", own[..., 0, :], JV)
            for definition in DEFINITIONS:
                if definition.name in DRAWN:
                    values[definition.name][:, l, others] = definition.formula(A, of.s[:, l, None])
        for name in DRAWN:
            found[name].append(by_distance(values[name]))
    return {name: np.array(values) for name, values in found.items()}


def spread_of_means(spread: Tensor) -> np.ndarray:
    """Return a bound of the standard deviation of the means by distance, from the spread of each pair.

    Prompts and both orders of a pair share its rotation, so their mean varies at most as much as their mean spread. Different
    pairs are pairwise independent.
    """
    of_pair = (spread + spread.mT).mean(0) / 2
    bounds = []
    for n in DISTANCES:
        of_distance = of_pair.diagonal(n)
        bounds.append(float((of_distance**2).sum().sqrt() / len(of_distance)))
    return np.array(bounds)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def triples(*values: np.ndarray) -> list[str]:
    return [" / ".join(f"{value:.3f}" for value in cell) for cell in zip(*values, strict=True)]


def compared(title: str, of: Blocks, draws: int) -> Iterator[str]:
    """Yield the tables of one set of Jacobians."""
    for K in KS:
        blocks = of.first(K)
        values, new, old = observed(blocks), turned_levels(blocks), independent_levels(blocks)
        drawn = turned_at_random(blocks, draws) if K == KS[0] and draws else {}
        moments, basis = blocks.parts()
        spread = coupling.spread(blocks.s.double(), moments, basis, of.J.shape[-1])
        yield f"\n{title}, K = {K}: observed / null level, independent / null level, turned as a whole\n\n"
        means = {name: [by_distance(each[name]) for each in (values, old, new)] for name in SHOWN}
        yield table(
            ["distance", *map(str, DISTANCES)],
            [[SHOWN[name], *triples(*three)] for name, three in means.items()],
        )
        if not isclose(float(moments.isotropic.abs().max()), 0, abs_tol=1e-4):
            yield f"\n{title}, K = {K}: share of (independent null level - observed) that blocks turned as a whole have too\n\n"
            shares = {
                name: (two - three) / (two - one)
                for name, (one, two, three) in means.items()
                if name != "offdiag"
            }
            rows = [
                [SHOWN[name], *(f"{value:.2f}" for value in share)]
                for name, share in shares.items()
            ]
            yield table(["distance", *map(str, DISTANCES)], rows)
        yield f"\n{title}, K = {K}: null level - observed, and how far chance moves the mean\n\n"
        rows = []
        for name in DRAWN:
            gap = by_distance(new[name]) - by_distance(values[name])
            rows.append(
                [f"{SHOWN[name]}: null level - observed", *(f"{value:.4f}" for value in gap)]
            )
            if name in drawn:
                mean, deviation = drawn[name].mean(0), drawn[name].std(0, ddof=1)
                rows.append(
                    [f"{SHOWN[name]}: mean of {draws} draws", *(f"{value:.4f}" for value in mean)]
                )
                rows.append(
                    [f"{SHOWN[name]}: standard deviation", *(f"{value:.4f}" for value in deviation)]
                )
                rows.append(
                    [
                        f"{SHOWN[name]}: lowest draw",
                        *(f"{value:.4f}" for value in drawn[name].min(0)),
                    ]
                )
        rows.append(
            [
                "m_K: bound of it from the spread",
                *(f"{value:.4f}" for value in spread_of_means(spread)),
            ]
        )
        below = (values["miscoupling"] < new["miscoupling"] - 1.645 * spread).double()
        rows.append(
            ["m_K: share of pairs below 5 %", *(f"{value:.2f}" for value in by_distance(below))]
        )
        yield table(["distance", *map(str, DISTANCES)], rows)


def simulated(title: str, of: Blocks, pairs: Sequence[tuple[int, int]], draws: int = 1000) -> str:
    """Return a table of simulated and computed null levels of single pairs: the first prompt, K = 10."""
    blocks, rows, d = of.first(KS[0]), [], of.J.shape[-1]
    moments, basis = blocks.parts()
    values = observed(blocks)
    for l, m in pairs:
        J = of.J[0, l].double()
        U = blocks.U[0, m].double()
        V = blocks.V[0, m].double()
        s = blocks.s[0, l].double()
        A = coupling.simulated(J, U, V, draws, torch.Generator().manual_seed(0))
        cells = []
        for definition in DEFINITIONS:
            drawn = definition.formula(A, s)
            level = coupling.null_level(definition.name, blocks.s.double(), moments, basis, d)[
                0, l, m
            ]
            seen, root = values[definition.name][0, l, m], (drawn**2).mean().sqrt()
            cells.append(
                f"{seen:.3f} / {root:.3f} / {level:.3f} ({float((drawn <= seen).double().mean()):.3f})"
            )
        rows.append([f"{l + 1}, {m + 1}", *cells])
    head = ["block, basis", *(definition.name for definition in DEFINITIONS)]
    return f"\n{title}, first prompt, K = {KS[0]}: observed / simulated / computed (share of draws below)\n\n{table(head, rows)}"


def jacobians(model, tokenizer, prompts) -> Tensor:
    """Return the Jacobians (prompt, layer, d, d) of the blocks alone at the last token."""
    options = {
        "measures": ["coupling"],
        "final_norm": "exclude",
        "keep": "jacobian",
        "k": KS[:1],
        "max_tokens": TOKENS,
    }
    ds = tracker.measure(model, prompts, tokenizer=tokenizer, **options)
    return torch.from_numpy(ds.jacobian.isel(token=0).values)


def parts_of_blocks(title: str, of: Blocks) -> str:
    """Return a sentence on what each block has by itself."""
    moments, basis = of.first(KS[0]).parts()
    size = moments.frobenius(of.J.shape[-1])
    tau, share = moments.isotropic / of.s[..., 0], of.J.shape[-1] * (moments.isotropic / size) ** 2
    words = [f"tr J / (d s_1) {tau.mean():.3f} ({tau.min():.3f} to {tau.max():.3f})"]
    words.append(f"isotropic share of |J|^2 {share.mean():.3f} (at most {share.max():.3f})")
    g = basis.diagonal.mean(-1)
    words.append(
        f"u_k . v_k, k <= {KS[0]}, {g.mean():.3f} (blocks {g.mean(0).min():.3f} to {g.mean(0).max():.3f})"
    )
    return f"\n{title}: {'; '.join(words)}\n"


def draw(of: dict[str, dict[str, Blocks]], out: Path) -> None:
    """Draw the profiles by distance and the pairs, K = 10."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(DRAWN), len(of), figsize=(9, 6.5), sharex="col", sharey="row", squeeze=False
    )
    for column, (title, (blocks, _)) in zip(
        axes.T, ((t, tuple(both.values())) for t, both in of.items()), strict=True
    ):
        every = range(1, blocks.J.shape[1])
        of_blocks = blocks.first(KS[0])
        levels = independent_levels(of_blocks), turned_levels(of_blocks), observed(of_blocks)
        looks = (
            (GREY, "--", "null level, U′ and V′ independent"),
            (ORANGE, "-", "null level, blocks turned as a whole"),
        )
        for axis, name in zip(column, DRAWN, strict=True):
            for level, (colour, style, words) in zip(
                levels, (*looks, (BLUE, "-", "observed")), strict=True
            ):
                axis.plot(every, by_distance(level[name], every), style, color=colour, label=words)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(title)
        column[-1].set_xlabel("distance |l − l′|")
    for axis, name in zip(axes[:, 0], DRAWN, strict=True):
        axis.set_ylabel(f"{SHOWN[name]}, K = {KS[0]}")
    axes[0, 0].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "by_distance.png", dpi=110)

    colours = LinearSegmentedColormap.from_list("diverging", DIVERGING)
    figure, axes = plt.subplots(2, len(of), figsize=(9, 8), squeeze=False, layout="constrained")
    for column, (title, both) in zip(axes.T, of.items(), strict=True):
        for axis, (words, blocks) in zip(column, both.items(), strict=True):
            blocks = blocks.first(KS[0])
            gap = (turned_levels(blocks)["miscoupling"] - observed(blocks)["miscoupling"]).mean(0)
            gap.fill_diagonal_(torch.nan)
            ends = (0.5, len(gap) + 0.5)
            image = axis.imshow(
                gap, cmap=colours, vmin=-LARGEST, vmax=LARGEST, extent=(*ends, *ends[::-1])
            )
            axis.set(title=f"{title}: {words}", xlabel="block of the basis l′", ylabel="block l")
    figure.colorbar(
        image,
        ax=axes,
        label=f"null level, turned as a whole − m_K (K = {KS[0]})",
        shrink=0.7,
        extend="both",
    )
    figure.savefig(out / "pairs.png", dpi=110)


def main(prompts: int, draws: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    models: dict[str, dict[str, Blocks]] = {}
    with (out / "tables.md").open("w") as file:

        def write(text: str) -> None:
            print(text, end="", flush=True)
            file.write(text)

        for name in MODELS:
            model, tokenizer = load(name)
            J = jacobians(model, tokenizer, PROMPTS[:prompts])
            title = TITLES[name]
            models[title] = {
                "J": decompose(J, max(KS)),
                "J0": decompose(without_isotropic(J), max(KS)),
            }
            for words, blocks in models[title].items():
                write(parts_of_blocks(f"{title}, {words}", blocks))
                for text in compared(f"{title}, {words}", blocks, draws):
                    write(text)
            if name == "smollm2":
                write(simulated(title, models[title]["J"], PAIRS))
        write(
            simulated(
                "nano, step 256",
                decompose(jacobians(*nano.load(step=256), PROMPTS[:1]), KS[0]),
                PAIRS_OF_NANO,
            )
        )
    draw(models, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    parser.add_argument(
        "--draws", type=int, default=40, help="random rotations of all blocks; 0: none"
    )
    parser.add_argument("--out", type=Path, default=Path("results/unrelated_blocks"), metavar="DIR")
    given = parser.parse_args()
    try:
        main(given.prompts, given.draws, given.out)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
