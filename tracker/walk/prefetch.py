"""Fetch each checkpoint while the one before it is measured; no two walks measure the same one."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.disk import DiskBudget
from checkpoints.fetch import cached_snapshot, fetch, remove_damaged, snapshot_dir
from checkpoints.hub import Listing
from checkpoints.suites import Checkpoint
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock
from tracker.walk.display import WalkProgress
from tracker.walk.plan import SelectedCheckpoints

if TYPE_CHECKING:
    from tracker.store import Store

WAIT = 0.5  # seconds between checks of other walks


@dataclass(eq=False)
class Prefetched:
    """A claimed checkpoint that a thread fetches; `arrival` receives its directory, or why it can't be fetched.

    The thread is a daemon, so that a stalled connection does not delay an exit; a later walk resumes its partial download.
    """

    selection: SelectedCheckpoints
    disk: DiskBudget
    checkpoint: Checkpoint
    claim: Lock
    upcoming: Sequence[str]  # commits that are measured later
    shown: WalkProgress
    use: Lock | None = None

    def __post_init__(self) -> None:
        self.stop = threading.Event()
        self.arrival: Future[Path] = Future()
        threading.Thread(target=self._fetch, daemon=True).start()

    def close(self) -> None:
        """Give up or finish the checkpoint: others may measure or evict it."""
        self.stop.set()
        self.claim.release(remove=True)
        if self.use is not None and self.arrival.done():
            self.use.release()

    def fetch_damaged_again(self) -> bool:
        """Download again the cached files whose content is not the hub's; return whether there were any.

        Raises:
            CheckpointError: if they can't be downloaded.
        """
        selection, checkpoint = self.selection, self.checkpoint
        listing = selection.listings.get(checkpoint.name)
        if listing is None or selection.offline:
            return False
        damaged = remove_damaged(checkpoint.source, listing, selection.suite.cache_dir)
        for name in damaged:
            self.shown.notify(
                f"step {checkpoint.step}: {name} is damaged in the cache: its hash is not the one that the hub lists; "
                "downloading it again"
            )
        if damaged:
            self._download(listing)
        return bool(damaged)

    def _fetch(self) -> None:
        try:
            self.arrival.set_result(self._directory())
        except BaseException as error:  # raised again where the checkpoint is waited for
            self.arrival.set_exception(error)

    def _directory(self) -> Path:
        selection, checkpoint = self.selection, self.checkpoint
        if checkpoint.revision is None:
            return Path(checkpoint.source)
        repo, revision = checkpoint.source, checkpoint.revision
        cache_dir = selection.suite.cache_dir
        if not selection.suite.on_hub:
            return cached_snapshot(repo, revision, cache_dir)
        listing = selection.listings.get(revision)
        if listing is None:
            missing = f"{repo} has no revision {revision}; see its branches on the hub"
            raise CheckpointError(selection.unlisted.get(revision, missing))
        if selection.offline:  # its files are in the cache: those that lack some are not asked for
            return snapshot_dir(repo, listing.commit, cache_dir)
        while (use := self.disk.try_reserve(repo, listing, self.upcoming)) is None:
            if self.stop.wait(WAIT):
                raise CheckpointError(f"stopped before {revision} was fetched")
        self.use = use
        return self._download(listing)

    def _download(self, listing: Listing) -> Path:
        """Download what the cache lacks of a listed revision; return its directory."""
        repo, revision = self.checkpoint.source, self.checkpoint.name
        cache_dir = self.selection.suite.cache_dir
        lacking = self.selection.to_fetch(self.checkpoint, listing)
        count = (
            self.shown.downloading(revision, sum(file.size for file in lacking))
            if lacking
            else lambda _: None
        )
        return fetch(
            repo,
            revision,
            listing,
            cache_dir,
            notify=self.shown.notify,
            count=count,
            stop=self.stop,
        )


def prefetch(
    selection: SelectedCheckpoints,
    disk: DiskBudget,
    store: "Store",
    checkpoints: Sequence[Checkpoint],
    shown: WalkProgress,
    measured_elsewhere: Callable[[int], bool],
) -> Generator[Prefetched]:
    """Claim and fetch checkpoints; yield each, fetched or failed, while the next is being fetched.

    Checkpoints that another walk is measuring come last. `measured_elsewhere` is called with the claim when their unit exists,
    and returns whether it is intact; if it is not, or the other walk ends without a unit, the checkpoint is yielded here.
    """
    pending, coming = deque(checkpoints), deque[Prefetched]()
    waited_for: set[int] = set()

    def start_next() -> bool:
        """Claim the next free checkpoint, if any, and start fetching it."""
        for _ in range(len(pending)):
            checkpoint = pending.popleft()
            claim = store.claim(checkpoint.step)
            if claim is None:
                pending.append(checkpoint)
                continue
            # Under the claim: another walk may have measured it since this one was planned.
            try:
                done = store.has(checkpoint.step) and measured_elsewhere(checkpoint.step)
            except BaseException:
                claim.release(remove=True)
                raise
            if done:
                claim.release(remove=True)
                continue
            upcoming = [
                selection.listings[c.name].commit for c in pending if c.name in selection.listings
            ]
            coming.append(Prefetched(selection, disk, checkpoint, claim, upcoming, shown))
            return True
        return False

    try:
        # One is fetched ahead: more would take more of the disk, and be claimed long before they are measured.
        while pending or coming:
            if not coming and not start_next():
                for checkpoint in pending:
                    if checkpoint.step not in waited_for:
                        waited_for.add(checkpoint.step)
                        # A claim that was made or released just now has no signature.
                        by = store.claimant(checkpoint.step) or "another walk"
                        shown.notify(f"step {checkpoint.step}: measured by {by}; waiting for it")
                time.sleep(WAIT)
                continue
            coming[0].arrival.exception()  # waits
            start_next()
            with closing(coming.popleft()) as prefetched:
                yield prefetched
    finally:
        for prefetched in coming:
            prefetched.close()
