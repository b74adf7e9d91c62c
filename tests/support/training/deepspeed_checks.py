"""What a job of DeepSpeed must show after it was loaded from a converted checkpoint."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import Values
from scalai.converters.consistency import verify
from scalai.converters.engine import Limits
from scalai.converters.layouts import open_checkpoint
from support.checkpoints import carry, open_in_order
from support.training.deepspeed_jobs import SAVED_AFTER, STEPS

LIMITS = Limits(memory_bytes=256 << 20, workers=1)
FP32 = 1e-6
HALF = 1e-3
"""Of losses after the first: gradients are rounded to 16 bits and summed in another order at
another degree. Measured: up to 3.3e-4 in bf16, 1.1e-4 in fp16."""


def cases(short: Sequence[Sequence[Any]], long: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the parameters of a test from (name, values ...); the long ones take turns in the
    campaign."""
    marks = [pytest.mark.campaign, pytest.mark.turns]
    marked = [pytest.param(*values, id=name, marks=marks) for name, *values in long]
    return [*(pytest.param(*values, id=name) for name, *values in short), *marked]


def convert(
    source: Path, destination: Path, layout: str, dp: int, reference: Values | None = None,
    **degrees: int,
) -> None:  # fmt: skip
    """Convert a checkpoint; see that the tensors are the same."""
    checkpoint = open_in_order(source)
    options: dict[str, Any] = {"dp": dp, "reference": reference, **degrees}
    carry(checkpoint, destination, layout, limits=LIMITS, **options)
    assert verify(checkpoint, 1) == verify(open_checkpoint(destination), 1)


def check(
    before: Any, after: Any, tolerance: float, *,
    has_module: bool = True, has_same_forward: bool = True,
) -> None:  # fmt: skip
    """Compare with the run that never stopped: losses, rates, buffers, frozen parameters,
    hyperparameters, the loss scale, what the client saved.

    Args:
        before, after: By rank what ``deepspeed_jobs`` saw.
        tolerance: The largest relative difference of a loss.
        has_module: Whether DeepSpeed restores what is not trained.
        has_same_forward: Whether the first loss, which no gradient has touched, is the same in
            every precision: stage 3 rounds a linear layer's product before it adds the bias.
    """
    expected = before[0]["losses"][SAVED_AFTER:]
    losses = after[0]["losses"]
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True)]
    print(f"relative differences of losses: {', '.join(f'{d:.1e}' for d in differences)}")
    assert len(losses) == STEPS - SAVED_AFTER
    assert differences[0] <= (FP32 if has_same_forward else tolerance)
    assert max(differences) <= tolerance
    assert after[0]["rates"] == before[0]["rates"][SAVED_AFTER:]
    of_module = set() if has_module else {"buffers", "frozen"}
    for rank in after:
        for key in before[0]["saved"].keys() - of_module:
            assert rank["loaded"][key] == before[0]["saved"][key]
        assert rank["client_state"] == {"text": "kept", "n": 7}


def read(path: Path) -> Any:
    """Return the values of a file that DeepSpeed wrote."""
    import torch

    return torch.load(path, weights_only=False)


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield where two trees of values differ, up to the order of dictionaries' keys."""
    import torch

    if type(a) is not type(b):
        yield f"{where}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            yield f"{where}: {a} and {b}"
    elif isinstance(a, dict):
        for key in a.keys() | b.keys():
            if key in a and key in b:
                yield from differences(a[key], b[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: only in {'the first' if key in a else 'the second'}"
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} entries"
        for number, entries in enumerate(zip(a, b, strict=False)):
            yield from differences(*entries, f"{where}/{number}")
    elif hasattr(a, "cur_scale"):
        yield from differences(vars(a), vars(b), where)
    elif a != b:
        yield f"{where}: {a} and {b}"


def make_universal(saved: Path, destination: Path, *flags: str) -> None:
    """Run DeepSpeed's own converter."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(saved / "global_step3")]
    command += ["--output_folder", str(destination / "global_step3_universal")]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", *flags]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(command, check=True, env=environment, timeout=120)
