"""What the rounds of a job have seen where script and framework meet, for the rounds behind a
change: a script of a later round runs again from its beginning, and is compared with it."""

from collections.abc import Mapping
from typing import Any

from scalai.core.jsonable import Json


class Record:
    """The record of one process; equal on all ranks.

    Attributes:
        uses_modes: Whether the script turns ``train()`` on and off, so that ``eval()`` says that it
            evaluates. A model of ``from_pretrained`` is in ``eval()``, and may be trained so.
    """

    def __init__(self) -> None:
        self.uses_modes = False

    def take(self) -> Json:
        return {"uses_modes": self.uses_modes}

    def put(self, saved: Mapping[str, Any]) -> None:
        self.uses_modes |= saved["uses_modes"]
