"""Requests to the hub: which failures are tried again, how often, how long, and the message if the hub refuses.

A request is made again after 408, 429, 5xx, time-outs and dropped connections: six times in all, three if nobody answers. The
pauses are 1, 2, 4, 8 and 16 s, or those that the hub asks for (Retry-After, rate limits), together 330 s at most. Whatever else
the hub answers ends the request with one message.
"""

import threading
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from tracker.common.errors import CheckpointError, Unreachable
from tracker.common.text import counted, first_line

if TYPE_CHECKING:
    from huggingface_hub.utils import httpx

ATTEMPTS, ATTEMPTS_TO_CONNECT = 6, 3
FIRST_PAUSE = 1.0  # seconds
PATIENCE = 330.0  # seconds of pauses: the hub's rate limits last up to 300
TIMEOUT = 30.0  # seconds without a response or a byte
BUSY = (408, 429, 500, 502, 503, 504)

T = TypeVar("T")
Notify = Callable[[str], None]


class Attempts:
    """The attempts at one request; `notify` receives why each further one is made, and `stop` ends a pause."""

    def __init__(self, subject: str, notify: Notify, stop: threading.Event | None = None):
        self.subject, self.notify, self.stop = subject, notify, stop or threading.Event()
        self.restart()

    def restart(self) -> None:
        """Count from zero again, after progress."""
        self.failed, self.paused = 0, 0.0

    def wait_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt if the error is transient and attempts are left.

        Raises:
            Unreachable: if none is left, or `stop` is set.
            CheckpointError: why the hub refuses the request, if the error is not transient.
        """
        from huggingface_hub.utils import httpx

        response = getattr(error, "response", None)
        if not isinstance(error, httpx.TransportError) and (
            response is None or response.status_code not in BUSY
        ):
            raise _refusal(error, self.subject) from error
        self.failed += 1
        reason = (
            _status(response)
            if response is not None
            else f"{type(error).__name__}: {first_line(error)}"
        )
        attempts = (
            ATTEMPTS_TO_CONNECT
            if isinstance(error, (httpx.ConnectError, httpx.TimeoutException))
            else ATTEMPTS
        )
        asked = _requested_pause(response.headers) if response is not None else 0.0
        pause = asked if asked > 0 else FIRST_PAUSE * 2 ** (self.failed - 1)
        if self.failed >= attempts or self.paused + pause > PATIENCE:
            reason += f", {counted(self.failed, 'attempt')}"
            reason += (
                f"; it asks for a pause of {asked:,.0f} s: run the same command again later"
                if asked > 0
                else ""
            )
            raise Unreachable(
                f"can't get {self.subject}: the hub can't be reached ({reason})"
            ) from error
        self.notify(
            f"{self.subject}: {reason}; trying again in {pause:.0f} s ({self.failed} of {attempts - 1})"
        )
        self.paused += pause
        if self.stop.wait(pause):
            raise Unreachable(f"stopped while waiting for {self.subject}") from error


def with_retries(ask: Callable[[], T], subject: str, notify: Notify) -> T:
    """Call `ask`, a function of huggingface_hub, and again after transient errors.

    Raises:
        Unreachable, CheckpointError: as `wait_or_raise`, or if the answer can't be read.
    """
    from huggingface_hub import get_session
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    get_session().timeout = TIMEOUT  # by default the client waits for ever
    attempts = Attempts(subject, notify)
    while True:
        try:
            return ask()
        except OfflineModeIsEnabled as error:
            raise Unreachable(
                f"can't get {subject}: offline mode is on (HF_HUB_OFFLINE)"
            ) from error
        except httpx.HTTPError as error:
            attempts.wait_or_raise(error)
        # The client fails in any way at an answer that it does not expect
        except Exception as error:
            raise _unreadable(subject, error) from error


def _refusal(error: Exception, subject: str) -> CheckpointError:
    """Describe why the hub refuses a request, and what to do."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    response = getattr(error, "response", None)
    if response is None:  # such as redirects in circles
        return _unreadable(subject, error)
    no_repository = isinstance(error, RepositoryNotFoundError)
    if response.status_code == 404 and not no_repository:
        return CheckpointError(
            f"{subject} is no longer on the hub as it was listed: run the same command again"
        )
    if not no_repository and response.status_code not in (401, 403):
        return unexpected(subject, f"answers {_status(response)}")
    message = response.headers.get("X-Error-Message", "")[:200] or "no reason is given"
    token = "the token in use does not give access" if get_token() else "no token is in use"
    return CheckpointError(
        f"can't get {subject}: the hub answers {_status(response)} ({message}), and {token}. There is no such repository, or it "
        "is private or gated: check the name, accept the terms on its page, and log in with `hf auth login` (or HF_TOKEN)"
    )


def _unreadable(subject: str, error: Exception) -> Unreachable:
    return unexpected(
        subject, f"sends an answer that can't be read ({type(error).__name__}: {first_line(error)})"
    )


def unexpected(subject: str, answer: str) -> Unreachable:
    """Describe an answer that a hub does not give."""
    from huggingface_hub import constants

    remedy = (
        "run the same command again later, and if that does not help, check HF_ENDPOINT and proxies"
    )
    return Unreachable(f"can't get {subject}: {constants.ENDPOINT} {answer}; {remedy}")


def _status(response: "httpx.Response") -> str:
    return f"{response.status_code} {response.reason_phrase}".rstrip()


def _requested_pause(headers: Mapping[str, str]) -> float:
    """Return the seconds that a busy hub asks the client to wait; 0 or less if it states none that can be read."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1.0  # whole seconds, rounded down
    after = headers.get("retry-after", "")
    try:
        return (
            float(after)
            if after.isdecimal()
            else parsedate_to_datetime(after).timestamp() - time.time()
        )
    except (ValueError, TypeError, OverflowError):
        return 0.0
