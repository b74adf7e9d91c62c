"""Unreadable layouts, known by their files: their names, and the way out.

Source: ``save_checkpoint`` of megatron/training/checkpointing.py (core_v0.19.0), checkpoint.py of
torchtitan, utils/fsdp_utils.py of Accelerate 1.15, peft and NeMo 2.
"""

from collections.abc import Callable
from pathlib import Path

from scalai.converters.bounded import open_regular

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 28


def foreign_text(path: Path) -> str | None:
    """Name an unreadable directory or file, with the way out; None: unknown."""
    known = (text for is_it, text in _KNOWN if is_it(path))
    return next(known, None)


def is_megatron_dcp(directory: Path) -> bool:
    """Whether Megatron saved it with ``--ckpt-format torch_dcp``, or fsdp_dtensor."""
    return _names_all(directory, b"checkpoint_version", b"num_floating_point_operations_so_far")


def is_of_megatron(directory: Path) -> bool:
    """Whether Megatron saved it: also as torch_dist, without its end."""
    return is_megatron_dcp(directory) or _is_interrupted(directory)


def is_fsdp_dtensor(directory: Path) -> bool:
    """Whether Megatron-FSDP saved it: its wrapper is in the names of the model."""
    return _names_all(directory, b"checkpoint_version", b"model.module.")


def _is_interrupted(path: Path) -> bool:
    return _names_all(path, b"common_state/shard_0_1")


def _has_pickled_weights(path: Path) -> bool:
    return any(path.glob("pytorch_model*.bin")) or any(path.glob("pytorch_model.bin.index.json"))


def torch_file_text(path: Path) -> str | None:
    """Return the way out for a file of torch.save, or a folder of some; None: it is neither."""
    files = [path] if path.is_file() else [*path.glob("*")] if path.is_dir() else []
    if not any(file.suffix in (".pt", ".pth", ".ckpt", ".bin") for file in files):
        return None
    return (
        "A file of torch.save alone does not say what its tensors are, and is not read. Load it "
        "where it was made and save its weights by safetensors.torch.save_file, in a directory as "
        "model.safetensors"
    )


def _is_nemo(path: Path) -> bool:
    return (path / "weights").is_dir() and (path / "context").is_dir()


def _names_all(path: Path, *keys: bytes) -> bool:
    file = path / METADATA
    try:
        with open_regular(file) as opened:
            data = opened.read(_MAX_METADATA_BYTES)
    except OSError:
        return False
    return all(key in data for key in keys)


_DCP = "It is a checkpoint of torch.distributed.checkpoint"
_KNOWN: tuple[tuple[Callable[[Path], bool], str], ...] = (
    (
        _is_interrupted,
        f"{_DCP} that Megatron began to save as torch_dist and did not end: there is no "
        "metadata.json. Use an older one",
    ),
    (
        is_megatron_dcp,
        "It was saved by Megatron with --ckpt-format torch_dcp, which is not read. Load it in "
        "Megatron and save it with --ckpt-format torch_dist",
    ),
    (
        lambda path: any(path.glob("model_world_size_*_rank_*.pt")),
        "It is of verl's or SkyRL's FSDP, whose ranks pickle their shards. Merge it (python -m "
        "verl.model_merger merge --backend fsdp); its optimizer is lost",
    ),
    (
        lambda path: (path / "adapter_config.json").is_file(),
        "It is an adapter of PEFT, not a model: PEFT loads it at any number of ranks. Merge it by "
        "scalai reshard BASE DST --merge-adapter",
    ),
    (
        _has_pickled_weights,
        "Its weights are pickled in pytorch_model.bin, which is not read. Load it by "
        "from_pretrained and save it by save_pretrained, which writes safetensors",
    ),
    (
        _is_nemo,
        "It is of NeMo 2, whose weights/ is not what Megatron-LM saves. Let NeMo export it to "
        "Hugging Face's safetensors, which are read",
    ),
    (
        lambda path: path.is_dir() and any(path.glob("*/.zarray")),
        "It was saved by Megatron with the zarr backend, which is not read. Load it in a Megatron "
        "that still does and save it with --ckpt-format torch_dist",
    ),
)  # fmt: skip
"""In the order of detection."""
