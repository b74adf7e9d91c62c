"""What of Megatron's ``dp_reshardable`` is refused before a byte of it is read."""

from pathlib import Path

import pytest

from scalai.converters.megatron.dp_reshardable import read_buckets
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey
from scalai.core.errors import RefusedError
from scalai.core.region import whole

BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
MODEL = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 12, 4),
    "mtp.layers.0.eh_proj.weight": (4, 8),
}


def stored(name: str, shape: tuple[int, ...]) -> StoredKey:
    return StoredKey(name, shape, "F32", (Chunk(whole(shape), Extent("__0_0.distcp", 0, 0)),))


def test_layers_that_predict_further_tokens_are_not_looked_for_on_several_stages(
    tmp_path: Path,
) -> None:
    buckets = [stored(f"{BUCKET.format(group)}.bucket_idx_0.param", (64,)) for group in range(2)]
    model = [stored(name, shape) for name, shape in MODEL.items()]
    with pytest.raises(RefusedError, match=r"\(MTP\) beside pipeline stages .*fully-reshardable"):
        read_buckets(tmp_path, buckets, model, lambda *_: (0, (), 4))
