"""Which layers each pipeline stage has, where ``--pipeline-model-parallel-layout`` says it.

Source: megatron/core/transformer/pipeline_parallel_layer_layout.py of 0.14.0 to 0.20 (d98e8a64).
"""

import re

from scalai.core.errors import UsageError

FLAG = "--pipeline-model-parallel-layout"
_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
_MOST = 100_000
"""Characters of a layout that is written out."""


def stages_of(text: str) -> tuple[str, ...]:
    """Return the stages of a layout such as ``Et|(tt|)*2,tL``, each as its letters: E (embedding),
    t (layer), m (a layer that predicts further tokens), L (loss).

    Raises:
        UsageError: Another letter stands there, or it is too long.
    """
    written = text.replace(",", "")
    for pattern in _REPEATED:
        counts = re.findall(r"\*(\d+)", written)
        if sum(map(int, counts)) * len(written) > _MOST:
            raise UsageError(f"{FLAG} {text!r} repeats layers beyond all models.")
        written = re.sub(pattern, lambda found: found[1] * int(found[2]), written)
    unknown = sorted(set(written) - set("EtmL|"))
    if unknown:
        raise UsageError(
            f"{FLAG} {text!r}: {unknown[0]!r} is no layer; E, t, m, L and | are known."
        )
    return tuple(written.split("|"))


def layout_fault(stages: tuple[str, ...], layers: int | None, pp: int) -> str | None:
    """Say why stages cannot be those of a model on ``pp`` pipeline ranks; None: nothing speaks
    against it."""
    order = "".join(stages)
    if len(stages) % pp:
        return f"{FLAG} has {len(stages)} stages, which pp={pp} does not divide"
    if order[:1] != "E" or order[-1:] != "L" or order.count("E") + order.count("L") != 2:
        return f"{FLAG}: the first layer must be E, the last L, and both once"
    if layers is not None and order.count("t") != layers:
        return f"{FLAG} has {order.count('t')} layers, --num-layers says {layers}"
    return None
