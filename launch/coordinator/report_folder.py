"""The folder that takes a job's reports (``--report-dir``). It may be full or on a file system that
answers nobody: no job ends or stands still by it."""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scalai.launch.patient_writer import PatientWriter
from scalai.store.atomic import replace_file

ANSWER_S = 2.0
"""How long a report is waited for; behind one that takes longer, none is until the folder answers
again."""


class ReportFolder:
    """Writes reports in a thread of its own.

    Args:
        folder: Where they go; made if it is not there.
        say: Takes log lines; any thread calls it.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._last = -1
        self._files = PatientWriter("reports", ANSWER_S, self._say_late, self._say_back)
        self._files.do(self._try)

    def write(self, number: int, report: Mapping[str, Any]) -> None:
        """Leave a report in a file of this number, or of the next one that no earlier run of the
        job has left there. It is there on return, unless the log says otherwise."""
        self._files.do(partial(self._write, number, _content(report)))

    def write_again(self, report: Mapping[str, Any]) -> None:
        """Leave a report in the place of the one that was written last."""
        self._files.do(partial(self._replace, _content(report)))

    def _say_late(self) -> None:
        self._say(
            f"event=report_late --report-dir {self._folder} has not answered for {ANSWER_S:.0f} s: "
            "the job goes on, and its reports are written once it does"
        )

    def _say_back(self, left_out: int) -> None:
        lost = f"; {left_out} reports are left out" if left_out else ""
        self._say(f"event=report_back --report-dir {self._folder} answers again{lost}")

    def _try(self) -> None:
        """Say early that nothing can be written there."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            self._say(
                f"event=report_failed --report-dir {self._folder} cannot be written ({error}): "
                "there will be no reports"
            )

    def _replace(self, content: bytes) -> None:
        try:
            if self._last >= 0:
                replace_file(self._path(self._last), content, is_durable=False)
        except OSError as error:
            self._say(f"event=report_failed {error}: the newest report is not amended")

    def _write(self, number: int, content: bytes) -> None:
        path = self._path(number := max(number, self._last + 1))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while path.exists():
                path = self._path(number := number + 1)
            self._last = number
            replace_file(path, content, is_durable=False)
        except OSError as error:
            self._say(f"event=report_failed path={path} {error}: the job goes on without it")

    def _path(self, number: int) -> Path:
        return self._folder / f"resize-{number:04d}.json"


def _content(report: Mapping[str, Any]) -> bytes:
    return (json.dumps(report, indent=1) + "\n").encode()
