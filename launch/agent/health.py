"""A host's health check: a user's command, run beside the agent's loop at the job's request."""

import logging
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

END_S = 5.0
"""Seconds for a killed command to end."""
KEPT_BYTES = 4096
"""Bytes kept from the end of a command's output; its last line is logged."""
LINE = 200
"""Most characters of that line."""
LOOK_S = 0.1

log = logging.getLogger(__name__)


class HealthCheck:
    """Runs the command of a host, one check after the other.

    A late command is killed with its process group. One that cannot be killed, because its driver
    hangs, is left alone, and blocks further checks.

    Args:
        command: Words of a shell, run without one; None: no check, the host is healthy.
        timeout_s: Seconds for the command.
        variables: Additions to the agent's environment for the command.
    """

    def __init__(self, command: str | None, timeout_s: float, variables: Mapping[str, str]) -> None:
        self._words = shlex.split(command or "")
        self._timeout_s, self._variables = timeout_s, variables
        self._stuck: subprocess.Popen[bytes] | None = None
        """A killed command still running."""

    def fault(self, reason: str) -> str | None:
        """Return the fault of this host; None: healthy, or no command. Blocks like ``run``; one
        thread at a time."""
        if not self._words:
            return None
        try:
            return self.run(reason)
        except Exception as error:  # our own slip: else the job waits forever for an answer
            log.exception("event=error in a health check")
            return f"the check itself failed: {error!r}"

    def run(self, reason: str) -> str | None:
        """Return the reason this host is unhealthy; None: healthy. Blocks for the command's time
        plus 5 s at most."""
        if self._stuck is not None and self._stuck.poll() is None:
            return f"process {self._stuck.pid} of an earlier check was killed and has not ended"
        self._stuck, began = None, time.monotonic()
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._variables, "SCALAI_REASON": reason},
            )
        except (OSError, ValueError) as error:  # it is missing, or has a null byte
            return f"{self._words[0]}: {getattr(error, 'strerror', None) or error}"
        line = self._listen(process, began + self._timeout_s)
        code = process.poll()
        self._end(process, is_late=code is None)
        fault = None if code == 0 else f"{self._words[0]} {_ending(code, self._timeout_s)}"
        took_s = time.monotonic() - began
        level = logging.INFO if fault is None else logging.WARNING
        log.log(
            level, "event=health_check is_healthy=%s took_s=%.1f reason=%r output=%r",
            fault is None, took_s, reason, line,
        )  # fmt: skip
        return fault if fault is None or not line else f"{fault}: {line}"

    @staticmethod
    def _listen(process: "subprocess.Popen[bytes]", end: float) -> str:
        """Return a command's last line of output, at its end or after its time; its children may
        write on."""
        assert process.stdout is not None
        descriptor, kept, is_open = process.stdout.fileno(), b"", True
        os.set_blocking(descriptor, False)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while time.monotonic() < end:
            has_ended = process.poll() is not None
            if is_open and poll.poll(0 if has_ended else LOOK_S * 1000):
                read = os.read(descriptor, 1 << 16)
                kept, is_open = (kept + read)[-KEPT_BYTES:], bool(read)
            elif has_ended:
                break
            elif not is_open:
                time.sleep(LOOK_S)
            if has_ended and not is_open:
                break
        lines = kept.decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:LINE] if lines else ""

    def _end(self, process: "subprocess.Popen[bytes]", *, is_late: bool) -> None:
        with suppress(ProcessLookupError):  # nobody of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        if is_late:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._stuck = process
        assert process.stdout is not None
        process.stdout.close()


def _ending(code: int | None, timeout_s: float) -> str:
    if code is None:
        return f"gave no answer within {timeout_s:.0f} s"
    if code < 0:
        return f"was killed by signal {-code}"
    return f"ended with {code}"
