"""Readers that are fed with damaged files end in our error or in a checkpoint, nothing else."""

import pickle
import random
import shutil
from pathlib import Path

import pytest
from checkpoints import LIMITS, state

from scalai.converters import pickles
from scalai.converters.checkpoint import WriteOptions
from scalai.converters.engine import reshard
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.verify import verify
from scalai.core.errors import RefusedError, ScalaiError

TRIES = 40


def mutate(data: bytes, choice: random.Random) -> bytes:
    """Return bytes with a few changes: flipped, cut off, moved, repeated."""
    changed = bytearray(data)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(changed) or 1)
        kind = choice.randrange(4)
        if kind == 0:
            changed[at : at + 1] = choice.randbytes(1)
        elif kind == 1:
            del changed[at : at + choice.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = changed[at : at + choice.randint(1, 8)]
        else:
            changed[at : at + 4] = choice.randbytes(4)
    return bytes(changed)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("torch_dist", "iter_0000003/.metadata"),
        ("torch_dist", "iter_0000003/common.pt"),
        ("torch_dist", "iter_0000003/metadata.json"),
        ("torch_dist", "iter_0000003/__0_0.distcp"),
        ("torch_dist", "latest_checkpointed_iteration.txt"),
        ("torch", "iter_0000003/mp_rank_00/model_optim_rng.pt"),
        ("torch", "iter_0000003/mp_rank_01/distrib_optim.pt"),
        ("scalai", "generation-1/offline/manifest.json"),
        ("safetensors", "model.safetensors"),
    ],
)
def test_damaged_bytes_give_our_error_or_a_checkpoint(
    tmp_path: Path, layout: str, name: str
) -> None:
    source = state()
    target = layout_named(layout).lay_out(source, WriteOptions({"tp": 2}))
    reshard(source, target, tmp_path / "whole", LIMITS)
    (tmp_path / "whole" / "scalai.json").unlink()
    data = (tmp_path / "whole" / name).read_bytes()
    refused = 0
    for seed in range(TRIES):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(mutate(data, random.Random(seed)))
        try:
            checkpoint = open_checkpoint(tmp_path / "bad")
            verify(checkpoint, workers=0)
            for other in ("torch_dist", "scalai"):
                layout_named(other).lay_out(checkpoint, WriteOptions({}))
        except ScalaiError:
            refused += 1
    print(f"{refused} of {TRIES} refused")
    assert refused


def test_a_pickle_that_asks_for_all_memory_is_refused() -> None:
    memo = b"\x80\x02N" + pickle.LONG_BINPUT + (2**32 - 1).to_bytes(4, "little") + b"."
    with pytest.raises(RefusedError, match="damaged pickle"):
        pickles.loads(memo, "file")
