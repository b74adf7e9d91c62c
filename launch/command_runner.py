"""Runs commands of a user or a driver, each with a deadline."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

TIMEOUT_S = 30.0
"""Seconds for a command: a driver that has lost a device may answer late, or never."""
END_S = 5.0
"""Seconds for a killed command to end."""
KEPT_BYTES = 1 << 16
"""Bytes kept from the end of a command's output."""
LINE = 200
"""Most characters of an output in a message."""
LOOK_S = 0.1


class NoAnswerError(Exception):
    """A command has no answer, with the reason."""


class CommandRunner:
    """Runs commands one after another, each with a deadline.

    A late command is killed with its process group. One that cannot be killed, because its driver
    hangs, is left alone, and blocks further commands.

    Args:
        timeout_s: Seconds for a command.
        end_s: Seconds for a killed command to end.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, end_s: float = END_S) -> None:
        self._timeout_s, self._end_s = timeout_s, end_s
        self.stuck: subprocess.Popen[bytes] | None = None
        """A killed command still running."""
        self._present: subprocess.Popen[bytes] | None = None

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        told: bytes = b"",
    ) -> tuple[int, str]:
        """Run a command; returns its exit code and the end of its output.

        Does not wait for processes it leaves behind; they may hold the output.

        Args:
            variables: Additions to the environment.
            told: Its standard input.

        Raises:
            NoAnswerError: It cannot be started, or does not end in time.
        """
        if self.stuck is not None and self.stuck.poll() is None:
            raise NoAnswerError(
                f"process {self.stuck.pid} of an earlier question was killed and has not ended"
            )
        self.stuck = None
        given = _input(told)  # a file: a command that reads nothing holds nobody up
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(variables or {})},
            )
        except (OSError, ValueError) as error:  # it is missing, or has a null byte
            raise NoAnswerError(
                f"{command[0]}: {getattr(error, 'strerror', None) or error}"
            ) from error
        finally:
            os.close(given)
        self._present = process
        output = _listen(process, time.monotonic() + self._timeout_s)
        self._present = None
        code = process.poll()
        with suppress(ProcessLookupError):  # nobody of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            try:
                process.wait(self._end_s)
            except subprocess.TimeoutExpired:
                self.stuck = process
        assert process.stdout is not None
        process.stdout.close()
        if code is None:
            text = f"{command[0]} gave no answer within {self._timeout_s:g} s"
            raise NoAnswerError(": ".join(filter(None, (text, last_line(output)))))
        return code, output

    def kill(self) -> None:
        """End the present command with its group, from another thread."""
        if (process := self._present) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _input(content: bytes) -> int:
    """A descriptor to read the content from."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def last_line(output: str) -> str:
    """The last line of an output, cut."""
    lines = output.strip().splitlines()
    return lines[-1].strip()[:LINE] if lines else ""


def _listen(process: "subprocess.Popen[bytes]", end: float) -> str:
    """Return the end of a command's output, once it has ended or its time is over."""
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
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    return kept.decode(errors="replace")
