"""Tested versions of the frameworks; run as ``python -m scalai.patches.versions [FOLDER]``, it
prints as JSON the frameworks to be hooked here, or in a script in a folder."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.megatron.rules import ALLOW_UNTESTED, allows_untested, stated_release
from scalai.core.errors import RefusedError
from scalai.core.release import numbers_of


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """Tested versions of a framework: all minor ones from ``oldest`` to ``newest``."""

    framework: str
    oldest: tuple[int, int]
    newest: tuple[int, int]

    def check(self, version: str, *, allow_untested: bool) -> str | None:
        """Accept a version, or say why not.

        Args:
            version: The framework's ``__version__``, such as ``0.16.1`` or ``0.19.0rc0``.
            allow_untested: True to accept an untested version.

        Returns:
            A warning for the log, or None for a known version.

        Raises:
            RefusedError: The version is unknown, and unknown ones are not allowed.
        """
        if self.oldest <= numbers_of(version)[:2] <= self.newest:
            return None
        known = f"{_dotted(self.oldest)} to {_dotted(self.newest)}"
        if allow_untested:
            return f"{self.framework} {version} was never tried, {known} were; going on as allowed"
        raise RefusedError(
            f"{self.framework} {version} was never tried; {known} were. Install one of them, or "
            f"set {ALLOW_UNTESTED}=1 to go on anyway: fingerprints still prove every move "
            "of the state, but other faults may stay unseen."
        )


# The names that the hooks and the adapters rely on are the same in all of them.
MEGATRON = KnownVersions("megatron-core", (0, 14), (0, 20))
DEEPSPEED = KnownVersions("deepspeed", (0, 16), (0, 19))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


PACKAGES = (("megatron", MEGATRON), ("deepspeed", DEEPSPEED))
"""Packages looked for by ``worker_start``, and their tested versions."""


def diagnose() -> dict[str, Any]:
    """Return each framework's version with a note; ``is_hooked``: it is installed, and its version
    not refused. Imports no framework."""
    found = {}
    is_allowed = allows_untested(os.environ)
    for package, known in PACKAGES:
        if importlib.util.find_spec(package) is None:
            found[known.framework] = {"version": None, "is_hooked": False, "note": "not installed"}
            continue
        version = _stated(package) or _installed(known.framework)
        if version is None:
            # A checkout on the path: its version is asked for when the script imports it.
            note = "a checkout; its version is checked when it is imported"
            found[known.framework] = {"version": "unknown", "is_hooked": True, "note": note}
            continue
        try:
            note = known.check(version, allow_untested=is_allowed) or "tried"
            is_hooked = True
        except RefusedError as error:
            note, is_hooked = str(error), False
        found[known.framework] = {"version": version, "is_hooked": is_hooked, "note": note}
    return found


def _installed(framework: str) -> str | None:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stated(package: str) -> str | None:
    """Return the version in Megatron-core's own files: a checkout beside the script or on the path
    precedes the installed one."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        stated = Path(folder, "core", "package_info.py")
        release = stated_release(stated) if package == "megatron" else None
        if release is not None:
            return ".".join(map(str, release))
    return None


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    print(json.dumps(diagnose()))
