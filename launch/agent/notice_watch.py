"""Asks each source of removal notices in its own thread; a hanging one delays neither others nor
the agent."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from scalai.core.errors import ScalaiError
from scalai.launch.agent.notices import LEAST_S, FileNotice, Notices, Question, question_of
from scalai.launch.config.elastic_config import NoticeSource

LONGEST_S = 60.0
"""Seconds; longest interval between questions, doubled after each failure."""

SILENT_S = 30.0
"""Seconds before a pending question is logged: a file system may hang forever."""

log = logging.getLogger(__name__)

Noticed = Callable[[str, float | None], None]
Withdrawn = Callable[[str], None]


class NoticeWatch:
    """Asks one source, and passes on notices.

    Args:
        source: The source.
        question: Its question.
        noticed, withdrawn: Callbacks for notices; repeated while they hold.
        interval_s: Seconds between questions.
    """

    def __init__(
        self,
        source: NoticeSource,
        question: Question,
        noticed: Noticed,
        withdrawn: Withdrawn,
        interval_s: float,
    ) -> None:
        self._source, self._question = source, question
        self._noticed, self._withdrawn, self._interval_s = noticed, withdrawn, interval_s
        self._known: frozenset[str] = frozenset()
        self._failures, self._problem = 0, ""
        self._asked_at: float | None = None
        self._is_said = False

    def look(self) -> float:
        """Ask once. Returns the seconds before the next question. A failure keeps known notices."""
        self._asked_at = time.monotonic()
        try:
            found = self._question.read()
        except Exception as error:  # also our own slip: else notices would stop
            self._failed(error)
            return min(self._interval_s * 2.0 ** min(self._failures, 10), LONGEST_S)
        finally:
            self._asked_at, self._is_said = None, False
        if self._failures:
            log.info("event=notice_source source=%s answers again", self._source)
        self._failures, self._problem = 0, ""
        self._tell(found)
        return self._interval_s

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        known = isinstance(error, (ScalaiError, OSError))
        problem = str(error) if known else repr(error)
        if self._failures == 1 or type(error).__name__ != self._problem:
            self._problem = type(error).__name__
            log.warning(
                "event=notice_source source=%s gives no answer: %s. It is asked again, each %.0f s "
                "at the latest; until then nobody hears of its notices.",
                self._source, problem, LONGEST_S,
            )  # fmt: skip

    def _tell(self, found: Notices) -> None:
        for name, left_s in found.items():
            if name not in self._known and isinstance(self._question, FileNotice):
                if self._question.problem:
                    log.warning("event=notice_unclear %s", self._question.problem)
            if name in self._known and left_s is not None and left_s <= LEAST_S:
                continue  # its time is over: a repeat postpones nothing
            self._noticed(name, left_s)
        for name in sorted(self._known - found.keys()):
            self._withdrawn(name)
        self._known = frozenset(found)

    def check(self, now: float) -> None:
        """Log once a question without an answer for long. Any thread may call it."""
        asked_at = self._asked_at
        if asked_at is None or self._is_said or now - asked_at < SILENT_S:
            return
        self._is_said = True
        log.warning(
            "event=notice_source source=%s hangs: no answer for %.0f s. Nobody hears of its "
            "notices until it answers.", self._source, now - asked_at,
        )  # fmt: skip

    def run(self) -> None:
        """Ask without end."""
        while True:
            time.sleep(self.look())


def watch(
    sources: Iterable[NoticeSource],
    noticed: Noticed,
    withdrawn: Withdrawn,
    interval_s: float,
    default_s: float,
) -> None:
    """Start to ask these sources, signals excluded, in threads that end with the process.

    ``default_s``: seconds left for a file without content.
    """
    asked: list[NoticeWatch] = []
    for source in sources:
        if source.kind == "signal":
            continue
        question = question_of(source, default_s)
        one = NoticeWatch(source, question, noticed, withdrawn, interval_s)
        asked.append(one)
        log.info("event=notice_source source=%s is asked each %.0f s", source, interval_s)
        threading.Thread(target=one.run, name=f"notice-{source.kind}", daemon=True).start()
    if asked:
        threading.Thread(target=_check, args=(asked,), name="notice-check", daemon=True).start()


def _check(asked: Iterable[NoticeWatch]) -> None:
    while True:
        time.sleep(SILENT_S / 3)
        for one in asked:
            one.check(time.monotonic())
