"""Requests to the hub: which failures are tried again, for how long, and what is said when the hub refuses.

After 408, 429, 5xx, time-outs and dropped connections a request is made again, up to a number of attempts and a total waiting
time, with a message for each. Whatever else the hub answers ends the request with one sentence that states what to do.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from tracker.common.errors import CheckpointError, Unreachable
from tracker.common.text import counted, first_line

if TYPE_CHECKING:
    from huggingface_hub.utils import httpx

ATTEMPTS = 6
ATTEMPTS_TO_CONNECT = 3  # without a network each fails at once; a silent hub takes TIMEOUT for each
LONGEST_WAIT = 60.0  # seconds between attempts, unless the hub asks for more
PATIENCE = 330.0  # seconds of waiting for one request in all: the hub's rate limits last up to 300
YEARS = 1e8  # seconds of a pause that is not worth stating
TIMEOUT = 30.0  # seconds without a response or a byte
SLOWEST, WINDOW = 1000, 60.0  # bytes a second, over so many seconds, below which a download has stalled
BUSY = (408, 429, 500, 502, 503, 504)

T = TypeVar("T")
Notify = Callable[[str], None]


class Attempts:
    """The attempts at one request.

    Args:
        what: what is requested, for messages.
        notify: receives the reason and the waiting time of each further attempt.
        stop: an event that another thread sets to end the waiting.
    """

    def __init__(self, what: str, notify: Notify = print, stop: threading.Event | None = None):
        self.what, self.notify, self.stop = what, notify, stop or threading.Event()
        self.restart()

    def restart(self) -> None:
        """Count from zero again, after progress."""
        self.failed, self.waited, self.asked_too_much = 0, 0.0, ""

    def wait_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt if the error is transient and attempts are left.

        Raises:
            Unreachable: if none is left, or `stop` is set.
            CheckpointError: why the hub refuses the request, if the error is not transient.
        """
        from huggingface_hub.utils import httpx

        response = getattr(error, "response", None)
        if not isinstance(error, httpx.TransportError) and (response is None or response.status_code not in BUSY):
            raise _refusal(error, self.what) from error
        self.failed += 1
        reason = _status(response) if response is not None else f"{type(error).__name__}: {first_line(error)}"
        attempts = ATTEMPTS_TO_CONNECT if isinstance(error, (httpx.ConnectError, httpx.TimeoutException)) else ATTEMPTS
        if self.asked_too_much or self.failed >= attempts or self.waited >= PATIENCE:
            made = f"{counted(self.failed, 'attempt')}{self.asked_too_much}"
            raise Unreachable(f"can't get {self.what}: the hub can't be reached ({reason}, {made})") from error
        asked = _retry_after(response.headers) if response is not None else 0.0
        wait = asked or min(LONGEST_WAIT, 2.0 ** (self.failed - 1))
        attempt = f"({self.failed} of {attempts - 1})"
        if asked > PATIENCE - self.waited:
            wait = min(LONGEST_WAIT, PATIENCE - self.waited)
            pause = f"{asked:,.0f} s" if asked < YEARS else "years"
            self.asked_too_much = f"; it asks for a pause of {pause}: run the same command again later"
            reason += f"; the hub asks for a pause of {pause}, and this program waits at most {PATIENCE:.0f} s"
            attempt = "instead, for the last time; if that fails too, run the same command again later"
        self.notify(f"{self.what}: {reason}; trying again in {wait:.0f} s {attempt}")
        self.waited += wait
        if self.stop.wait(wait):
            raise Unreachable(f"stopped while waiting for {self.what}") from error


def with_retries(ask: Callable[[], T], what: str, notify: Notify = print, stop: threading.Event | None = None) -> T:
    """Call `ask`, and again after transient errors.

    Args:
        ask: a function of huggingface_hub, which reads the hub's answer.
        what: what is requested, for messages.

    Raises:
        Unreachable: if all attempts fail, with the last reason, or if the answer can't be read.
        CheckpointError: why the hub refuses, and what to do.
        OSError: of the cache.
    """
    from huggingface_hub import get_session
    from huggingface_hub.errors import FileMetadataError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    get_session().timeout = TIMEOUT  # by default the client waits for ever
    attempts = Attempts(what, notify, stop)
    while True:
        try:
            return ask()
        except CheckpointError:
            raise
        except OfflineModeIsEnabled as error:
            raise Unreachable(f"can't get {what}: offline mode is on (HF_HUB_OFFLINE)") from error
        except httpx.HTTPError as error:
            attempts.wait_or_raise(error)
        except FileMetadataError as error:
            raise _unexpected(what, f"sends a file without the hub's headers ({first_line(error)})") from error
        except OSError:
            raise
        except Exception as error:  # the client fails in any way at an answer that it does not expect
            raise _unreadable(what, error) from error


def require_content(response: "httpx.Response", what: str) -> None:
    """Check the status of the answer to a request for a file.

    Raises:
        HTTPError: of the client, for errors of HTTP.
        Unreachable: for a success without content, such as 204, and for headers that the client can't read.
    """
    from huggingface_hub.utils import hf_raise_for_status, httpx

    try:
        hf_raise_for_status(response)
    except httpx.HTTPError:
        raise
    except ValueError as error:
        raise _unreadable(what, error) from error
    if response.status_code not in (200, 206):
        raise _unexpected(what, f"answers {_status(response)}")


def _refusal(error: Exception, what: str) -> CheckpointError:
    """Describe why the hub refuses a request, and what to do."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import httpx

    if isinstance(error, httpx.TooManyRedirects):
        return _unexpected(what, "redirects the request without end")
    response = getattr(error, "response", None)
    if response is None:
        return _unreadable(what, error)
    log_in = "log in with `hf auth login` (or HF_TOKEN) as a user who may read it"
    token = "the token in use does not give access" if get_token() else "no token is in use"
    said = f" ({message[:200]})" if (message := response.headers.get("X-Error-Message")) else ""
    if isinstance(error, GatedRepoError):
        reason = f"the model is gated, and {token}: accept its terms on its page on the hub, and {log_in}"
    elif isinstance(error, RepositoryNotFoundError):
        reason = f"the hub has no such repository, or it is private or gated and {token}: check the name, or {log_in}"
    elif response.status_code == 404:
        return CheckpointError(
            f"{what} is no longer on the hub as it was listed: the branch has changed; run the same command again"
        )
    elif response.status_code == 401:
        reason = f"the hub asks for a token (401 Unauthorized{said}), and {token}: {log_in}"
    elif response.status_code == 403:
        reason = (
            f"the hub forbids it (403 Forbidden{said}), and {token}: if the repository is private or gated, {log_in}; else the "
            "hub or a proxy has blocked it"
        )
    else:
        return _unexpected(what, f"answers {_status(response)}{said}")
    return CheckpointError(f"can't get {what}: {reason}")


def _unreadable(what: str, error: Exception) -> Unreachable:
    return _unexpected(what, f"sends an answer that can't be read ({type(error).__name__}: {first_line(error)})")


def _unexpected(what: str, answer: str) -> Unreachable:
    """Describe an answer that a hub does not give."""
    from huggingface_hub import constants

    return Unreachable(
        f"can't get {what}: {constants.ENDPOINT} {answer}; run the same command again later, and if that does not help, "
        "check HF_ENDPOINT and proxies"
    )


def _status(response: "httpx.Response") -> str:
    return f"{response.status_code} {response.reason_phrase}".rstrip()


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a busy hub asks the client to wait; 0 if it states none that can be read."""
    from huggingface_hub.utils import parse_ratelimit_headers

    try:
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0:
            return limit.reset_in_seconds + 1.0  # whole seconds, rounded down
    except ValueError:  # more digits than Python converts
        pass
    after = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]+", after):
        return float(after[:12])  # a float of more digits is no time
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
