"""Who has not answered within its deadline: whoever comes shortly after shares that.

Of those who wait together for the same server each would else wait as long once more, one behind
the other, and a mount would have no thread for anybody else.
"""

import time
from dataclasses import dataclass
from urllib.parse import urlsplit

SHARED_S = 1.0
"""How long after a failure others get it too, without a try of their own."""


@dataclass(slots=True)
class _Heard:
    at_s: float = float("-inf")
    failed_s: float = float("-inf")
    error: OSError | None = None


class Silences:
    """What is known of files and their servers. May be used by several threads.

    Attributes:
        is_over: Nobody shall be asked again.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._known: dict[str, _Heard] = {}

    def _of(self, url: str) -> tuple[_Heard, _Heard]:
        """Return what is known of a file, and of its server."""
        parts = urlsplit(url)
        server = f"{parts.scheme}://{parts.netloc}"
        return self._known.setdefault(url, _Heard()), self._known.setdefault(server, _Heard())

    def check(self, url: str) -> None:
        """Raise what has just failed there."""
        for heard in self._of(url):
            if heard.error is not None and time.monotonic() - heard.failed_s < SHARED_S:
                raise OSError(heard.error.errno, heard.error.strerror)

    def hear(self, url: str) -> None:
        """Note that there was an answer."""
        for heard in self._of(url):
            heard.at_s, heard.error = time.monotonic(), None

    def note(self, url: str, error: OSError, began_s: float) -> None:
        """Note a failure. It is of the server where nobody has had an answer since it began."""
        for heard in self._of(url):
            if heard.at_s < began_s:
                heard.failed_s, heard.error = time.monotonic(), error
