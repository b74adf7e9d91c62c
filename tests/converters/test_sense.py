"""What ``scalai verify`` finds in states that are whole and equal to their records, and that no
training makes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.sense import find_nonsense
from support.checkpoints import RATES, gpt, state, write
from support.command import Capsys, logged

NORM = "decoder.final_layernorm.weight"
WORDS = "embedding.word_embeddings.weight"


def with_values(change: Callable[[str, Any], Any]) -> Checkpoint:
    """Return a state whose tensors are changed by name."""
    source = state()
    files = []
    for file in source.placed.files:
        values = np.frombuffer(file.content or b"", np.float32)
        files.append(replace(file, content=change(file.path, values).astype("f4").tobytes()))
    return replace(source, placed=replace(source.placed, files=tuple(files)))


def only(kind: str, function: Callable[[Any], Any], name: str = NORM) -> Checkpoint:
    return with_values(lambda path, v: function(v) if path == f"{kind}/{name}" else v)


def late() -> Checkpoint:
    return with_values(lambda path, v: v + 5 if path == "(step)" else v)


def uneven() -> Checkpoint:
    """As if one parameter's state were of an older save."""
    source = state()
    placed, content = source.placed, np.float32(2).tobytes()
    names = [tensor.name for tensor in placed.collection.tensors]
    row = int(np.flatnonzero(placed.collection.tensor == names.index(f"step/{NORM}"))[0])
    file = placed.file.copy()
    file[row] = len(placed.files)
    older = replace(placed.files[-1], path="(older)", content=content)
    return replace(source, placed=replace(placed, file=file, files=(*placed.files, older)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: only("exp_avg_sq", lambda v: -v), f"exp_avg_sq of {NORM} holds negative numbers"),
        (lambda: only("exp_avg", lambda v: v * 4), f"exp_avg_sq of {NORM} cannot be of the same"),
        (lambda: only("param", np.zeros_like, WORDS), f"param/{WORDS} F32[8, 4] holds nothing but"),
        (
            lambda: with_values(lambda path, v: v * 0 if path.startswith("exp") else v),
            "all moments begin with zeros after 3 steps: they were not saved",
        ),
        (late, "the optimizer has made 8 steps, and the training 3"),
        (uneven, f"1 of 8 parameters have made other optimizer steps than 3: {NORM} 2"),
    ],
    ids=["negative", "mixed", "zeros", "no-moments", "late", "uneven"],
)
def test_a_state_that_no_training_makes_is_named(
    tmp_path: Path, capsys: Capsys, make: Callable[[], Checkpoint], words: str
) -> None:
    write(tmp_path / "new", "scalai", make())
    code, text = logged(capsys, "verify", tmp_path / "new", "--workers", 1)
    assert code == 0 and words in text and text.count("warning") == 1, text
    code, text = logged(capsys, "verify", tmp_path / "new", "--workers", 1, "--json")
    (warning,) = json.loads(text)["warnings"]
    assert code == 0 and words in warning


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.0, 0.5)])
def test_gradients_of_any_size_make_moments_that_belong_together(
    betas: tuple[float, float],
) -> None:
    """Also the one that leads to the bound: gradients that grow by b2 / b1 at each step."""
    one, two = betas
    random = np.random.default_rng(1)
    grown = np.concatenate([np.zeros(40), (two / max(one, 0.1)) ** np.arange(20)])
    rows = [*np.exp(random.normal(0, 9, (7, 60))) * random.choice([-1, 1], (7, 60)), grown]
    first, second = np.zeros(8, "f4"), np.zeros(8, "f4")
    for gradients in np.array(rows, "f4").T:
        first += np.float32(1 - one) * (gradients - first)
        second += np.float32(1 - two) * (gradients**2 - second)
    made = {"exp_avg": first, "exp_avg_sq": second}
    source = state(shapes={NORM: (8,)})
    files = tuple(
        replace(file, content=made[file.path.partition("/")[0]].tobytes())
        if file.path.partition("/")[0] in made
        else file
        for file in source.placed.files
    )
    values = replace(source.values, param_groups=({**RATES, "betas": betas},))
    source = replace(source, placed=replace(source.placed, files=files), values=values)
    assert list(find_nonsense(source)) == []
    assert list(find_nonsense(gpt())) == []
