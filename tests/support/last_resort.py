"""Ends a test that its own time limit cannot end: no signal reaches a process that waits inside the
kernel for a file system that answers nobody, and the run would wait with it."""

import faulthandler
import os
import sys
from typing import Any

import pytest

PATIENCE_S = 60.0
"""How long after a test's time limit its process is ended."""


class LastResort:
    """The plugin of pytest that ends the process of such a test, with the stacks of its threads.
    Where several processes run tests (``pytest -n``), the test has failed and the run goes on."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._errors = os.dup(sys.stderr.fileno())

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        faulthandler.dump_traceback_later(
            settings.timeout + self._patience_s, exit=True, file=self._errors
        )

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self) -> None:
        faulthandler.cancel_dump_traceback_later()
