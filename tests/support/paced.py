"""``paced.py SECONDS SCRIPT ARGUMENTS``: a training script with passes that cost a device so many
seconds more each. A step's time follows from the devices then, on a busy machine too."""

import runpy
import sys
import time
from typing import Any

from torch import nn

MODELS = ("GPTModel", "Gpt")
"""Models of the examples."""
_EACH_S = float(sys.argv[1])


def _compute(module: nn.Module, given: tuple[Any, ...]) -> None:
    if type(module).__name__ in MODELS:
        time.sleep(_EACH_S)


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    nn.modules.module.register_module_forward_pre_hook(_compute)
    runpy.run_path(sys.argv[0], run_name="__main__")
