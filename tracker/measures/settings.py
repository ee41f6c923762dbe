"""The options of a measurement and the choices of `measures=`: each is declared once.

`tracker.measure`, the callbacks, `python -m tracker.pythia` and `python -m vit.train` take their measurement options, signatures,
documentation, flags and forms of values from `Options`. `Settings` has the values, validated and in one form.
Nothing heavy is imported here, so that `--help` is quick.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, get_args

from tracker.common import values
from tracker.common.errors import UsageError
from tracker.common.values import Derivative, Dtype, FinalNorm, Method, Precision, Witness

if TYPE_CHECKING:
    import torch

    from tracker.model.description import Blocks


@dataclass(frozen=True)
class Choice:
    """A choice of `measures=`."""

    name: str
    text: str
    default: bool = False
    needs: str = ""  # the option that it extends
    # More than twice the cost of the default: measured only if named, not by "all"
    expensive: bool = False
    # Measured of each block: from its triplets and J x, or from the entries of J, which takes more memory (`plan.ARRAYS`).
    of_jacobians: Literal["", "products", "entries"] = ""


CHOICES = (
    Choice("coupling", "mis-coupling of all pairs of blocks", default=True),
    Choice("trajectory", "line-shape score, expodistance, norms of the states", default=True),
    Choice("vju", "coupling with the sides of the bases swapped, V^T J U", needs="coupling"),
    Choice("matrices", "the coupling matrices A, for the smallest K", needs="coupling"),
    Choice("tokenwise", "coupling across tokens", expensive=True),
    Choice("entropy", "entropy of the next token by depth"),
    Choice("pca", "states on the principal plane of the last states"),
    Choice("noise", "response of the states to noise on the embeddings"),
    Choice(
        "products",
        "what the blocks do together to a small change of the state: amplification, effective rank, Lyapunov exponents",
        needs="coupling",
        of_jacobians="entries",
    ),
    Choice(
        "depth_use",
        "how much each block changes the state, and whether its Jacobian accounts for that",
        needs="coupling",
        of_jacobians="products",
    ),
    Choice(
        "normality", "how symmetric the Jacobians are", needs="coupling", of_jacobians="entries"
    ),
    Choice(
        "eigenvalues",
        "departure of the Jacobians from normality",
        needs="coupling",
        expensive=True,
        of_jacobians="entries",
    ),
)


CHOICE_NAMES = tuple(choice.name for choice in CHOICES)
EXPENSIVE = tuple(choice.name for choice in CHOICES if choice.expensive)  # "all" leaves them out
EVERYTHING = ("all", *EXPENSIVE)
OF_PAIRS = ("vju", "matrices")  # of Jacobians, but not of each block
# Measured where `measures=` is not given
USUAL = tuple(choice.name for choice in CHOICES if choice.default)

RELEASE_K = (10, 30, 50)
MEMORY_BUDGET = 4 << 30  # bytes
LEAST_MEMORY_BUDGET = 1000  # bytes; who gives fewer means another unit


class Option(NamedTuple):
    """An option, as it is declared: `name: Annotated[given, default, doc]`, perhaps with a form.

    Args:
        given: the types that callers may give.
        doc: documentation of the keyword and help of the flag.
        form: converts what callers and command lines give; without one, the type is a Literal.
    """

    given: Any
    default: Any
    doc: str
    form: Any = None


class Options(TypedDict, total=False):
    """The keywords of a measurement."""

    k: Annotated[
        int | Sequence[int] | None,
        None,
        "number of top singular vectors, one or several. Default: those of 10, 30, 50 not above the width d, or d // 2 if "
        "none is.",
        values.INTEGERS,
    ]
    tokens: Annotated[
        str | Sequence[int] | None,
        None,
        "tokens whose Jacobians are measured: last, cls, all, or a list of positions ([0, -1]; on a command line 0,-1). In text "
        "encoders (BERT), last leaves out the special tokens at the end ([SEP]), and cls is the tokenizer's class token. "
        "Default: cls for image models that classify from their class token, last elsewhere.",
        values.TOKENS,
    ]
    final_norm: Annotated[
        FinalNorm,
        "auto",
        "include adds the variables that end in _normed, in which the final norm is part of the last block (paper eq. 7), at the "
        "cost of one more Jacobian; exclude leaves them out; auto is include for language models that have a final norm "
        "(Hugging Face models of token ids, and models that map each token's last state to logits over their vocabulary), else "
        "exclude. Variables without that suffix are of the blocks alone: the norm by itself raises the line-shape score, and in "
        "trained models it makes the last block's Jacobian nearly a multiple of -I.",
    ]
    svd: Annotated[
        Method,
        "auto",
        "algorithm for the singular vectors: full decomposition; krylov, an iteration for the top K that falls back to full "
        "where its certificate fails; auto, the one expected to be fastest.",
    ]
    dtype: Annotated[
        "torch.dtype | Literal['float32', 'float64']",
        "float32",
        "precision of the measurement, float32 or float64 (in Python also torch.float32 and torch.float64), whatever the "
        "weights are stored in.",
        Dtype,
    ]
    precision: Annotated[
        Precision,
        "float32",
        "precision of the products that form Jacobians in float32. tf32 (on GPUs that support it) and bfloat16 are faster; "
        "docs/measurements.md states their errors. Everything else stays in dtype.",
    ]
    derivative: Annotated[
        Derivative,
        "checked",
        "checked compares the derivative that autograd computes with differences of values, and refuses a block where they "
        "disagree, except tensors that it detaches, which are constants; autograd measures what autograd computes, right "
        "or not.",
    ]
    witness: Annotated[
        Witness,
        "model",
        "model runs a copy of the model as it is, with its hooks, on a few samples, a few times, and compares the Jacobian "
        "of each block with what it computes there. off asks the replica that is measured in its place.",
    ]
    memory_budget: Annotated[
        int | str,
        MEMORY_BUDGET,
        "bytes to use in addition to the weights, half of them for Jacobians: a number or a size such as 3GB. A smaller "
        "budget means smaller chunks, and results that are equal to rounding. Default: 4 GiB; in a walk over checkpoints a "
        "quarter of the machine's memory, or half of the GPU's, or less where that lets the weights stay on the GPU.",
        values.BYTE_SIZE,
    ]
    measures: Annotated[
        str | Sequence[str] | None,
        USUAL,
        f"any of: {'; '.join(f'{one.name} ({one.text})' for one in CHOICES)}; all means all of them but "
        f"{', '.join(EXPENSIVE)}, which cost more than coupling itself and are added by name "
        f"({','.join(EVERYTHING)}). Default: {', '.join(USUAL)}.",
        values.NAMES,
    ]
    window: Annotated[
        int | None,
        None,
        "number of states in a windowed measure, odd. Default: 11 where L >= 20, else the largest odd number <= L/2 + 1.",
        values.INTEGER,
    ]
    pair_tokens: Annotated[
        int | Sequence[int],
        6,
        "tokens whose Jacobians tokenwise compares: a number of tokens of each sample, evenly spaced from the first to the "
        "last, or a list of positions.",
        values.COUNT_OR_INTEGERS,
    ]
    pair_layers: Annotated[
        int,
        1,
        "distance from a block l whose Jacobians tokenwise compares to the block l' of the basis; 1: l' = l + 1, 0: l' = l.",
        values.INTEGER,
    ]


def declared(options: Any) -> dict[str, Option]:
    """Return the options that a TypedDict declares, by name."""
    return {name: Option(*get_args(of)) for name, of in options.__annotations__.items()}


OPTIONS = declared(Options)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a measurement, validated and in one form: sequences are tuples, the dtype is a name.

    What depends on the model is resolved by the methods.
    """

    k: tuple[int, ...] | None
    tokens: str | tuple[int, ...] | None
    final_norm: FinalNorm
    svd: Method
    dtype: Dtype
    precision: Precision
    derivative: Derivative
    witness: Witness
    memory_budget: int
    measures: tuple[str, ...]
    window: int | None
    pair_tokens: int | tuple[int, ...]
    pair_layers: int

    keep: tuple[str, ...] = ()  # of `tracker.measure` alone: see `layers.with_kept`

    def __post_init__(self) -> None:
        if self.precision != "float32" and self.dtype != "float32":
            raise UsageError(
                f"precision={self.precision!r} is a way to form Jacobians in float32; leave dtype out"
            )
        if self.memory_budget < LEAST_MEMORY_BUDGET:
            raise UsageError(
                f"memory_budget={self.memory_budget}, which is in bytes, at least {LEAST_MEMORY_BUDGET}; for 10 GB, give "
                "memory_budget=10 << 30 (on a command line 10GB)"
            )
        if self.k is not None and min(self.k) < 1:
            raise self._refused_k("width")
        for needing in CHOICES:
            if needing.needs and self.includes(needing.name) and not self.includes(needing.needs):
                raise UsageError(
                    f"measures {', '.join(self.measures)!r}; {needing.name} extends {needing.needs!r}: add it"
                )
        if self.window is not None and (self.window < 3 or self.window % 2 == 0):
            raise UsageError(
                f"window={self.window}; a window is an odd number of states, at least 3"
            )

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of the measurement."""
        import torch

        return torch.float64 if self.dtype == "float64" else torch.float32

    def as_options(self) -> dict[str, Any]:
        """Return the options as keywords."""
        return {name: getattr(self, name) for name in OPTIONS}

    def identity(self, always: Sequence[str]) -> dict[str, Any]:
        """Return, as JSON values, the options that identify a store: those in `always`, and those not at their default.

        The memory budget and the witness are never part of it; `pair_layers` is, with tokenwise alone.
        """
        identity = {}
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            part = name in always or value != option.default
            if name == "pair_layers":
                part = self.includes("tokenwise")
            if part and name not in ("memory_budget", "witness"):
                identity[name] = list(value) if isinstance(value, tuple) else value
        return identity

    def includes(self, measure: str) -> bool:
        """Whether a measure is requested, by its name or by "all"."""
        return measure in self.measures or ("all" in self.measures and measure not in EXPENSIVE)

    @property
    def forms_jacobians(self) -> bool:
        """Whether a requested measure needs Jacobians."""
        return self.includes("coupling") or self.includes("tokenwise")

    def measures_of_jacobians(self) -> tuple[str, ...]:
        """Return the measures of each pair of Jacobians, and of each of them, in addition to the mis-couplings."""
        names = (*OF_PAIRS, *(option.name for option in CHOICES if option.of_jacobians))
        return tuple(measure for measure in names if self.includes(measure))

    def pair_positions(self, valid: Sequence[int]) -> list[int]:
        """Return the positions that tokenwise compares, among the valid ones of a sample."""
        import numpy as np

        from tracker.blocks.tokens import positions

        if isinstance(self.pair_tokens, int):
            at = (
                np.linspace(0, len(valid) - 1, min(self.pair_tokens, len(valid)))
                .round()
                .astype(int)
            )
            return [valid[i] for i in at]
        return sorted(set(positions(self.pair_tokens, list(valid), None)))

    def basis_layers(self, L: int) -> dict[int, int]:
        """Return, for tokenwise on L blocks, the basis block l' of each block l, counted from 1.

        Raises:
            UsageError: if no two blocks of the model are so far apart.
        """
        blocks = range(1, L + 1)
        chosen = {l: l + self.pair_layers for l in blocks if l + self.pair_layers in blocks}
        if not chosen:
            raise UsageError(
                f"pair_layers={self.pair_layers}, but {L} block{'s are' if L > 1 else ' is'} measured, at most "
                f"{L - 1} apart; pair_layers=0 compares each in its own basis"
            )
        return chosen

    def memory(self, part: int) -> int:
        """Return one `part`-th of the memory budget, in bytes."""
        return self.memory_budget // part

    def chosen_tokens(self, blocks: "Blocks") -> str | tuple[int, ...]:
        """Return the tokens to measure; by default the class token of models that classify from it, else the last."""
        if self.tokens is not None:
            return self.tokens
        return "last" if blocks.class_token is None else "cls"

    def ks(self, d: int) -> tuple[int, ...]:
        """Return the numbers of singular vectors for width d, ascending."""
        if self.k is None:
            return tuple(K for K in RELEASE_K if d >= K) or (max(1, d // 2),)
        if not all(1 <= K <= d for K in self.k):
            raise self._refused_k(f"width d = {d}")
        return tuple(sorted(set(self.k)))

    def _refused_k(self, most: str) -> UsageError:
        assert self.k is not None
        value = self.k[0] if len(self.k) == 1 else list(self.k)
        return UsageError(
            f"k={value!r}; each K must be a whole number from 1 to the model's {most}"
        )
