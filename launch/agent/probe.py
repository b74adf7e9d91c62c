"""How many devices of this host work: a question that an agent asks again and again."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scalai.launch.config.elastic_config import ProbeConfig

TIMEOUT_S = 30.0
"""A driver that has lost a device may take long to answer, or never answer."""
END_S = 5.0
"""How long a command that was killed may take to end."""

_FIELDS = ("index", "uuid", "temperature.gpu", "remapped_rows.failure", "gpu_recovery_action")
_FEWER_FIELDS = _FIELDS[:3]
"""What drivers know that have no row remapping or no recovery action."""


class DeviceProbe:
    """Asks for the number of working devices of this host.

    A device that fell off the bus, gives no readings, has run out of spare rows or waits for a
    reset does not count. A count of past uncorrected errors says nothing: it stays after the driver
    has replaced the row, so it is not looked at.
    """

    def __init__(self, config: ProbeConfig, visible: Sequence[str] | None = None) -> None:
        """Take over what to ask.

        Args:
            visible: Indices or UUIDs of the devices that the job may use (CUDA_VISIBLE_DEVICES);
                None: all. Only ``nvidia-smi`` is narrowed by it.
        """
        self._config = config
        self._visible = visible
        self._has_seen_devices = False
        self._stuck: subprocess.Popen[str] | None = None
        """A command that was killed and has not ended."""
        self.problem: str | None = None
        """Why the last ``read`` gave None; None where it gave a number."""

    def read(self) -> int | None:
        """Return the number of working devices, or None where there is no answer (see ``problem``).

        No answer is not zero devices: whoever asks should leave the job as it is. Blocks for up to
        30 s.
        """
        self.problem = None
        try:
            match self._config.kind:
                case "none":
                    raise _NoAnswerError("no probe is configured ([probe] kind = none)")
                case "command":
                    return self._ask_command(self._config.command or "")
                case "file":
                    return self._ask_file(Path(self._config.file or ""))
                case _:
                    return self._ask_driver()
        except _NoAnswerError as error:
            self.problem = str(error)
            return None

    def _ask_command(self, command: str) -> int:
        code, output = self._run(["/bin/sh", "-c", command])
        if code:
            raise _NoAnswerError(f"probe {command!r} ended with {code}: {output.strip()[-200:]}")
        return _number(output, f"probe {command!r}")

    def _ask_file(self, path: Path) -> int:
        try:
            return _number(path.read_text(), f"probe file {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise _NoAnswerError(f"probe file {path}: {error}") from error

    def _ask_driver(self) -> int:
        code, output = self._query(_FIELDS)
        if code and "not a valid field" in output.lower():
            code, output = self._query(_FEWER_FIELDS)
        count = count_working(output, self._visible)
        if count:
            self._has_seen_devices = True
        elif not self._has_seen_devices:
            # A driver without devices under a job on CPUs: nothing was lost.
            raise _NoAnswerError(f"nvidia-smi sees no working device: {output.strip()[-200:]}")
        return count

    def _query(self, names: Sequence[str]) -> tuple[int, str]:
        fields = f"--query-gpu={','.join(names)}"
        return self._run(["nvidia-smi", fields, "--format=csv,noheader,nounits"])

    def _run(self, command: Sequence[str]) -> tuple[int, str]:
        """Return the exit code of a command and all that it wrote; it ends after 30 s at most.

        One that cannot even be killed, because its driver does not answer, is left alone, and no
        other is started beside it.
        """
        if self._stuck is not None and self._stuck.poll() is None:
            raise _NoAnswerError(
                f"process {self._stuck.pid}, which was to ask before, was killed and has not ended"
            )
        self._stuck = None
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
            raise _NoAnswerError(f"{command[0]}: {error.strerror}") from error
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # or what it started holds its output
                process.communicate(timeout=END_S)
            assert process.stdout is not None
            process.stdout.close()
            self._stuck = process
            text = f"{command[0]} gave no answer within {TIMEOUT_S:.0f} s"
            raise _NoAnswerError(text) from None
        return process.returncode, output


def count_working(output: str, visible: Sequence[str] | None = None) -> int:
    """Count the devices in nvidia-smi's answer: CSV, ``index, uuid, temperature, ...``.

    Lines that are not a device (messages about lost ones) do not count, nor do devices whose
    readings are errors.
    """
    return sum(_is_working(line.split(","), visible) for line in output.splitlines())


def _is_working(line: Sequence[str], visible: Sequence[str] | None) -> bool:
    values = [value.strip() for value in line]
    if len(values) < len(_FEWER_FIELDS) or not values[1].startswith("GPU-"):
        return False
    index, uuid, temperature, *health = values
    if visible is not None and not any(_names(name, index, uuid) for name in visible):
        return False
    has_failed_rows = bool(health) and health[0].lower() == "yes"
    action = health[1].lower() if len(health) > 1 else "none"
    # "[N/A]" where the device or the driver has no such thing.
    waits = action != "none" and not action.startswith("[") and not action.startswith("drain p2p")
    return temperature.isdecimal() and not has_failed_rows and not waits


def _names(name: str, index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES means this device: by its index or the start of its UUID."""
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


class _NoAnswerError(Exception):
    """The probe cannot say how many devices there are; the message says why."""


def _number(text: str, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*", text)
    if match is None:
        raise _NoAnswerError(
            f"{where} says {text.strip()[:80]!r}, which is not a number of devices"
        )
    return int(match[1])
