"""How many devices of this host work: a question that an agent asks again and again."""

import re
from collections.abc import Sequence
from pathlib import Path

from scalai.launch.config.driver import Commands, NoAnswerError
from scalai.launch.config.elastic_config import ProbeConfig

_FIELDS = ("index", "uuid", "temperature.gpu", "remapped_rows.failure", "gpu_recovery_action")
_FEWER_FIELDS = _FIELDS[:3]
"""What drivers know that have no row remapping or no recovery action."""


class DeviceProbe:
    """Asks for the number of working devices of this host.

    A device that fell off the bus, gives no readings, has run out of spare rows or waits for a
    reset does not count. A count of past uncorrected errors says nothing: it stays after the driver
    has replaced the row, so it is not looked at.
    """

    def __init__(
        self,
        config: ProbeConfig,
        visible: Sequence[str] | None = None,
        commands: Commands | None = None,
    ) -> None:
        """Take over what to ask.

        Args:
            visible: Indices or UUIDs of the devices that the job may use (CUDA_VISIBLE_DEVICES);
                None: all. Only ``nvidia-smi`` is narrowed by it.
            commands: What runs commands; None: with the usual deadlines.
        """
        self._config = config
        self._visible = visible
        self._seen: set[str] = set()
        self._commands = commands or Commands()
        self.problem: str | None = None
        """Why the last ``read`` gave None; None where it gave a number."""
        self.narrowed: str | None = None
        """What CUDA_VISIBLE_DEVICES has to be for workers, so that they take the devices that work:
        their UUIDs, once one has not worked; None: as it is."""

    def read(self) -> int | None:
        """Return the number of working devices, or None where there is no answer (see ``problem``).

        No answer is not zero devices: whoever asks should leave the job as it is. Blocks for up to
        35 s.
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
        output: nvidia-smi's answer: CSV, ``index, uuid, temperature, ...``. Lines that are no
            device, as messages about lost ones, are left out.
        visible: As CUDA_VISIBLE_DEVICES names devices; None: all are.
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
    # "[N/A]" where the device or the driver has no such thing.
    waits = action != "none" and not action.startswith("[") and not action.startswith("drain p2p")
    return temperature.isdecimal() and not has_failed_rows and not waits


def _names(name: str, index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES means this device: by its index or the start of its UUID."""
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


def _number(text: str, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*", text)
    if match is None:
        raise NoAnswerError(f"{where} says {text.strip()[:80]!r}, which is not a number of devices")
    return int(match[1])
