"""Ends a test that its own time limit cannot end: no signal reaches a process that waits inside the
kernel for a file system that answers nobody, and the run would wait with it."""

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_S = 60.0
"""How long after a test's time limit its process is ended."""


class LastResort:
    """The plugin of pytest that ends the process of such a test, with the stacks of its threads.
    Where several processes run tests (``pytest -n``), the test has failed and the run goes on.

    A fork of such a process has to end by ``os._exit``, as those of multiprocessing do: Python
    would wait at its end for the thread that watches, which a fork has not.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._errors = os.dup(sys.stderr.fileno())
        self._ends_at: float | None = None

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        self._ends_at = time.monotonic() + settings.timeout + self._patience_s
        self._watch()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        # Pytest and its time limit give up here: a debugger may begin. The teardown may yet hang.
        self._watch()

    def _watch(self) -> None:
        if self._ends_at is not None:
            left_s = max(0.1, self._ends_at - time.monotonic())
            faulthandler.dump_traceback_later(left_s, exit=True, file=self._errors)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self.pytest_enter_pdb()

    def pytest_enter_pdb(self) -> None:
        """Watch no longer."""
        self._ends_at = None
        faulthandler.cancel_dump_traceback_later()
