"""This rank's place on the parallel axes of an engine, and its boxes of a cut parameter.

The parameter itself has the cut: layers in Megatron's manner set ``tensor_model_parallel``,
``partition_dim`` and ``partition_stride``, DeepSpeed's AutoTP an affine map (from 0.19 on). One
without is equal on all ranks, as DeepSpeed's gradient norms assume.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from scalai.core.errors import RefusedError
from scalai.core.tensors.region import Box, Piece, row_major, whole

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among the tensor-parallel ranks."""

    rank: int
    size: int

    def pieces(self, name: str, parameter: Any, shape: Shape) -> tuple[Shape, tuple[Piece, ...]]:
        """Return the global shape of a parameter, and its boxes as positions in the local one.

        Args:
            shape: The local shape; before ZeRO 3 partitions it.

        Raises:
            RefusedError: The parameter is cut, and it does not say how, or scaled.
        """
        meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
        affine_map = (meta.get("conversion") or {}).get("affine_map")
        if self.size > 1 and affine_map is not None:
            return _mapped(name, affine_map, shape, self.rank)
        if self.size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return shape, (Piece(whole(shape), 0, row_major(shape)),)
        dim = getattr(parameter, "partition_dim", -1)
        if not 0 <= dim < len(shape):
            raise RefusedError(
                f"{name} is cut over {self.size} tensor-parallel ranks, and nothing says along "
                "which dimension. Set its attribute partition_dim, as Megatron's layers do (and "
                "partition_stride where it is several matrices, one behind the other), before "
                "deepspeed.initialize."
            )
        return self._sliced(name, dim, getattr(parameter, "partition_stride", 1), shape)

    def is_cut(self, name: str, parameter: Any) -> bool:
        """True if other ranks hold other elements of a parameter. Raises as ``pieces``."""
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return self.pieces(name, parameter, shape)[0] != shape

    def _sliced(
        self, name: str, dim: int, parts: int, shape: Shape
    ) -> tuple[Shape, tuple[Piece, ...]]:
        """``parts`` of equal size lie one behind the other, each cut evenly along ``dim``."""
        extent, rest = divmod(shape[dim], parts)
        if rest:
            raise RefusedError(
                f"{name} has partition_stride {parts}, which does not divide its {shape[dim]} "
                f"along dimension {dim}. Correct it."
            )
        strides = row_major(shape)
        box = [*shape]
        box[dim] = extent
        pieces = []
        for part in range(parts):
            offset = [0] * len(shape)
            offset[dim] = (part * self.size + self.rank) * extent
            start = part * extent * strides[dim]
            pieces.append(Piece(Box(tuple(offset), tuple(box)), start, strides))
        full = [*shape]
        full[dim] *= self.size
        return tuple(full), tuple(pieces)


def _mapped(
    name: str, affine_map: Mapping[str, Any], shape: Shape, rank: int
) -> tuple[Shape, tuple[Piece, ...]]:
    """Source: ``ParamAffineMap.to_dict``, deepspeed/checkpoint/affine.py (0.19.8)."""
    full = tuple(affine_map["logical_shape"])
    here = affine_map["ranks"][rank]
    strides = row_major(full)
    pieces = [_affine_piece(name, piece, strides) for piece in here["pieces"]]
    if tuple(here["shard_shape"]) != shape:
        raise RefusedError(
            f"AutoTP says that {name} is {here['shard_shape']} here, and it is {list(shape)}. Use "
            "a known version of DeepSpeed."
        )
    return full, tuple(pieces)


def _affine_piece(name: str, piece: Mapping[str, Any], strides: Sequence[int]) -> Piece:
    (source, source_strides), (start, dest_strides) = piece["source"], piece["dest"]
    extents = list(zip(piece["shape"], source_strides, strides, strict=False))
    is_box = len(piece["shape"]) == len(strides) and all(n == 1 or a == b for n, a, b in extents)
    if piece.get("scale", 1.0) != 1.0 or not is_box:
        raise RefusedError(
            f"AutoTP keeps {name} scaled, or not as boxes of the whole parameter, which is not "
            "carried. Leave this parameter out of the layer_specs of tensor_parallel."
        )
    offset = []
    for stride in strides:
        index, source = divmod(source, stride)
        offset.append(index)
    return Piece(Box(tuple(offset), tuple(piece["shape"])), start, tuple(dest_strides))


def degrees(engine: Any) -> Mapping[str, int]:
    """Return the sizes of the parallel axes; ``dp`` is how many ranks ZeRO partitions over."""
    from deepspeed.utils import bwc, groups

    return {
        "tp": tensor_parallel(engine).size,
        "pp": bwc.bwc_pipeline_parallel_world_size(engine.mpu),
        "sp": groups._get_sequence_parallel_world_size(),
        "dp": dist.get_world_size(engine.seq_data_parallel_group),
    }


def fixed_degrees(engine: Any) -> Mapping[str, int]:
    """Return the fixed degrees: no adapter is proven for another split of sequences."""
    return {"sp": degrees(engine)["sp"]}


def coordinate(engine: Any) -> str:
    """Return this rank's position, ``tp0-pp1-dp0``."""
    dp_rank = dist.get_rank(engine.seq_data_parallel_group)
    return f"tp{tensor_parallel(engine).rank}-pp{stage(engine)}-dp{dp_rank}"


def tensor_parallel(engine: Any) -> TensorParallel:
    from deepspeed.utils import bwc

    return TensorParallel(
        bwc.bwc_tensor_model_parallel_rank(engine.mpu),
        bwc.bwc_tensor_model_parallel_world_size(engine.mpu),
    )


def is_first_replica(engine: Any) -> bool:
    """True for the first rank among those with the same layers."""
    return dist.get_rank(engine.seq_data_parallel_group) == 0 == tensor_parallel(engine).rank


def stage(engine: Any) -> int:
    """Return the pipeline stage of this rank, 0 without a pipeline."""
    mpu = engine.mpu
    for name in ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 0
