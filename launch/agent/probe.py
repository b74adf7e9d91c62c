"""The number of working devices of this host, asked repeatedly by an agent."""

import re
from collections.abc import Sequence
from pathlib import Path

from scalai.launch.config.driver import Commands, NoAnswerError
from scalai.launch.config.elastic_config import ProbeConfig

_FIELDS = ("index", "uuid", "temperature.gpu", "remapped_rows.failure", "gpu_recovery_action")
_FEWER_FIELDS = _FIELDS[:3]
"""Fields of drivers without row remapping or recovery action."""


class DeviceProbe:
    """Asks for the number of working devices of this host.

    A device does not count if it fell off the bus, gives no readings, has run out of spare rows or
    waits for a reset. Past uncorrected errors are ignored: their count stays after the driver has
    replaced the row.
    """

    def __init__(
        self,
        config: ProbeConfig,
        visible: Sequence[str] | None = None,
        commands: Commands | None = None,
    ) -> None:
        """Set the question.

        Args:
            visible: Indices or UUIDs of the job's devices (CUDA_VISIBLE_DEVICES), for
                ``nvidia-smi`` only; None: all.
            commands: Runs commands; None: with the usual deadlines.
        """
        self._config = config
        self._visible = visible
        self._seen: set[str] = set()
        self._commands = commands or Commands()
        self.problem: str | None = None
        """Reason for the last ``read``'s None; None: it gave a number."""
        self.narrowed: str | None = None
        """Workers' CUDA_VISIBLE_DEVICES after a device failed: UUIDs of the working ones; None:
        unchanged."""

    def read(self) -> int | None:
        """Return the number of working devices; None: no answer (see ``problem``).

        No answer is not zero devices: callers should leave the job as it is. Blocks for up to 35 s.
        """
        self.problem = None
        try:
            match self._config.kind:
                case "none":
                    raise NoAnswerError("no probe is configured ([probe] kind = none)")
                case "command":
                    return self._ask_command(self._config.command or "")
                case "file":
                    return self._ask_file(Path(self._config.file or ""))
                case _:
                    return self._ask_driver()
        except NoAnswerError as error:
            self.problem = str(error)
            return None

    def _ask_command(self, command: str) -> int:
        code, output = self._commands.run(["/bin/sh", "-c", command])
        if code:
            raise NoAnswerError(f"probe {command!r} ended with {code}: {output.strip()[-200:]}")
        return _number(output, f"probe {command!r}")

    def _ask_file(self, path: Path) -> int:
        try:
            return _number(path.read_text(), f"probe file {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise NoAnswerError(f"probe file {path}: {error}") from error

    def _ask_driver(self) -> int:
        code, output = self._commands.query(_FIELDS)
        if code and "not a valid field" in output.lower():
            code, output = self._commands.query(_FEWER_FIELDS)
        devices = visible_devices(output, self._visible)
        working = [uuid for uuid, works in devices.items() if works]
        if not working and not self._seen:
            # A driver without devices under a job on CPUs: nothing was lost.
            raise NoAnswerError(f"nvidia-smi sees no working device: {output.strip()[-200:]}")
        self._seen.update(devices)
        if len(working) < len(self._seen) or self.narrowed is not None:
            self.narrowed = ",".join(working)
        return len(working)


def visible_devices(output: str, visible: Sequence[str] | None = None) -> dict[str, bool]:
    """Return whether each device works, by UUID, in the order of ``visible``, else of the answer.

    Args:
        output: nvidia-smi's answer: CSV, ``index, uuid, temperature, ...``. Other lines, such as
            messages about lost devices, are skipped.
        visible: Devices as in CUDA_VISIBLE_DEVICES; None: all.
    """
    lines = [[value.strip() for value in line.split(",")] for line in output.splitlines()]
    listed = {
        uuid: (index, _is_working(readings))
        for index, uuid, *readings in (line for line in lines if len(line) >= len(_FEWER_FIELDS))
        if uuid.startswith("GPU-")
    }
    if visible is None:
        return {uuid: works for uuid, (_, works) in listed.items()}
    return {
        uuid: works
        for name in visible
        for uuid, (index, works) in listed.items()
        if _names(name, index, uuid)
    }


def _is_working(readings: Sequence[str]) -> bool:
    temperature, *health = readings
    has_failed_rows = bool(health) and health[0].lower() == "yes"
    action = health[1].lower() if len(health) > 1 else "none"
    # "[N/A]": the device or the driver lacks it.
    waits = action != "none" and not action.startswith("[") and not action.startswith("drain p2p")
    return temperature.isdecimal() and not has_failed_rows and not waits


def _names(name: str, index: str, uuid: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES means this device: its index or its UUID's start."""
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


def _number(text: str, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*", text)
    if match is None:
        raise NoAnswerError(f"{where} says {text.strip()[:80]!r}, which is not a number of devices")
    return int(match[1])
