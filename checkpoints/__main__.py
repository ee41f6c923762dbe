"""List the published checkpoints of a suite, and verify those in the cache.

`python -m checkpoints list 12b` prints a table of revisions. `python -m checkpoints verify 12b` compares the cached files with
the hub's hashes. Exit status: 0 no problem found; 1 suspect or damaged checkpoints; 2 bad usage.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from checkpoints import integrity
from checkpoints.disk import missing_files
from checkpoints.fetch import snapshot_dir
from checkpoints.hub import File, Listing
from checkpoints.integrity import Examination, examine
from checkpoints.suites import Checkpoint, Suite, find_suite
from tracker.common.command_line import FAILED, OK, reports_errors
from tracker.common.files import hash_file
from tracker.common.text import describe_repeat, find_repeats, size


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser

    parser = Parser(
        prog="python -m checkpoints", description=__doc__ and __doc__.partition("\n")[0]
    )
    commands = parser.add_subcommands()
    for name, description in (
        ("list", "print revisions, steps, tokens, formats, sizes and defects"),
        ("verify", "compare the hashes of cached files with those that the hub lists"),
    ):
        command = Parser(description=description)
        command.add_argument(
            "model",
            type=str,
            help="a Pythia size, a repository id, a directory of checkpoints, or nano",
        )
        command.add_argument(
            "--steps",
            type=str,
            default="all",
            help="all (default), paper, log2, or numbers such as 128,512",
        )
        command.add_argument(
            "--revisions",
            type=str,
            help="a regular expression with a group named step, for other names",
        )
        command.add_argument(
            "--stage", type=str, help="the stage of a suite trained in several; default: the first"
        )
        commands.add_subcommand(name, command, help=description)
    chosen_command = parser.parse_args(arguments)
    parsed = chosen_command[chosen_command.subcommand]
    suite = find_suite(parsed.model, revisions=parsed.revisions, stage=parsed.stage, notify=_notify)
    chosen = suite.select(parsed.steps)
    examination = examine(suite, chosen, _notify)
    for notice in filter(None, (suite.notice, examination.offline)):
        _notify(f"note: {notice}")
    return (show if chosen_command.subcommand == "list" else verify)(suite, chosen, examination)


def show(suite: Suite, chosen: Sequence[Checkpoint], examination: Examination) -> int:
    """Print a table of the published checkpoints; return 1 if any is suspect."""
    rows = [("revision", "step", "tokens", "formats", "download", "cache", "defects")]
    for checkpoint in chosen:
        listing = _listing(suite, checkpoint, examination)
        rows.append(
            (
                checkpoint.name,
                f"{checkpoint.step:,}",
                _tokens(checkpoint.tokens),
                "+".join(listing.formats) if listing else "?",
                _size(suite, listing),
                _cache_state(suite, checkpoint, listing),
                _defects(checkpoint, examination),
            )
        )
    _print_table(rows)
    print(
        f"{len(chosen)} of {len(suite.checkpoints)} checkpoints of {suite.source}; {len(examination.suspect)} suspect"
    )
    return FAILED if any(_defects(checkpoint, examination) for checkpoint in chosen) else OK


def verify(suite: Suite, chosen: Sequence[Checkpoint], examination: Examination) -> int:
    """Hash the cached files of each revision; return 1 if a file differs from the hub's or a revision is suspect."""
    rows = [("revision", "files", "verdict")]
    failed = False
    digests: dict[int, str] = {}
    for checkpoint in chosen:
        listing = _listing(suite, checkpoint, examination)
        directory = _directory(suite, checkpoint, listing)
        missing = {file.name for file in missing_files(directory, listing)} if listing else set()
        cached = [file for file in listing.weights if file.name not in missing] if listing else []
        damaged = [
            file.name
            for file in cached
            if file.sha256 and hash_file(directory / file.name) != file.sha256
        ]
        problems = [f"DAMAGED: {', '.join(damaged)}"] if damaged else []
        verdict = "; ".join(filter(None, [*problems, _defects(checkpoint, examination)]))
        failed |= bool(verdict)
        if cached and not missing:
            digests[checkpoint.step] = integrity.files_digest(directory, listing)
        total = len(listing.weights) if listing else "?"
        rows.append((checkpoint.name, f"{len(cached)} of {total}", verdict or _passed(cached)))
    _print_table(rows)
    for step, earlier in find_repeats(digests).items():
        failed |= (earlier, step) != (0, 1)
        print(f"note: {describe_repeat(step, earlier)}")
    return FAILED if failed else OK


def _defects(checkpoint: Checkpoint, examination: Examination) -> str:
    """Return why a checkpoint is suspect or its files are not listed, or ""."""
    reasons = (examination.suspect.get(checkpoint.step), examination.unlisted.get(checkpoint.name))
    return "; ".join(filter(None, reasons))


def _passed(cached: Sequence[File]) -> str:
    if not cached:
        return "not in the cache"
    return (
        "as published"
        if all(file.sha256 for file in cached)
        else "readable; no published hash to compare with"
    )


def _listing(suite: Suite, checkpoint: Checkpoint, examination: Examination) -> Listing | None:
    if checkpoint.revision is None or not suite.on_hub:
        directory = _directory(suite, checkpoint, None)
        return integrity.files_in(directory) if directory.is_dir() else None
    return examination.listings.get(checkpoint.revision)


def _directory(suite: Suite, checkpoint: Checkpoint, listing: Listing | None) -> Path:
    if checkpoint.revision is None:
        return Path(checkpoint.source)
    revision = listing.commit if listing is not None and listing.commit else checkpoint.revision
    return snapshot_dir(checkpoint.source, revision, suite.cache_dir)


def _size(suite: Suite, listing: Listing | None) -> str:
    if suite.shape and not (listing and listing.weights):
        return f"about {size(suite.shape.file_bytes)}"
    return size(listing.bytes) if listing else "?"


def _tokens(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count:,}" if count < 1e8 else f"{count / 1e9:.4g}B"


def _cache_state(suite: Suite, checkpoint: Checkpoint, listing: Listing | None) -> str:
    if listing is None:
        return "no"
    missing = missing_files(_directory(suite, checkpoint, listing), listing)
    return "complete" if not missing else "no" if len(missing) == len(listing.needed) else "partial"


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
