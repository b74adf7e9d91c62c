"""Stages without experts have no buckets of them, so that their groups' numbers are not used."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.megatron.dp_reshardable import read_buckets
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey
from scalai.core.tensors.region import Box, row_major

LAYERS, EXPERTS, FILE = 4, 4, "all"


@dataclass
class Writer:
    """A file of fp32 numbers, and the keys that lie in it."""

    numbers: list[np.ndarray] = field(default_factory=list)
    begin: dict[Extent, int] = field(default_factory=dict)
    keys: list[StoredKey] = field(default_factory=list)
    size: int = 0

    def put(self, values: np.ndarray) -> Extent:
        extent = Extent(FILE, self.size, values.nbytes)
        self.begin[extent] = self.size
        self.numbers.append(values.ravel())
        self.size += values.nbytes
        return extent

    def weight(self, name: str, shape: tuple[int, ...], axes: int = 0) -> dict[int, np.ndarray]:
        """Write a parameter, or one an expert; return the values of each."""
        count = shape[0] if axes else 1
        found = {at: np.random.default_rng(self.size + at).random(shape[axes:], np.float32)
                 for at in range(count)}  # fmt: skip
        chunks = [
            Chunk(Box((*[at] * axes, *[0] * len(v.shape)), (*[1] * axes, *v.shape)), self.put(v))
            for at, v in found.items()
        ]
        self.keys.append(StoredKey(name, shape, "F32", tuple(chunks)))
        return found

    def bucket(self, prefix: str, values: list[np.ndarray]) -> list[StoredKey]:
        """Return the keys of a bucket that holds these, the last module's first."""
        whole, moments = np.zeros(0, np.float32), np.zeros(0, np.float32)
        for at in reversed(values):
            room = np.zeros(-len(whole) % 64, np.float32)
            whole = np.concatenate([whole, room, at.ravel()])
            moments = np.concatenate([moments, room, 2 * at.ravel()])
        return [
            StoredKey(
                f"{prefix}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{kind}",
                data.shape, "F32", (Chunk(Box((0,), data.shape), self.put(data)),),
            )
            for kind, data in (("param", whole), ("exp_avg", moments))
        ]  # fmt: skip


@pytest.mark.parametrize("sparse", [(2, 3), (0, 1), (1, 2, 3)])
def test_experts_of_some_stages_get_their_own_moments(
    tmp_path: Path, sparse: tuple[int, ...]
) -> None:
    writer = Writer()
    dense: list[list[np.ndarray]] = [[], []]
    experts: dict[tuple[int, int], list[np.ndarray]] = {}
    for layer in range(LAYERS):
        stage, name = layer // 2, f"decoder.layers.{layer}.mlp"
        if layer not in sparse:
            dense[stage].append(writer.weight(f"{name}.linear_fc2.weight", (3, 5))[0])
            continue
        dense[stage].append(writer.weight(f"{name}.router.weight", (EXPERTS, 3))[0])
        up, down = (
            writer.weight(f"{name}.experts.experts.{part}.weight", (EXPERTS, *shape), 1)
            for part, shape in (("linear_fc1", (5, 3)), ("linear_fc2", (3, 5)))
        )
        for expert in range(EXPERTS):
            # Groups are numbered stage by stage, in each EP rank by EP rank.
            of = experts.setdefault((stage, expert // 2), [])
            of += [up[expert], down[expert]]
    buckets = [
        key
        for stage in range(2)
        for key in writer.bucket(
            f"chained_0.optimizer.distributed.dp_group_idx_{stage}", dense[stage]
        )
    ]
    for (stage, ep_rank), values in experts.items():
        group = f"chained_1.optimizer.distributed.dp_group_idx_{2 * stage + ep_rank}"
        buckets += writer.bucket(group, values)
    numbers = np.concatenate(writer.numbers)
    (tmp_path / FILE).write_bytes(numbers.tobytes())
    rescued = read_buckets(
        tmp_path,
        buckets,
        writer.keys,
        lambda _, chunk: (writer.begin[chunk.extent], row_major(chunk.box.shape), 4),
        {"expert_model_parallel_size": 2, "num_experts": EXPERTS},
    )
    found = {piece.tensor.name: piece for piece in rescued.pieces}
    assert len(found) == len(rescued.pieces) == (LAYERS + 2 * EXPERTS * len(sparse))
    for stored in writer.keys:
        for chunk in stored.chunks:
            at = chunk.box.offset[0]
            name = stored.key.replace("experts.experts.", f"experts.experts.{at}.")
            size, moment = chunk.box.numel, found[f"exp_avg/{name}"]
            weight = writer.begin[chunk.extent] // 4
            low = moment.begin // 4
            assert (numbers[low : low + size] == 2 * numbers[weight : weight + size]).all(), name
