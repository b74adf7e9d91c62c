"""``python -m scalai.patches.diagnosis [FOLDER]``: which frameworks would be hooked here, or in a
script that lies in a folder, as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from scalai.converters.megatron.rules import allows_untested, stated_release
from scalai.core.errors import RefusedError
from scalai.patches.versions import DEEPSPEED, MEGATRON

PACKAGES = (("megatron", MEGATRON), ("deepspeed", DEEPSPEED))
"""What ``scalai.patches.hooks`` looks for, and the versions that were tried."""


def diagnose() -> dict[str, Any]:
    """Return each framework's version and what is to be said of it; ``is_hooked``: it is there, and
    its version is not refused. Imports no framework."""
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
    """Return the version that Megatron-core's own files state: a checkout may lie beside the script
    or on the path, in front of what is installed."""
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
