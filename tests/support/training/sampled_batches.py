"""Which samples a Megatron-LM checkout's own samplers put into each global batch: ``python -m
support.training.sampled_batches CHECKOUT`` reads a JSON list of [sampler, samples of an epoch,
consumed samples, global batch, micro-batch, DP] from standard input and prints the first global
batches of each, sorted.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import json
import sys
import warnings
from itertools import islice
from typing import Any

sys.path.insert(0, sys.argv[1])

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
cpu_emulation.install_training()

from megatron.training.datasets import data_samplers

BATCHES = 5


def batches(
    kind: str, total: int, consumed: int, global_batch: int, micro: int, dp: int
) -> list[list[int]]:
    """Return the samples of the next global batches over all replicas."""
    count = global_batch // (micro * dp)
    found: list[list[int]] = [[] for _ in range(BATCHES)]
    for rank in range(dp):
        given: dict[str, Any] = {
            "total_samples": total, "consumed_samples": consumed, "micro_batch_size": micro,
            "data_parallel_rank": rank, "data_parallel_size": dp,
        }  # fmt: skip
        if kind == "cyclic":
            sampler = data_samplers.MegatronPretrainingRandomSampler(
                list(range(total)), data_sharding=False, **given
            )
        else:
            sampler = data_samplers.MegatronPretrainingSampler(**given)
        mine = iter(sampler)
        for batch in found:
            for samples in islice(mine, count):
                batch += samples
    return [sorted(batch) for batch in found]


def main() -> None:
    print(json.dumps([batches(*case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
