"""What the fork server of later rounds imports, written down once the first workers have made a
step."""

import json
from pathlib import Path

from scalai.core.worker_messages import Imports
from scalai.store.secure import Folder

OWN_MODULES = ("scalai.launch.torch_elastic", "scalai.patches.worker")
"""What every forked process needs besides: where it begins, and what it runs."""


def write_preload(path: Path, imports: Imports) -> Path:
    """Write the order that ``scalai.patches.preload`` reads; return its path.

    Args:
        imports: What a worker has imported.

    Raises:
        StoreError: It cannot be written.
    """
    order = {"modules": [*imports.modules, *OWN_MODULES], "sys_path": imports.sys_path}
    with Folder.open(path.parent) as folder:
        folder.write(path.name, json.dumps(order).encode())
    return path
