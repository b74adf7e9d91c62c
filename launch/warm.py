"""What the fork server of later rounds imports, written down once the first workers have made a
step."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

OWN_MODULES = ("scalai.launch.run", "scalai.patches.worker")
"""What every forked process needs besides: multiprocessing imports the agent's main module."""


def write_preload(path: Path, modules: Sequence[str]) -> Path:
    """Write the order that ``scalai.patches.preload`` reads; return its path."""
    order = {"modules": [*modules, *OWN_MODULES], "sys_path": sys.path}
    path.write_text(json.dumps(order))
    return path
