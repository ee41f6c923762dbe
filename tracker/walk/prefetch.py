"""Checkpoints one after another, each fetched while the one before it is measured, and none by two walks at once."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path

from checkpoints.disk import missing_files
from checkpoints.fetch import fetch
from checkpoints.files import Lock
from checkpoints.hub import CheckpointError, repo_dir
from checkpoints.suites import Checkpoint
from tracker.walk.plan import Plan
from tracker.walk.progress import Progress

WAIT = 0.5  # seconds between looks at what other walks do


class Prefetched:
    """A checkpoint that is ours to measure, on its way: its own thread fetches it.

    The thread is a daemon, so that a stalled connection does not hold up an exit; what it leaves behind is taken up again.
    """

    def __init__(self, plan: Plan, checkpoint: Checkpoint, claim: Lock, upcoming: Sequence[str], shown: Progress):
        self.plan, self.checkpoint, self.claim, self.upcoming, self.shown = plan, checkpoint, claim, upcoming, shown
        self.use: Lock | None = None
        self.stop = threading.Event()
        self.arrival: Future[Path] = Future()
        threading.Thread(target=self._fetch, daemon=True).start()

    def directory(self) -> Path:
        """Where the checkpoint is, once it has been fetched.

        Raises:
            CheckpointError: if it can't be had.
        """
        return self.arrival.result()

    def close(self) -> None:
        """Give up or finish the checkpoint: others may measure or evict it."""
        self.stop.set()
        self.claim.release(remove=True)
        if self.use is not None and self.arrival.done():
            self.use.release()

    def _fetch(self) -> None:
        try:
            self.arrival.set_result(self._directory())
        except BaseException as error:  # raised again where the checkpoint is waited for
            self.arrival.set_exception(error)

    def _directory(self) -> Path:
        plan, checkpoint = self.plan, self.checkpoint
        if checkpoint.revision is None:
            return Path(checkpoint.source)
        if not plan.suite.on_hub:
            return plan.cached(checkpoint)
        repo, revision, cache_dir = checkpoint.source, checkpoint.revision, plan.suite.cache_dir
        listing = plan.listings.get(revision)
        if listing is None:
            if plan.offline:
                raise CheckpointError(f"{plan.offline}, and {repo} at {revision} is not in the cache {plan.disk.cache}")
            raise CheckpointError(f"{repo} has no revision {revision}; see its branches on the hub")
        if plan.offline:
            return fetch(repo, revision, listing, cache_dir, offline=plan.offline)
        while (use := plan.disk.try_reserve(repo, listing, self.upcoming)) is None:
            if self.stop.wait(WAIT):
                raise CheckpointError(f"stopped before {revision} was fetched")
        self.use = use
        lacking = missing_files(repo_dir(repo, cache_dir) / "snapshots" / listing.commit, listing)
        if not lacking:
            return fetch(repo, revision, listing, cache_dir)
        count = self.shown.downloading(revision, sum(file.size for file in lacking))
        return fetch(repo, revision, listing, cache_dir, notify=self.shown.notify, count=count, stop=self.stop)


def prefetch(
    plan: Plan, checkpoints: Sequence[Checkpoint], shown: Progress, done_elsewhere: Callable[[int], None]
) -> Generator[Prefetched]:
    """Each checkpoint, claimed, fetched or failed to be, while the next is on its way.

    Checkpoints that another walk is measuring come last: once their unit is there `done_elsewhere` is told, and if that
    walk ends without one, however it ends, the checkpoint is delivered here.
    """
    pending, coming = deque(checkpoints), deque[Prefetched]()
    waited_for: set[int] = set()

    def begin() -> bool:
        """Claim the next free checkpoint, if there is one, and let it come."""
        for _ in range(len(pending)):
            checkpoint = pending.popleft()
            claim = plan.store.claim(checkpoint.step)
            if claim is None:
                pending.append(checkpoint)
                continue
            if plan.store.has(checkpoint.step):
                claim.release(remove=True)
                done_elsewhere(checkpoint.step)
                continue
            upcoming = [plan.listings[c.name].commit for c in pending if c.name in plan.listings]
            coming.append(Prefetched(plan, checkpoint, claim, upcoming, shown))
            return True
        return False

    try:
        while pending or coming:
            if not coming and not begin():
                for checkpoint in pending:
                    if checkpoint.step not in waited_for:
                        waited_for.add(checkpoint.step)
                        shown.notify(
                            f"step {checkpoint.step}: measured by {plan.store.claimant(checkpoint.step)}; waiting for it"
                        )
                time.sleep(WAIT)
                continue
            coming[0].arrival.exception()  # waits
            begin()
            prefetched = coming.popleft()
            try:
                yield prefetched
            finally:
                prefetched.close()
    finally:
        for prefetched in coming:
            prefetched.close()
