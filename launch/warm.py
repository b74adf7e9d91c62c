"""What the fork server of later rounds imports, written down once the first workers have made a
step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

OWN_MODULES = ("scalai.launch.run", "scalai.patches.worker")
"""What every forked process needs besides: multiprocessing imports the agent's main module."""


def write_preload(path: Path, imports: Mapping[str, Sequence[str]]) -> Path:
    """Write the order that ``scalai.patches.preload`` reads; return its path.

    Args:
        imports: The ``modules`` that a worker has imported, and its ``sys_path``.
    """
    order = {"modules": [*imports["modules"], *OWN_MODULES], "sys_path": imports["sys_path"]}
    path.write_text(json.dumps(order))
    return path
