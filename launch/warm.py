"""What the fork server of later rounds imports, written down once the first workers have made a
step."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def write_preload(path: Path, modules: Sequence[str]) -> Path:
    """Write the order that ``scalai.patches.preload`` reads; return its path."""
    order = {"modules": list(modules), "sys_path": sys.path}
    path.write_text(json.dumps(order))
    return path
