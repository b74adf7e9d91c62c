"""A layout is valid where megatron-core sets up a job of it, and nowhere else."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest

from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal

LAYOUTS, MOST_RANKS = 2_400, 32


def random_layout(draw: random.Random) -> dict[str, int]:
    """Return sizes of which about a third make up a job."""
    while True:
        tp, pp, dp = (
            draw.choice((1, 2, 3, 4, 8)),
            draw.choice((1, 2, 3, 4)),
            draw.choice((1, 2, 3, 4, 6)),
        )
        cp = draw.choice((1, 1, 1, 2))
        if tp * pp * dp * cp <= MOST_RANKS:
            break
    heads = draw.choice((4, 8, 12, 16, 24))
    experts = draw.choice((0, 0, 4, 6, 8))
    return {
        "world": tp * pp * dp * cp, "tp": tp, "pp": pp, "dp": dp, "cp": cp,
        "vpp": draw.choice((1, 1, 2, 3)), "ep": draw.choice((1, 2, 4)) if experts else 1,
        "layers": draw.choice((4, 6, 8, 12, 24)), "heads": heads, "experts": experts,
        "groups": draw.choice([groups for groups in (1, 2, 4, heads) if heads % groups == 0]),
        "batch": draw.choice((12, 24, 48, 72, 144)), "micro_batch": draw.choice((1, 1, 1, 2, 3)),
        "seq": draw.choice((64, 66)),
    }  # fmt: skip


def our_refusal(layout: dict[str, int]) -> str | None:
    limits = ModelLimits(
        num_attention_heads=layout["heads"],
        num_query_groups=layout["groups"],
        num_layers=layout["layers"],
        global_batch_size=layout["batch"],
        seq_length=layout["seq"],
        num_experts=layout["experts"] or None,
        ffn_hidden_size=64 * layout["heads"],
    )
    degrees = Degrees(**{axis: layout[axis] for axis in ("tp", "pp", "dp", "vpp", "cp", "ep")})
    return refusal(degrees, limits, layout["micro_batch"])


@pytest.mark.turns
def test_what_we_accept_megatron_accepts_and_what_we_refuse_it_refuses() -> None:
    pytest.importorskip("megatron.core")
    draw = random.Random(20)
    layouts = [random_layout(draw) for _ in range(LAYOUTS)]
    done = subprocess.run(
        [sys.executable, "-m", "support.training.judged_layouts"], input=json.dumps(layouts),
        capture_output=True, text=True, check=True, timeout=250,
    )  # fmt: skip
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = [our_refusal(layout) for layout in layouts]
    both = Counter((mine is None, his is None) for mine, his in zip(ours, theirs, strict=True))
    different = [
        (layout, mine, his)
        for layout, mine, his in zip(layouts, ours, theirs, strict=True)
        if (mine is None) != (his is None)
    ]
    assert not different
    assert both[True, True] > LAYOUTS // 5 and both[False, False] > LAYOUTS // 5
