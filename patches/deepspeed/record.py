"""What the rounds of a job have seen where script and framework meet, for the rounds behind a
change: a script of a later round runs again from its beginning, and is compared with it.

Its data's part is kept by the clocks of its loaders, that of its checkpoints with them.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from scalai.core.jsonable import Json

_BY_RANK = ("--local_rank", "--local-rank")
_MOST_ARGUMENTS = 4096
"""Bytes of arguments that are kept as they are."""


class Record:
    """The record of one process; equal on all ranks.

    Attributes:
        uses_modes: Whether the script turns ``train()`` on and off, so that ``eval()`` says that it
            evaluates. A model of ``from_pretrained`` is in ``eval()``, and may be trained so.
        other_arguments: Arguments of the script that a person has changed since the last round.
    """

    def __init__(self) -> None:
        self.uses_modes = False
        self.other_arguments: tuple[str, ...] = ()

    def take(self) -> Json:
        return {"uses_modes": self.uses_modes, "arguments": _arguments()}

    def put(self, saved: Mapping[str, Any]) -> None:
        self.uses_modes |= saved["uses_modes"]
        then, now = saved["arguments"], _arguments()
        if then != now:
            self.other_arguments = tuple(sorted({*then} ^ {*now})) or ("their order",)


def _arguments() -> list[str]:
    given = [argument for argument in sys.argv[1:] if not argument.startswith(_BY_RANK)]
    text = json.dumps(given)
    return given if len(text) <= _MOST_ARGUMENTS else [hashlib.sha256(text.encode()).hexdigest()]
