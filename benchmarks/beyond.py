"""Cost of the measures beyond the paper: `python -m benchmarks.beyond --shape 410m --blocks 4 --repeats 3`.

Times `tracker.measure` with coupling alone and with each further choice of `measures=`, in turn, in one process, and prints the
added time as a share of the coupling measurement: medians over the repeats of ratios of neighbouring runs. Blocks alike, a
decomposition at each depth that has one: with fewer blocks than the shape has, the share of `products` is too large.
"""

import sys
import time
from collections.abc import Sequence
from statistics import median


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import Parser
    from tracker.measures.settings import CHOICES

    choices_of_blocks = ",".join(option.name for option in CHOICES if option.of_jacobians)
    parser = Parser(prog="python -m benchmarks.beyond", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--shape", type=str, default="410m", help="the model, as in benchmarks.coupling")
    parser.add_argument("--blocks", type=int, default=4, help="number of blocks")
    parser.add_argument("--tokens", type=int, default=128, help="length of the prompt")
    parser.add_argument("--k", type=int, default=50, help="number of singular vectors")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument(
        "--choices", type=str, default=choices_of_blocks, help="choices of measures= that are timed alone"
    )
    parser.add_argument(
        "--together",
        type=str,
        default="products,normality,depth_use",
        help="choices that are timed together; '' for none",
    )
    parsed = parser.parse_args(arguments)
    import tracker
    from benchmarks import shapes

    model = shapes.model(parsed.shape, parsed.blocks, "cpu")
    inputs = shapes.inputs(parsed.shape, parsed.tokens, 1)
    options = {"k": parsed.k, "blocks": shapes.blocks(model), "final_norm": "exclude"}

    def seconds(*choices: str) -> float:
        started = time.perf_counter()
        tracker.measure(model, inputs, measures=["coupling", *choices], **options)
        return time.perf_counter() - started

    alone_and_together = [*([choice] for choice in parsed.choices.split(",")), parsed.together.split(",")]
    cases = {" + ".join(choices): choices for choices in alone_and_together if choices != [""]}
    seconds()  # to warm up
    shares: dict[str, list[float]] = {name: [] for name in cases}
    alone: list[float] = []
    for repeat in range(parsed.repeats):
        for name, choices in cases.items():
            alone.append(seconds())
            shares[name].append(seconds(*choices) / alone[-1] - 1)
        print(f"run {repeat + 1} of {parsed.repeats}", file=sys.stderr, flush=True)
    print(f"coupling alone: {median(alone):.2f} s, {parsed.shape}, {parsed.blocks} blocks, K = {parsed.k}")
    for name, of_each in shares.items():
        print(f"{name}: {median(of_each):+.2f} of coupling ({min(of_each):+.2f} to {max(of_each):+.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
