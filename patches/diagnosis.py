"""``python -m scalai.patches.diagnosis``: which frameworks would be hooked here, as JSON."""

import importlib.metadata
import importlib.util
import json
import os
from typing import Any

from scalai.core.errors import RefusedError
from scalai.patches.versions import ALLOW_UNKNOWN_VERSION, DEEPSPEED, MEGATRON

PACKAGES = (("megatron", MEGATRON), ("deepspeed", DEEPSPEED))
"""What ``scalai.patches.hooks`` looks for, and the versions that were tried."""


def diagnose() -> dict[str, Any]:
    """Return each framework's version and what is to be said of it; ``is_hooked``: it is there, and
    its version is not refused. Imports no framework."""
    found = {}
    is_allowed = os.environ.get(ALLOW_UNKNOWN_VERSION) == "1"
    for package, known in PACKAGES:
        if importlib.util.find_spec(package) is None:
            found[known.framework] = {"version": None, "is_hooked": False, "note": "not installed"}
            continue
        try:
            version = importlib.metadata.version(known.framework)
        except importlib.metadata.PackageNotFoundError:
            # A checkout on the path: its version is asked for when the script imports it.
            note = "a checkout; its version is checked when it is imported"
            found[known.framework] = {"version": "unknown", "is_hooked": True, "note": note}
            continue
        try:
            note = known.check(version, allow_unknown=is_allowed) or "tried"
            is_hooked = True
        except RefusedError as error:
            note, is_hooked = str(error), False
        found[known.framework] = {"version": version, "is_hooked": is_hooked, "note": note}
    return found


if __name__ == "__main__":
    print(json.dumps(diagnose()))
