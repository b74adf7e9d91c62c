"""RNG states of Megatron's ranks: the source's own, or new ones by Megatron's rule.

They are kept where tensor, pipeline and expert parallelism stay as they are. Elsewhere they cannot
be carried: shared ones must stay equal, the others different. New ones begin at every rank, seeded
from the job's seed and the iteration; Megatron ends with an error at a checkpoint of the job's own
degrees without any.

Source: ``_set_random_seed`` of megatron/training/initialize.py, ``model_parallel_cuda_manual_seed``
of megatron/core/tensor_parallel/random.py (0.16.1), ``CPUGeneratorImplState`` of ATen and
``CUDAGeneratorImpl::get_state`` of torch 2.13.
"""

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.megatron.iteration_files import RUN
from scalai.converters.torch_archive import NewTensor

CUDA_BYTES = 16
"""Bytes of a CUDA generator's state: seed and offset."""

_MODEL_PARALLEL, _EXPERT_PARALLEL, _EXPERT_RANK, _STAGE = 2718, 1024, 100, 100


def new_rng_states(
    seed: int, *, tp_rank: int, pp_rank: int, ep_rank: int, is_cuda: bool = True
) -> dict[str, Any]:
    """Return the entry of ``rng_state`` of one rank.

    Args:
        seed: Seed for this checkpoint: the job's plus the iteration, so that no stream repeats.
        is_cuda: The ranks' device is CUDA; else its RNG states are of the CPU's kind.
    """
    seed += _STAGE * pp_rank
    device = _cuda_state if is_cuda else _cpu_state
    experts = seed + _EXPERT_PARALLEL + _EXPERT_RANK * ep_rank + tp_rank
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed % 2**32).get_state(),
        "torch_rng_state": _cpu_state(seed),
        "cuda_rng_state": device(seed),
        "rng_tracker_states": {
            "data-parallel-rng": device(seed),
            "model-parallel-rng": device(seed + _MODEL_PARALLEL + tp_rank),
            "expert-parallel-rng": device(experts),
        },
    }


def _cuda_state(seed: int) -> NewTensor:
    return NewTensor("U8", (CUDA_BYTES,), struct.pack("<Qq", seed % 2**64, 0))


def _cpu_state(seed: int) -> NewTensor:
    """Return the state of a CPU generator behind ``manual_seed(seed)``."""
    words = _mersenne_twister(seed % 2**32)
    engine = struct.pack(f"<QiiQ{len(words)}Q", seed, 1, 1, 0, *words)
    content = engine + bytes(3 * 8 + 8) + bytes(8)
    return NewTensor("U8", (len(content),), content)


def _mersenne_twister(seed: int) -> list[int]:
    """Return the 624 words of a Mersenne Twister seeded by one word."""
    words = [seed]
    for at in range(1, 624):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + at) % 2**32)
    return words


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
        notes: Gets a line if new RNG states begin.
    """
    kept: Mapping[Any, Sequence[Mapping[str, Any]]] = source.values.extra.get("rng_state", {})
    arguments = source.values.arguments or source.values.extra.get(RUN, {})
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
