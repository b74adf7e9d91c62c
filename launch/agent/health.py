"""The health check of a host: a command that a person gave, run beside the agent's loop when the
job asks for it."""

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
"""How long a command that was killed may take to end."""
KEPT_BYTES = 4096
"""Of what a command writes, the end is kept: its last line is logged."""
LINE = 200
"""Most characters of that line."""
LOOK_S = 0.1

log = logging.getLogger(__name__)


class HealthCheck:
    """Runs the command of a host, one check after the other.

    A command that has not ended in time is killed with its process group. One that cannot even be
    killed, because its driver does not answer, is left alone, and no other is started beside it.

    Args:
        command: Words of a shell, run without one; None: there is no check, and the host is
            healthy.
        timeout_s: How long the command may take.
        variables: What the command finds in its environment beside the agent's own.
    """

    def __init__(self, command: str | None, timeout_s: float, variables: Mapping[str, str]) -> None:
        self._words = shlex.split(command or "")
        self._timeout_s, self._variables = timeout_s, variables
        self._stuck: subprocess.Popen[bytes] | None = None
        """A command that was killed and has not ended."""

    def fault(self, reason: str) -> str | None:
        """Return the fault of this host, None where it is healthy or has no command. Blocks as long
        as ``run``; one thread at a time."""
        if not self._words:
            return None
        try:
            return self.run(reason)
        except Exception as error:  # our own slip: the job would wait for an answer for ever
            log.exception("event=error in a health check")
            return f"the check itself failed: {error!r}"

    def run(self, reason: str) -> str | None:
        """Return why this host is not healthy, None where it is. Blocks for the command's time and
        5 s at most."""
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
        except (OSError, ValueError) as error:  # it is not there, or a null byte is in it
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
        """Read what a command writes until it has ended or its time is over; whatever it has
        started may go on writing. Returns the last line."""
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
        """Leave nothing of a command."""
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
