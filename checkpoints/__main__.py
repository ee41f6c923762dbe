"""What is published of a suite, and whether it is what it should be, before anything is measured.

`python -m checkpoints list 12b` prints a table of revisions; `python -m checkpoints verify 12b` compares what the cache holds
with the hub's hashes. Exit status: 0 nothing is wrong; 1 something is; 2 bad usage.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from checkpoints import integrity
from checkpoints.disk import missing_files
from checkpoints.fetch import snapshot_dir
from checkpoints.files import hash_file
from checkpoints.hub import CheckpointError, File, Listing
from checkpoints.integrity import Examination, examine
from checkpoints.suites import Checkpoint, Suite, find_suite

FINE, WRONG, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from argparse import ArgumentParser

    parser = ArgumentParser(prog="python -m checkpoints", description=__doc__ and __doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (
        ("list", "print revisions, steps, tokens, formats, bytes and defects"),
        ("verify", "compare the hashes of the files in the cache with those that the hub lists"),
    ):
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument("model", help="a Pythia size, a repository id, a directory of checkpoints, or nano")
        command.add_argument("--steps", default="all", help="all (default), paper, log2, or numbers such as 128,512")
        command.add_argument("--revisions", help="a regular expression with a group named step, for other spellings")
        command.add_argument("--stage", help="of a suite trained in several")
    parsed = parser.parse_args(arguments)
    try:
        suite = find_suite(parsed.model, revisions=parsed.revisions, stage=parsed.stage, notify=_notify)
        chosen = suite.select(parsed.steps)
        examination = examine(suite, chosen, _notify)
    except (ValueError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    for notice in filter(None, (suite.notice, examination.offline)):
        _notify(f"note: {notice}")
    return (show if parsed.command == "list" else verify)(suite, chosen, examination)


def show(suite: Suite, chosen: Sequence[Checkpoint], examination: Examination) -> int:
    """Print what is published; 1 if some of it is doubted."""
    rows = [("revision", "step", "tokens", "formats", "fetched", "cache", "defects")]
    for checkpoint in chosen:
        listing = _listing(suite, checkpoint, examination)
        rows.append(
            (
                checkpoint.name,
                f"{checkpoint.step:,}",
                _tokens(checkpoint.tokens),
                "+".join(listing.formats) if listing else "?",
                f"{listing.bytes / 1e9:.3g} GB" if listing else "?",
                _held(suite, checkpoint, listing),
                examination.suspect.get(checkpoint.step, ""),
            )
        )
    _print_table(rows)
    print(
        f"{len(chosen)} of {len(suite.checkpoints)} checkpoints of {suite.source}; {len(examination.suspect)} doubted"
    )
    return WRONG if examination.suspect else FINE


def verify(suite: Suite, chosen: Sequence[Checkpoint], examination: Examination) -> int:
    """Hash what the cache holds of each revision; 1 if a file differs from the hub's, or a revision is doubted."""
    rows = [("revision", "files", "verdict")]
    wrong = False
    contents: dict[int, str] = {}
    for checkpoint in chosen:
        listing = _listing(suite, checkpoint, examination)
        directory = _place(suite, checkpoint, listing)
        lacking = {file.name for file in missing_files(directory, listing)} if listing else set()
        held = [file for file in listing.weights if file.name not in lacking] if listing else []
        damaged = [file.name for file in held if file.sha256 and hash_file(directory / file.name) != file.sha256]
        doubt = examination.suspect.get(checkpoint.step)
        verdict = "; ".join(filter(None, [f"DAMAGED: {', '.join(damaged)}" if damaged else "", doubt or ""]))
        wrong |= bool(verdict)
        if held and not lacking:
            contents[checkpoint.step] = integrity.files_digest(directory, listing)
        rows.append(
            (checkpoint.name, f"{len(held)} of {len(listing.weights) if listing else '?'}", verdict or _fine(held))
        )
    _print_table(rows)
    for step, earlier in integrity.find_repeats(contents).items():
        wrong |= (earlier, step) != (0, 1)
        print(f"note: {integrity.describe_repeat(step, earlier)}")
    return WRONG if wrong else FINE


def _fine(held: Sequence[File]) -> str:
    if not held:
        return "nothing of it is in the cache"
    return "as published" if all(file.sha256 for file in held) else "readable; no published hash to compare with"


def _listing(suite: Suite, checkpoint: Checkpoint, examination: Examination) -> Listing | None:
    if checkpoint.revision is None or not suite.on_hub:
        directory = _place(suite, checkpoint, None)
        if not directory.is_dir():
            return None
        return integrity.files_in(directory)
    return examination.listings.get(checkpoint.revision)


def _place(suite: Suite, checkpoint: Checkpoint, listing: Listing | None) -> Path:
    if checkpoint.revision is None:
        return Path(checkpoint.source)
    revision = listing.commit if listing is not None and listing.commit else checkpoint.revision
    return snapshot_dir(checkpoint.source, revision, suite.cache_dir)


def _tokens(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count:,}" if count < 1e8 else f"{count / 1e9:.4g}B"


def _held(suite: Suite, checkpoint: Checkpoint, listing: Listing | None) -> str:
    if listing is None:
        return "no"
    lacking = missing_files(_place(suite, checkpoint, listing), listing)
    return "whole" if not lacking else "no" if len(lacking) == len(listing.needed) else "partly"


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
