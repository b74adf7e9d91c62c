"""Commands that tell of a host's devices, ``nvidia-smi`` first of all. A driver that has lost a
device may never answer: no command is waited for longer than it is given."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

TIMEOUT_S = 30.0
"""A driver that has lost a device may take long to answer, or never answer."""
NAME_S = 10.0
"""How long the driver may take to name a device: a job waits for it before it starts."""
END_S = 5.0
"""How long a command that was killed may take to end."""


_NAMED = re.compile(r"^[ \t]*\d+[ \t]*,[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


class NoAnswerError(Exception):
    """A command cannot say what it was asked; the message says why."""


class Commands:
    """Runs commands one after another, and leaves alone what hangs.

    Args:
        timeout_s: A command is killed after so long.
        end_s: One that was killed is waited for so long.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, end_s: float = END_S) -> None:
        self._timeout_s, self._end_s = timeout_s, end_s
        self.stuck: subprocess.Popen[str] | None = None
        """A command that was killed and has not ended."""

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Return the exit code of a command and all that it wrote.

        One that cannot even be killed, because its driver does not answer, is left alone, and no
        other is started beside it.

        Raises:
            NoAnswerError: It cannot be started, or does not end in time.
        """
        if self.stuck is not None and self.stuck.poll() is None:
            raise NoAnswerError(
                f"process {self.stuck.pid}, which was to ask before, was killed and has not ended"
            )
        self.stuck = None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswerError(f"{command[0]}: {error.strerror}") from error
        try:
            output, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            self._leave(process)
            text = f"{command[0]} gave no answer within {self._timeout_s:g} s"
            raise NoAnswerError(text) from None
        return process.returncode, output

    def query(self, fields: Sequence[str]) -> tuple[int, str]:
        """Return what ``nvidia-smi`` answers of each device: CSV without a header or units.

        Raises:
            NoAnswerError: As ``run``.
        """
        asked = f"--query-gpu={','.join(fields)}"
        return self.run(["nvidia-smi", asked, "--format=csv,noheader,nounits"])

    def _leave(self, process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # or what it started holds its output
            process.communicate(timeout=self._end_s)
        assert process.stdout is not None
        process.stdout.close()
        self.stuck = process


def driver_device(commands: Commands | None = None) -> str:
    """Return the name of this host's first device as its driver has it; blocks for 15 s at most.

    Raises:
        NoAnswerError: It names none; the message says why.
    """
    code, output = (commands or Commands(NAME_S)).query(["index", "name"])
    named = _NAMED.search(output)  # the dynamic linker may have written its warnings before
    if code or named is None:
        text = output.strip()[-200:]
        raise NoAnswerError(f"nvidia-smi names no device (exit code {code}): {text!r}")
    return named[1]
