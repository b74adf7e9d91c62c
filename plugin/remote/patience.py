"""How long somebody who is far away is asked again, and when that is no use."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from scalai.remote.silences import Silences

WITHIN_S = 60.0
"""How long what a read needs may take (``remote_timeout``), all tries together."""
TRIES_AT_LEAST = 2
"""A try ends in time for another one: what hangs on one connection may come by the next."""
PAUSE_S = 0.2
"""Between the first two tries; twice as long before each further one, up to ``LONGEST_PAUSE_S``."""
LONGEST_PAUSE_S = 5.0

log = logging.getLogger(__name__)

T = TypeVar("T")


class FinalError(OSError):
    """An error of which it is known that another try ends alike."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)


class ChangedError(FinalError):
    """The file is another one than when it was opened."""


_FINAL = (
    FinalError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError,
    NotImplementedError, ImportError, ValueError, TypeError,
)  # fmt: skip
_FINAL_NAMES = {"NoCredentialsError", "PartialCredentialsError"}
"""Of botocore, which is not always there."""


class Patience:
    """Asks until there is an answer, a deadline has passed, or the answer would be the same.

    Args:
        url: For messages.
        within_s: Seconds for all tries of one question.
        pause: Waits so many seconds between tries.
        clock: Returns seconds that only grow.
        silences: Shared by those who ask the same servers.
    """

    def __init__(
        self, url: str, within_s: float = WITHIN_S, pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic, silences: Silences | None = None,
    ) -> None:  # fmt: skip
        self._silences = silences or Silences()
        self._url, self.within_s, self._pause, self._clock = url, within_s, pause, clock

    def ask(self, what: str, call: Callable[[float], T]) -> T:
        """Return what ``call`` returns, which is given the seconds that it may take. Blocks.

        Args:
            what: Is done to the file (``read``), for messages.

        Raises:
            FileNotFoundError: It is not there. IsADirectoryError: It is a folder.
            ChangedError: It is another one.
            OSError: It cannot be had, and why.
        """
        self._silences.check(self._url)
        began_s = time.monotonic()
        end = self._clock() + self.within_s
        pause_s, tries = PAUSE_S, 0
        while True:
            tries += 1
            left_s = end - self._clock()
            try:
                found = call(max(min(left_s, self.within_s / TRIES_AT_LEAST), PAUSE_S))
                self._silences.hear(self._url)
                return found
            except Exception as error:  # each file system has its own
                self._raise_if_final(what, error)
                self._give_up_if(what, error, tries, end - self._clock() - pause_s, began_s)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _raise_if_final(self, what: str, error: Exception) -> None:
        why = _reason(error)
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(
                errno.ENOENT, f"{self._url} is not there (any more): {why}"
            ) from error
        if isinstance(error, ChangedError | IsADirectoryError):
            raise error
        if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
            raise OSError(errno.EIO, f"{self._url} cannot be {what}: {why}") from error

    def _give_up_if(
        self, what: str, error: Exception, tries: int, left_s: float, began_s: float
    ) -> None:
        why = _reason(error)
        if left_s <= 0 or self._silences.is_over:
            failure = OSError(
                errno.EIO,
                f"{self._url} cannot be {what} within {self.within_s:g} s ({tries} tries): {why}",
            )
            self._silences.note(self._url, failure, began_s)
            raise failure from error
        log.warning(
            "event=source_retry url=%s tries=%d left_s=%.0f: %s", self._url, tries, left_s, why
        )


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, FinalError) else str(error)
    return text or type(error).__name__
