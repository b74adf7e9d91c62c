"""RNG states of a Megatron checkpoint's ranks: the source's own, or new ones.

They are kept where tensor, pipeline and expert parallelism stay as they are. Else new ones begin,
for Megatron ends with an error where a checkpoint that says the job's own degrees has none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.megatron.new_rng_states import CUDA_BYTES, new_rng_states

DEFAULT_SEED = 1234
"""Megatron's own."""


def rng_states_of(
    source: Checkpoint,
    degrees: Mapping[str, int],
    coordinate: tuple[int, int, int],
    notes: list[str],
) -> Sequence[Mapping[str, Any]]:
    """Return ``rng_state`` of a rank: one entry, or one for each data-parallel rank.

    Args:
        coordinate: (tp, pp, ep) ranks.
        notes: Gets a line where new RNG states begin.
    """
    kept: Mapping[Any, Sequence[Mapping[str, Any]]] = source.values.extra.get("rng_state", {})
    arguments = source.values.arguments or {}
    count = degrees.get("dp", 1) if arguments.get("data_parallel_random_init") else 1
    old = source.values.degrees
    is_same = all(old.get(axis, 1) == degrees.get(axis, 1) for axis in ("tp", "pp", "ep"))
    if is_same and coordinate in kept and len(kept[coordinate]) == count:
        return kept[coordinate]
    example = next(iter(kept.values()), [{}])[0].get("cuda_rng_state")
    is_cuda = arguments.get("distributed_backend") != "gloo"
    if example is not None:
        is_cuda = example.size_bytes == CUDA_BYTES
    seed = int(arguments.get("seed") or DEFAULT_SEED) + source.values.step
    note = f"RNG states begin anew at every rank, from seed {seed} (seed + iteration)"
    if note not in notes:
        notes.append(note)
    tp_rank, pp_rank, ep_rank = coordinate
    return [
        new_rng_states(
            seed + 10 * dp_rank,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            ep_rank=ep_rank,
            is_cuda=is_cuda,
        )
        for dp_rank in range(count)
    ]
