"""Whether a folder that a person names can be written."""

import tempfile
from pathlib import Path


def obstacle(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, None where something can. Makes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error)
