"""Bad checkpoints as cases: the damage to a whole one by small editors, and the words."""

import argparse
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from scalai.converters.checkpoint import REPORT, Checkpoint
from scalai.converters.dcp_metadata import Chunk, Extent, StoredKey, read_metadata, write_metadata
from scalai.converters.layouts import open_checkpoint
from scalai.converters.pickles import foreign
from scalai.converters.torch_archive import NewTensor, content_of, lay_out_archive
from scalai.core.fields import digest_of
from scalai.core.tensors.region import Box
from support.checkpoints import (
    GPT_SHAPES,
    convert,
    deepspeed_state,
    experts_state,
    gpt,
    newest,
    state,
    write,
)
from support.damage import (
    Damage,
    View,
    age,
    change_chunks,
    change_key,
    change_tree,
    compress,
    link_outside,
    make_complex,
    merge,
    plant,
    rewrite_zip,
    write_view,
)
from support.local_files import localise, rewrite

ITEMS = {
    "path": "files outside of the checkpoint: absolute, by .., by a link",
    "dtype": "an unknown dtype",
    "shape": "a negative or overflowing shape",
    "hole": "elements that nobody holds",
    "overlap": "elements that two hold who are no replicas",
    "duplicate": "one key or rank twice",
    "missing file": "a rank's file is missing",
    "extra file": "a file that belongs to no rank",
    "truncated": "a file that ends early",
    "bomb": "more bytes than the file has",
    "count": "more pieces or ranks than there can be",
    "digest": "content that is not what was noted",
    "iterations": "files of several iterations",
    "world": "another number of ranks by names than by metadata",
    "suspect": "tensors of nothing but NaN or denormal numbers: a warning",
    "run": "parts of several jobs",
    "version": "a version from the future",
    "setting": "a setting of the job that is of another kind",
    "code": "a pickle that would run something",
}
NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Reject:
    """An item of the list, the damage to a whole checkpoint, the words and the exit code."""

    item: str
    damage: Callable[[Path], object]
    words: str
    code: int = 3


def on(change: Callable[[Path], object], path: str) -> Damage:
    """Return a damage of one file or folder."""
    return lambda directory: change(directory / path)


def edited(path: str, change: Callable[[Any], Any]) -> Damage:
    """Return a damage of the tree in one of torch's files."""
    return on(lambda file: change_tree(file, change), path)


def merged(path: str, **entries: Any) -> Damage:
    return on(lambda file: merge(file, entries), path)


def viewed(path: str, tree: Callable[[View], Any], shape: Any, stride: Any) -> Damage:
    """Return a damage that puts a tree with a view of 16 bytes into a file."""
    return on(lambda file: write_view(file, tree(View(shape, stride))), path)


def replaced(path: str, old: bytes, new: bytes) -> Damage:
    return on(lambda file: file.write_bytes(file.read_bytes().replace(old, new, 1)), path)


def written(path: str, data: bytes) -> Damage:
    return on(lambda file: file.write_bytes(data), path)


def lost(path: str) -> Damage:
    return on(lambda at: shutil.rmtree(at) if at.is_dir() else at.unlink(), path)


def cut(path: str, size_bytes: int) -> Damage:
    """Shorten a file; by less than 0: lengthen it."""
    return on(lambda file: os.truncate(file, file.stat().st_size - size_bytes), path)


def copied(path: str, to: str) -> Damage:
    def damage(directory: Path) -> None:
        copy = shutil.copytree if (directory / path).is_dir() else shutil.copy
        copy(directory / path, directory / to)

    return damage


def without(entries: Mapping[Any, Any], key: object) -> dict[Any, Any]:
    return {name: value for name, value in entries.items() if name != key}


def edit_values(directory: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change all fp32 values of a tensor where they lie, in every piece and second copy."""
    checkpoint = open_checkpoint(directory)
    for placed in (checkpoint.placed, checkpoint.duplicates):
        if placed is None:
            continue
        for row in range(len(placed.collection)):
            piece = placed.piece(row)
            if piece.tensor.name != name or placed.files[placed.file[row]].content is not None:
                continue
            data = np.memmap(checkpoint.directory / piece.file, np.uint8, "r+")
            stride = [4 * step for step in piece.stride or ()]
            shape = piece.box.shape
            view: Any = np.ndarray(shape, np.float32, data, piece.begin, stride or None)
            change(view)
            data.flush()


def spoil(name: str) -> Damage:
    """Return what changes values of a tensor, and not the proof beside it."""

    def change(values: Any) -> None:
        values += 1

    return lambda directory: edit_values(directory, name, change)


def with_nan(directory: Path) -> None:
    """Fill a parameter with NaN, as if it had been saved so."""
    (directory / REPORT).unlink()
    edit_values(directory, f"param/{NORM}", lambda values: values.fill(np.nan))


def with_entries(path: str, **entries: Any) -> Damage:
    """Return a damage of the object in a file of JSON."""
    return on(
        lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **entries})), path
    )


OF_THE_REPORT = Reject("version", with_entries(REPORT, version=99), "scalai.json is of version 99")
SPOILT = Reject("digest", spoil(f"exp_avg/{NORM}"), "says was written", 4)
NAN = Reject("suspect", with_nan, "nothing but NaN", 0)


def archived(file: str, tree: Callable[[View], Any]) -> list[Reject]:
    """Return the cases of one of torch's files, in which ``tree`` holds a tensor."""
    return [
        Reject("path", on(link_outside, file), "is a link to outside"),
        Reject("dtype", on(make_complex, file), "of an unknown kind"),
        Reject("shape", viewed(file, tree, (-4,), (1,)), "a tensor [-4] reaches beyond its"),
        Reject("truncated", cut(file, 1), f"{Path(file).name} is damaged or truncated"),
        Reject("bomb", on(compress, file), "is compressed; torch stores plainly"),
        Reject("bomb", viewed(file, tree, (1 << 50, 4), (0, 1)), "beyond its storage of 16 bytes"),
        Reject("version", on(age, file), "is of version 99 of torch's format"),
        Reject("code", on(plant, file), "os.system, which no checkpoint"),
        OF_THE_REPORT, SPOILT, NAN,
    ]  # fmt: skip


# Megatron's torch_dist.
ITERATION = "iter_0000003"
METADATA, COMMON = f"{ITERATION}/.metadata", f"{ITERATION}/common.pt"
EMBEDDING = "embedding.word_embeddings.weight"
"""[8, 4], in two chunks of [4, 4]."""
PLANTED = b"(S'touch /tmp/this-must-not-be'\ntR."


def key(
    change: Callable[[StoredKey], StoredKey], name: str = EMBEDDING, folder: str = ITERATION
) -> Damage:
    return on(lambda here: change_key(here, name, change), folder)


def point_at(file: str, folder: str = ITERATION) -> Damage:
    def damage(directory: Path) -> None:
        first = read_metadata(directory / folder).tensors[0]
        extent = first.chunks[0].extent
        shutil.copy(directory / folder / extent.file, directory / folder / ".." / "stolen")
        change_chunks(directory / folder, first.key, {"extent": replace(extent, file=file)})

    return damage


def repeat_an_element(directory: Path, name: str = EMBEDDING, folder: str = ITERATION) -> None:
    """A tensor of 2**62 elements by strides of 0, in a file of some bytes."""
    path = directory / folder / "__2_0.distcp"
    write_view(path, View((1 << 62, 4), (0, 1)))
    chunk = Chunk(Box((0, 0), (1 << 62, 4)), Extent(path.name, 0, path.stat().st_size))
    key(lambda stored: replace(stored, shape=(1 << 62, 4), chunks=(chunk,)), name, folder)(
        directory
    )


def overlap(directory: Path, name: str = EMBEDDING, folder: str = ITERATION) -> None:
    data = content_of(lay_out_archive(NewTensor("F32", (5, 4), bytes(80))))
    (directory / folder / "__2_0.distcp").write_bytes(data)
    chunk = Chunk(Box((3, 0), (5, 4)), Extent("__2_0.distcp", 0, len(data)))
    key(lambda stored: replace(stored, chunks=(stored.chunks[0], chunk)), name, folder)(directory)


def many_layers(stored: StoredKey) -> StoredKey:
    shape = (1 << 40, 0, 16)
    return replace(
        stored, shape=shape, chunks=(replace(stored.chunks[0], box=Box((0,) * 3, shape)),)
    )


def mix_two_keys(
    directory: Path,
    bias: str = "decoder.layers.mlp.linear_fc2.bias",
    folder: str = ITERATION,
    norm: str = NORM,
) -> None:
    tensors = {stored.key: stored for stored in read_metadata(directory / folder).tensors}
    extent = tensors[norm].chunks[0].extent
    change_chunks(directory / folder, bias, {"extent": extent})


def of_step(step: int, file: str) -> Damage:
    """Put in a file of another step whose settings say step 3, as if Megatron had written it."""

    def damage(directory: Path) -> None:
        source = state(step=step)
        source = replace(source, values=replace(source.values, step=3 if step == 7 else step))
        other = write(directory.parent / "other", source=source, tp=2)
        shutil.copy(other.directory / file, directory / ITERATION / file)
        if step == 7:
            (directory / REPORT).unlink()

    return damage


TORCH_DIST = [
    Reject("path", point_at("../stolen"), "outside of the checkpoint"),
    Reject("path", point_at("/etc/hostname"), "outside of the checkpoint"),
    Reject("path", on(link_outside, f"{ITERATION}/__1_0.distcp"), "is a link to outside"),
    Reject("dtype", replaced(METADATA, b"torch\nfloat32\n", b"torch\ncomplex64\n"), "is of dtype"),
    Reject("shape", key(lambda stored: replace(stored, shape=(-8, 4))), "has shape [-8, 4]"),
    Reject(
        "shape", key(lambda stored: replace(stored, shape=(1 << 62, 4))),
        "elements of embedding.word_embeddings.weight",
    ),
    Reject(
        "shape",
        on(lambda at: change_chunks(at, EMBEDDING, {"box": Box((6, 0), (4, 4))}), ITERATION),
        "reaches outside of [8, 4]",
    ),
    Reject(
        "hole", key(lambda stored: replace(stored, chunks=stored.chunks[1:])),
        "nobody holds 16 of the 32 elements of embedding.word_embeddings",
    ),
    # As a save that keeps one rank's layers: nothing but the arguments tells of the others.
    Reject(
        "hole", merged(COMMON, args=argparse.Namespace(num_layers=3)),
        "has 2 layers by its tensors, and 3 by its arguments",
    ),
    Reject("overlap", overlap, "overlap without being replicas"),
    Reject(
        "duplicate", key(lambda stored: replace(stored, chunks=(stored.chunks[0],) * 2)),
        "nobody holds 16 of the 32 elements",
    ),
    Reject("missing file", lost(f"{ITERATION}/__1_0.distcp"), "__1_0.distcp is missing"),
    Reject("missing file", lost(COMMON), "has no common.pt, and .metadata places no"),
    Reject("missing file", lost(METADATA), ".metadata cannot be read"),
    Reject("missing file", lost(f"{ITERATION}/metadata.json"), "so the save was interrupted"),
    Reject(
        "extra file", written(f"{ITERATION}/__7_0.distcp", b"old"),
        "__7_0.distcp is left over from another save", 0,
    ),
    Reject("truncated", cut(f"{ITERATION}/__1_0.distcp", 1), "__1_0.distcp is truncated: it has"),
    Reject("truncated", cut(METADATA, 200), ".metadata holds a damaged pickle"),
    Reject("bomb", on(compress, COMMON), "is compressed; torch stores plainly"),
    Reject("bomb", repeat_an_element, "reaches beyond its storage of 16 bytes"),
    Reject(
        "count", key(many_layers, "decoder.layers.mlp.linear_fc2.weight"),
        "pieces of layers, and at most",
    ),
    Reject("digest", replaced(COMMON, b"iteration", b"iterbtion"), "Bad CRC-32"),
    Reject("iterations", of_step(5, "common.pt"), "common.pt is of iteration 5, not 3"),
    Reject("iterations", mix_two_keys, "Files of two checkpoints are mixed"),
    Reject("iterations", of_step(7, "__1_0.distcp"), "files of two checkpoints are mixed", 4),
    Reject(
        "version", with_entries(f"{ITERATION}/metadata.json", sharded_backend_version=2),
        "has sharded_backend_version 2, and 1 is",
    ),
    Reject(
        "version", with_entries(f"{ITERATION}/metadata.json", sharded_backend="zarr"),
        "is of the format 'zarr'",
    ),
    Reject("version", replaced(METADATA, b"1.0.0", b"2.0.0"), "is of version 2.0.0"),
    Reject("version", on(age, COMMON), "is of version 99 of torch's format"),
    Reject("code", on(plant, COMMON), "os.system, which no checkpoint"),
    Reject("code", written(METADATA, b"cos\nsystem\n" + PLANTED), "os.system, which no checkpoint"),
    Reject(
        "code", written(METADATA, b"ctorch.utils.collect_env\nrun\n" + PLANTED),
        "calls torch.utils.collect_env.run, which no",
    ),
    OF_THE_REPORT, SPOILT, NAN,
]  # fmt: skip

# Megatron's local files, of 2 ranks.
LOCAL = "1/iter_0000003_1_local.pt"


def write_local(directory: Path, source: Checkpoint | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "whole"), source=source, tp=2)
        localise(Path(folder, "whole"), directory)


def local_entry(key: str = EMBEDDING, path: str = LOCAL, at: int = -1, **fields: Any) -> Damage:
    """Change the last entry of a key, or another of them."""
    return on(
        lambda file: rewrite(
            file, lambda _, entries: [e for e in entries if e["key"] == key][at].update(fields)
        ),
        path,
    )


def argued(*paths: str, **arguments: Any) -> Damage:
    """Change arguments in some files, or in all."""

    def damage(directory: Path) -> None:
        for file in [directory / path for path in paths] or directory.glob("*/*.pt"):
            rewrite(file, lambda common, _: common["args"].__dict__.update(arguments))

    return damage


def copy_other(directory: Path) -> None:
    """Put another session's file of rank 1 beside rank 0's."""
    shutil.copy(directory / LOCAL, directory / "0")
    local_entry(NORM, data=NANS)(directory)


def with_nan_everywhere(directory: Path) -> None:
    def change(_: Any, entries: list[dict[str, Any]]) -> None:
        for of in entries:
            if of["key"].endswith(NORM) and "exp_avg" not in of["key"]:
                of["data"] = NANS if of["data"] is not None else None

    for file in directory.glob("*/*.pt"):
        rewrite(file, change)


def of_local(step: int) -> Damage:
    """Put in a rank's file of another step, whose settings say step 3."""

    def damage(directory: Path) -> None:
        source = state(step=step)
        source = replace(source, values=replace(source.values, step=3, scheduler={"num_steps": 3}))
        write_local(directory.parent / "other", source)
        shutil.copy(directory.parent / "other" / LOCAL, directory / LOCAL)

    return damage


def rot_of(directory: Path) -> None:
    piece = next(
        p for p in map(open_checkpoint(directory).placed.piece, range(1000))
        if p.tensor.name == f"exp_avg/{EMBEDDING}" and p.box.offset != (0, 0)
    )  # fmt: skip
    data = np.memmap(directory / piece.file, np.uint8, "r+")
    data[piece.begin] ^= 1
    data.flush()


NANS = NewTensor("F32", (4,), np.full(4, np.nan, np.float32).tobytes())
MEGATRON_LOCAL = [
    Reject("path", on(link_outside, LOCAL), "is a link to outside of the checkpoint"),
    Reject("dtype", on(make_complex, LOCAL), "of an unknown kind"),
    Reject("dtype", local_entry(dtype=foreign("torch", "complex64")), "is of dtype"),
    Reject("shape", local_entry(global_shape=(-8, 4)), "has shape [-8, 4]"),
    Reject("shape", local_entry(global_offset=(6, 0)), "reaches outside of [8, 4]"),
    Reject("shape", local_entry(prepend_axis_num=1 << 60), "has shape [4, 4] of [8, 4]"),
    Reject("shape", local_entry(local_shape=(4, 2)), "F32[4, 2] by its entry"),
    Reject("hole", local_entry(data=None), "nobody holds 16 of the 32 elements of embedding.word"),
    Reject(
        "overlap",
        local_entry(
            global_offset=(3, 0), local_shape=(5, 4), data=NewTensor("F32", (5, 4), bytes(80))
        ),
        "overlap without being replicas",
    ),
    Reject(
        "duplicate",
        copy_other,
        "differ, and each is of rank 1 at iteration 3",
    ),
    Reject("missing file", lost("1"), "iteration 3 lacks rank 1"),
    Reject(
        "extra file", copied(LOCAL, "0/iter_0000003_7_local.pt"), "the job had 2 ranks",
    ),
    Reject("truncated", cut(LOCAL, 1), "lacks rank 1 ("),
    Reject("bomb", on(compress, LOCAL), "is compressed; torch stores plainly"),
    Reject("count", argued(world_size=1 << 40), "its job had 1099511"),
    Reject("digest", replaced(LOCAL, b"iteration", b"iterbtion"), "Bad CRC-32"),
    Reject("digest", rot_of, "are not what their CRC-32 was taken of", 4),
    Reject(
        "iterations", on(lambda file: rewrite(file, lambda common, _: common.update(iteration=5)),
                         LOCAL),
        "is of iteration 5 and rank 1 by its content",
    ),
    Reject("iterations", of_local(7), "files of two checkpoints are mixed", 4),
    Reject("world", argued(world_size=3), "lacks rank 2"),
    Reject("suspect", with_nan_everywhere, "nothing but NaN", 0),
    Reject("run", argued(LOCAL, seed=8), "differ in seed: they are of two jobs"),
    Reject("version", on(age, LOCAL), "is of version 99 of torch's format"),
    Reject("setting", argued(world_size="two"), "job had 'two' ranks"),
    Reject("code", on(plant, LOCAL), "os.system, which no checkpoint"),
]  # fmt: skip

# Megatron's legacy layout, of 2 tensor-parallel ranks by 2 stages.
RANK = f"{ITERATION}/mp_rank_01_001"
MODEL = f"{RANK}/model_optim_rng.pt"


def model(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """Change the state dict of a rank's model."""
    return edited(MODEL, lambda tree: {**tree, "model": change(tree["model"])})


def claim_many_ranks(directory: Path) -> None:
    claimed = argparse.Namespace(tensor_model_parallel_size=1 << 40, pipeline_model_parallel_size=2)
    for path in (directory / ITERATION).glob("*/model_optim_rng.pt"):
        merge(path, {"args": claimed})


def of_another(make: Callable[[], Checkpoint], file: str, **degrees: Any) -> Damage:
    """Put a file of another checkpoint in the place of one."""

    def damage(directory: Path) -> None:
        other = convert(make(), directory.parent / "other", tp=2, pp=2, **degrees)
        shutil.copy(other.directory / "mp_rank_01_001" / file, directory / RANK / file)

    return damage


def write_nonsense(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)
    path = directory / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content_of(lay_out_archive({"model": {}, "optimizer": 7, "iteration": 3})))


def hide_a_command(path: Path) -> None:
    hidden = pickle.dumps(print)
    rewrite_zip(path, lambda name, data: hidden if name.endswith("data.pkl") else data)


WIDE = {"decoder.layers.0.mlp.linear_fc2.weight": NewTensor("F32", (8, 12), bytes(384))}
TORCH = [
    *archived(MODEL, lambda view: {"model": {"w": view}, "iteration": 3}),
    Reject("hole", model(lambda state: without(state, NORM)), "does not fit its model"),
    Reject("overlap", model(lambda state: {**state, **WIDE}), "does not fit its model"),
    Reject(
        "duplicate", copied(RANK, f"{ITERATION}/mp_rank_001_001"),
        "mp_rank_001_001 and mp_rank_01_001 of one rank",
    ),
    Reject("missing file", lost(RANK), "the files of 1 ranks are missing (mp_rank_01_001)"),
    Reject("missing file", lost(MODEL), "mp_rank_01_001/model_optim_rng.pt is missing"),
    Reject(
        "missing file", lost(f"{RANK}/distrib_optim.pt"),
        "no whole distrib_optim.pt: the save or a copy was",
    ),
    Reject(
        "extra file", copied(RANK, f"{ITERATION}/mp_rank_02_001"),
        "the files of 1 ranks are not of this job (mp_rank_02_001)",
    ),
    Reject("count", claim_many_ranks, "the job had tp=1099511627776"),
    Reject("count", write_nonsense, "does not hold what a checkpoint of the layout torch does"),
    Reject(
        "iterations",
        of_another(lambda: replace(gpt(), values=replace(gpt().values, step=5)),
                   "model_optim_rng.pt"),
        "is of iteration 5, not 3. Files of two checkpoints",
    ),
    Reject(
        "iterations",
        of_another(lambda: replace(state(step=9, shapes=GPT_SHAPES), values=gpt().values),
                   "distrib_optim.pt"),
        "are not its weights",
    ),
    Reject("world", of_another(gpt, "model_optim_rng.pt", dp=4), "two checkpoints are mixed"),
    Reject("version", merged(MODEL, checkpoint_version=4.0), "has checkpoint_version 4.0, and 3.0"),
    Reject("code", on(hide_a_command, MODEL), "builtins.print, which no checkpoint"),
]  # fmt: skip

# DeepSpeed, of 2 data-parallel ranks.
TAG = "global_step3"
WHOLE = f"{TAG}/mp_rank_00_model_states.pt"
PART = f"{TAG}/zero_pp_rank_1_mp_rank_00_model_states.pt"
OPTIMIZER = TAG + "/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FIRST, SECOND = OPTIMIZER.format(0), OPTIMIZER.format(1)
IN_STATE: Callable[[View], Any] = lambda view: {"optimizer_state_dict": view}  # noqa: E731


def of_weight_lost(file: str, words: str) -> Reject:
    return Reject(
        "hole", edited(file, lambda tree: {**tree, "module": without(tree["module"], NORM)}), words
    )


def in_optimizer(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """Change the optimizer's state of rank 1."""
    return edited(
        SECOND,
        lambda tree: {
            **tree, "optimizer_state_dict": {
                **tree["optimizer_state_dict"], **change(tree["optimizer_state_dict"])
            },
        },
    )  # fmt: skip


def shorter_masters(state: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in state if name.endswith(("flat_groups", "fp32_groups")))
    return {name: [NewTensor("F32", (t.shape[0] - 1,), t.content[:-4]) for t in state[name]]}


def another_world(state: dict[str, Any]) -> dict[str, Any]:
    counts = state["partition_count"]
    return {"partition_count": [3] * len(counts) if isinstance(counts, list) else 3}


def settings(file: str) -> list[Reject]:
    """Cases of the stored configuration."""

    def put(**values: Any) -> Damage:
        return edited(
            file, lambda tree: {**tree, "ds_config": {**(tree["ds_config"] or {}), **values}}
        )

    logged = f"{Path(file).name}: ds_config has "
    sub_group = "zero_optimization.sub_group_size = 'abc', and a number that is not negative is"
    return [
        Reject("setting", put(zero_optimization={"sub_group_size": "abc"}), logged + sub_group),
        Reject(
            "setting", put(zero_optimization=[1]),
            logged + "zero_optimization = [1], and a table is expected",
        ),
        Reject(
            "setting", put(gradient_clipping=float("nan")),
            logged + "gradient_clipping = nan, and a number",
        ),
        Reject("setting", put(bf16="yes"), logged + "bf16 = 'yes', and a table is expected"),
    ]  # fmt: skip


def of_another_step(stage: int, file: str) -> Damage:
    def damage(directory: Path) -> None:
        other = directory.parent / "other"
        write(other, f"deepspeed_zero{stage}", deepspeed_state(step=6), dp=2)
        shutil.copy(other / file.replace("step3", "step6"), directory / file)

    return damage


def zero(stage: int, file: str) -> list[Reject]:
    """Cases of a stage whose ranks have files of their own; ``file``: the last one of weights."""
    missing = "a rank's file is missing"
    is_3 = stage == 3
    return [
        *settings(file),
        *archived(SECOND, IN_STATE),
        of_weight_lost(file, "trains decoder.final_layernorm.weight and has no"),
        Reject("hole", in_optimizer(shorter_masters), "are expected of these parameters"),
        Reject(
            "duplicate", copied(FIRST, OPTIMIZER.format("00")), "files of two checkpoints are mixed"
        ),
        Reject("missing file", lost(FIRST), "has no file of data-parallel rank 0 (of 2"),
        Reject(
            "missing file", lost(SECOND),
            missing if is_3 else "was saved by 2 data-parallel ranks, and has optim_states.pt of 1",
        ),
        Reject("missing file", lost(file), missing),
        Reject(
            "extra file", copied(FIRST, OPTIMIZER.format(2)),
            missing if is_3 else "was saved by 2 data-parallel ranks, and has optim_states.pt of 3",
        ),
        Reject(
            "count", copied(FIRST, OPTIMIZER.format(99999999999)),
            "has no file of data-parallel rank 2",
        ),
        Reject("world", in_optimizer(another_world), "is one of"),
        Reject("iterations", of_another_step(stage, SECOND), "has made 6.0 optimizer steps"),
        Reject("iterations", of_another_step(stage, file), "is of step 6"),
    ]  # fmt: skip


ZERO_1 = [
    *zero(1, WHOLE),
    Reject("duplicate", copied(WHOLE, f"{TAG}/mp_rank_000_model_states.pt"), "has 2 mp_rank_*"),
    Reject(
        "extra file", copied(WHOLE, f"{TAG}/mp_rank_01_model_states.pt"),
        "and 0 beside mp_rank_01_model_states.pt",
    ),
    Reject("truncated", written(WHOLE, b""), "model_states.pt is damaged or truncated"),
]  # fmt: skip


def lose_a_moment(tree: Any) -> Any:
    inner = tree["optimizer"]
    return {**tree, "optimizer": {**inner, "state": without(inner["state"], 1)}}


ZERO_0 = [
    *settings(WHOLE),
    *archived(WHOLE, IN_STATE),
    of_weight_lost(WHOLE, "no assignment to those of the module is possible"),
    Reject("hole", edited(WHOLE, lose_a_moment), "parameter 1 of the optimizer has no state"),
    Reject("extra file", copied(WHOLE, f"{TAG}/mp_rank_000_model_states.pt"), "has 2 mp_rank_*"),
    Reject("iterations", of_another_step(0, WHOLE), "is of step 6"),
]

UNIVERSAL_TAG = f"{TAG}_universal"
MODEL_STATES = f"{UNIVERSAL_TAG}/mp_rank_00_model_states.pt"
PARAMETER = f"{UNIVERSAL_TAG}/zero/{NORM}"
MASTER = f"{PARAMETER}/fp32.pt"


def claim_ranks(directory: Path) -> None:
    """As of stage 3, where each rank has a file."""
    (directory / MODEL_STATES).unlink()
    path = directory / UNIVERSAL_TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    merge(path, {"dp_world_size": 1 << 40})


UNIVERSAL = [
    *settings(MODEL_STATES),
    *archived(MASTER, lambda view: {"param": view}),
    of_weight_lost(MODEL_STATES, "trains decoder.final_layernorm.weight and has no"),
    Reject(
        "hole", merged(MASTER, param=NewTensor("F32", (5,), bytes(20))),
        "Files of two checkpoints are mixed",
    ),
    Reject("missing file", lost(MASTER), "the conversion to universal"),
    Reject("missing file", lost(f"{UNIVERSAL_TAG}/zero/optimizer_state.pt"), "no checkpoint of a"),
    Reject(
        "extra file", copied(PARAMETER, f"{UNIVERSAL_TAG}/zero/decoder.stray.weight"),
        "has zero/decoder.stray.weight, and no such parameter",
    ),
    Reject("truncated", cut(f"{PARAMETER}/exp_avg.pt", 9), "exp_avg.pt is damaged or truncated"),
    Reject("count", claim_ranks, "was made of 1099511627776 data-parallel ranks"),
    Reject("world", claim_ranks, "and has model_states.pt of 1"),
    Reject(
        "iterations",
        edited(f"{PARAMETER}/step.pt", lambda tree: NewTensor("F32", (), b"\0\0\xc0\x40")),
        "unequally many optimizer steps",
    ),
    Reject("iterations", merged(MODEL_STATES, global_steps=6), "is of step 6"),
]  # fmt: skip


# Experts of two expert-parallel ranks; their layer is the first of them.
def expert(number: int | str, layer: int = 0, mp: str = "00") -> str:
    return f"{TAG}/layer_{layer}_expert_{number}_mp_rank_{mp}_model_states.pt"


def move_the_layer(directory: Path, *, keeps: bool = False) -> None:
    for file in (directory / TAG).glob("layer_0_expert_*"):
        shutil.copy(file, directory / TAG / file.name.replace("layer_0", "layer_1"))
        if not keeps:
            file.unlink()


EXPERTS = [
    Reject("missing file", lost(expert(1)), "has no file of expert (of layer 0) 1 (of 4"),
    Reject("missing file", move_the_layer, "has no file of layer with experts 0 (of 2"),
    Reject("missing file", lost(expert(3)), "unequal expert-parallel sizes"),
    Reject("duplicate", copied(expert(2), expert(3)), "and tensors of expert 3 are expected"),
    Reject("duplicate", lambda at: move_the_layer(at, keeps=True), "as layer 1 and as another one"),
    Reject(
        "extra file", copied(expert(0), expert(0, mp="01")),
        "experts of several model-parallel ranks",
    ),
]  # fmt: skip

# Our own generations.
HOST, OTHER = "generation-1/offline", "generation-1/other"
FILE = f"{HOST}/rank-0.safetensors"
Edit = Callable[[dict[str, Any]], object]


def noted(edit: Edit, path: str = HOST) -> Damage:
    """Write a manifest again, with a digest that fits."""

    def damage(directory: Path) -> None:
        manifest = directory / path / "manifest.json"
        data = json.loads(manifest.read_text())
        del data["digest"]
        edit(data)
        manifest.write_text(json.dumps({"digest": digest_of(data), **data}))

    return damage


def tensor(place: int, value: Any) -> Damage:
    """Change the first tensor of the manifest: [name, shape, dtype]."""
    return noted(lambda data: data["collection"]["tensors"][0].__setitem__(place, value))


def with_a_part(edit: Edit = lambda data: None) -> Damage:
    """Add another host's part."""

    def damage(directory: Path) -> None:
        copied(HOST, OTHER)(directory)
        noted(lambda data: (data.update(host="other"), edit(data)), OTHER)(directory)

    return damage


def drop_a_row(data: dict[str, Any]) -> None:
    """As if a part that holds a piece of a tensor were not there."""
    for column in (data, data["collection"]):
        for name in ("file", "begin", "fingerprint", "tensor", "offset", "shape"):
            if name in column:
                del column[name][0]


def spoil_without_report(directory: Path) -> None:
    (directory / REPORT).unlink()
    SPOILT.damage(directory)


def nan_as_saved(directory: Path) -> None:
    """A generation notes fingerprints: NaN that was saved has one that fits."""
    shutil.rmtree(directory)
    source, nan = state(), np.full(4, np.nan, "f4").tobytes()
    files = tuple(
        replace(file, content=nan) if file.path == f"param/{NORM}" else file
        for file in source.placed.files
    )
    write(directory, "scalai", replace(source, placed=replace(source.placed, files=files)))


GENERATION = [
    Reject("path", noted(lambda d: d["files"][0].__setitem__(0, "../x")), "is not a file name"),
    Reject("path", on(link_outside, FILE), "is a link to outside"),
    Reject("dtype", tensor(2, "F4"), "is F4["),
    Reject("shape", tensor(1, [-8, 4]), "[-8, 4]"),
    Reject("shape", tensor(1, [1 << 62, 4]), "more than any disk"),
    Reject("shape", tensor(1, [1 << 80, 4]), "beyond 2^63"),
    Reject("hole", noted(drop_a_row), "the state is not whole"),
    Reject("duplicate", copied(HOST, OTHER), "two parts are of host 'offline'"),
    Reject("missing file", lost(FILE), "rank-0.safetensors is missing"),
    # As if a part were not there that alone knows of a tensor.
    Reject("missing file", noted(lambda d: d["about"].update(tensors=99)), "the part of a host is"),
    Reject("extra file", with_a_part(lambda d: d.update(generation=2)), "that it is generation 2"),
    Reject("truncated", cut(FILE, 1), "bytes long"),
    Reject("bomb", cut(FILE, -8), "bytes long"),
    Reject("bomb", noted(lambda d: d["begin"].__setitem__(0, 1 << 40)), "ends beyond"),
    Reject("count", noted(lambda d: d.update(begin=[0])), "values of begin for"),
    Reject("digest", replaced(f"{HOST}/manifest.json", b'"step":3', b'"step":4'), "its digest is"),
    Reject("digest", spoil_without_report, "says was written", 4),
    Reject("iterations", with_a_part(lambda d: d.update(step=4)), "Never mix generations"),
    Reject("suspect", nan_as_saved, "nothing but NaN", 0),
    Reject("run", with_a_part(lambda d: d["about"].update(snapshot="run-7")), "of several jobs or"),
    Reject("version", noted(lambda d: d.update(version=99)), "version 99; this release reads"),
    OF_THE_REPORT,
]


# torch.distributed.checkpoint of two ranks.
MARKS = b"checkpoint_version model.module."
"""Names by which Megatron-FSDP's files are told from others."""


def in_file(name: str, folder: str) -> str:
    return f"{folder}/{name}" if folder else name


def of_dcp(words: str, norm: str, folder: str) -> list[Reject]:
    """Return the cases of DCP's files in a folder. ``words``: a key of [8, 4] in two chunks of 4
    rows; ``norm``: one of [4]."""
    file, metadata = in_file("__1_0.distcp", folder), in_file(".metadata", folder)

    def changed(**values: Any) -> Damage:
        return key(lambda of: replace(of, **values), words, folder)

    return [
        Reject("path", point_at("../stolen", folder), "outside of the checkpoint"),
        Reject("path", point_at("/etc/hostname", folder), "outside of the checkpoint"),
        Reject("path", on(link_outside, file), "is a link to outside"),
        Reject(
            "dtype", replaced(metadata, b"torch\nfloat32\n", b"torch\ncomplex64\n"), "is of dtype"
        ),
        Reject("shape", changed(shape=(-8, 4)), "has shape [-8, 4]"),
        Reject("shape", changed(shape=(1 << 62, 4)), f"elements of {words}"),
        Reject(
            "shape", lambda at: change_chunks(at / folder, words, {"box": Box((6, 0), (4, 4))}),
            "reaches outside of [8, 4]",
        ),
        Reject(
            "hole", key(lambda of: replace(of, chunks=of.chunks[1:]), words, folder),
            "nobody holds 16 of the",
        ),
        Reject("overlap", lambda at: overlap(at, words, folder), "overlap without being replicas"),
        Reject(
            "duplicate", key(lambda of: replace(of, chunks=(of.chunks[0],) * 2), words, folder),
            "nobody holds 16 of the 32 elements",
        ),
        Reject("missing file", lost(file), "__1_0.distcp is missing"),
        Reject(
            "extra file", written(in_file("__7_0.distcp", folder), b"old"),
            "__7_0.distcp is left over from another save", 0,
        ),
        Reject("truncated", cut(file, 1), "__1_0.distcp is truncated: it has"),
        Reject("truncated", cut(metadata, 200), ".metadata holds a damaged pickle"),
        Reject(
            "bomb", lambda at: repeat_an_element(at, words, folder),
            "beyond its storage of 16 bytes",
        ),
        Reject(
            "iterations", lambda at: mix_two_keys(at, words, folder, norm),
            "Files of two checkpoints are mixed",
        ),
        Reject("version", replaced(metadata, b"1.0.0", b"2.0.0"), "is of version 2.0.0"),
        # The end tells a layout.
        Reject(
            "code", written(metadata, b"cos\nsystem\n" + PLANTED + MARKS), "os.system, which no"
        ),
        OF_THE_REPORT, SPOILT, NAN,
    ]  # fmt: skip


def rename_keys(old: str, new: str, folder: str = "") -> Damage:
    """Write ``.metadata`` again with other names of keys."""

    def damage(directory: Path) -> None:
        found = read_metadata(directory / folder)
        tensors = [replace(of, key=of.key.replace(old, new)) for of in found.tensors]
        paths = {
            key.replace(old, new): ("model", key.replace(old, new).removeprefix("model."))
            if key.startswith("model.")
            else path
            for key, path in found.paths.items()
        }
        data = write_metadata(tensors, found.objects, paths if folder else {})
        (directory / folder / ".metadata").write_bytes(data)

    return damage


STORED = "scalai_values.pt"
DCP = [
    *of_dcp(f"model.{EMBEDDING}", f"model.{NORM}", ""),
    Reject(
        "hole", rename_keys(f"model.{NORM}", "model.other"),
        "optimizer states of 1 parameters that are not in it: decoder.final_layernorm.weight",
    ),
    Reject("hole", rename_keys("optimizer.state.", "optimizer.state.0."), "that are not in it"),
    Reject("truncated", cut(STORED, 1), "scalai_values.pt is damaged or truncated"),
    Reject("bomb", on(compress, STORED), "is compressed; torch stores plainly"),
    Reject("digest", replaced(STORED, b"framework", b"framewor_"), "Bad CRC-32"),
    Reject("version", merged(STORED, version=99), "scalai_values.pt is of version 99"),
    Reject("setting", merged(STORED, step="3", extra=7), "is damaged: step, extra is odd"),
    Reject("code", on(plant, STORED), "os.system, which no checkpoint"),
]  # fmt: skip


# Megatron-FSDP's, of two ranks.
FC1 = "module.decoder.layers.0.mlp.linear_fc1.weight"
SMALL_GPT = {
    EMBEDDING: (8, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": (8, 4),
    "decoder.layers.0.mlp.linear_fc2.weight": (4, 4),
    NORM: (4,),
}


def write_fsdp_dtensor(directory: Path) -> None:
    """A GPT of one layer with a gate."""
    write(directory, "fsdp_dtensor", gpt(SMALL_GPT, swiglu=True), dp=2)


def of_fsdp(**changed: Any) -> Damage:
    """Write an object of the tree anew."""

    def damage(directory: Path) -> None:
        here = directory / ITERATION
        found, objects = read_metadata(here), {}
        data = b"".join(content_of(lay_out_archive(value)) for value in changed.values())
        (here / "__2_0.distcp").write_bytes(data)
        begin = 0
        for key, value in changed.items():
            size = len(content_of(lay_out_archive(value)))
            objects[key] = Extent("__2_0.distcp", begin, size)
            begin += size
        objects = {**found.objects, **objects}
        paths = {**{key: tuple(key.split(".")) for key in changed}, **found.paths}
        (here / ".metadata").write_bytes(write_metadata(found.tensors, objects, paths))

    return damage


def forget_places(directory: Path) -> None:
    found = read_metadata(directory / ITERATION)
    data = write_metadata(found.tensors, found.objects, {})
    (directory / ITERATION / ".metadata").write_bytes(data)


def renamed(old: str, new: str) -> Damage:
    return rename_keys(old, new, ITERATION)


FSDP_DTENSOR = [
    *of_dcp(f"model.module.{EMBEDDING}", f"model.module.{NORM}", ITERATION),
    Reject("hole", renamed(f"model.{FC1}_w", f"model.{FC1}_u"), "are not the gate (_w) and the up"),
    Reject("hole", renamed(f"model.module.{NORM}", "model.module.x"), "which is no parameter in"),
    Reject("hole", forget_places, "does not note the place of model.module."),
    Reject(
        "hole", of_fsdp(args=argparse.Namespace(num_layers=3)),
        "has 1 layers by its tensors, and 3 by its arguments",
    ),
    Reject("iterations", of_fsdp(iteration=5), ".metadata is of iteration 5, not 3"),
    Reject("setting", of_fsdp(iteration="3"), "has iteration '3'"),
    Reject(
        "setting", of_fsdp(args=argparse.Namespace(pipeline_model_parallel_size=2)),
        "is of pp=2, whose stages' layers have the same names",
    ),
    Reject("setting", of_fsdp(**{"optimizer.1": 7}), "of an optimizer other than one Adam"),
]  # fmt: skip


def write_dcp_alone(directory: Path) -> None:
    """As a job of torch saves it."""
    write(directory, "dcp", dp=2)
    (directory / STORED).unlink()
    (directory / REPORT).unlink()


# Hugging Face's safetensors, in several files with an index.
def write_shards(directory: Path) -> None:
    with patch("scalai.converters.safetensors_index.FILE_BYTES", 200):
        write(directory, "safetensors")


INDEX = "model.safetensors.index.json"


def shard(directory: Path, number: int = 0) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[number]


def in_shard(change: Callable[[Path], object]) -> Damage:
    return lambda directory: change(shard(directory))


def header(
    edit: Edit = lambda entries: None, *, text: Callable[[str], str] = lambda text: text
) -> Damage:
    """Write the header of the first file again, and leave the tensors."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        edit(entries)
        new = text(json.dumps(entries)).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])

    return in_shard(damage)


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(of for name, of in entries.items() if name != "__metadata__")


def entry(**values: Any) -> Damage:
    """Change the first tensor of the first file's header."""
    return header(lambda entries: first(entries).update(values))


def repeated(text: str) -> str:
    """Return a header with one entry twice."""
    entries = json.loads(text)
    name = next(name for name in entries if name != "__metadata__")
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}"


def index(edit: Callable[[dict[str, str]], object]) -> Damage:
    """Change the files of tensors in the index."""

    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        edit(data["weight_map"])
        path.write_text(json.dumps(data))

    return on(damage, INDEX)


def named(value: str) -> Damage:
    return index(lambda entries: entries.update({next(iter(entries)): value}))


def lose_the_index(directory: Path) -> None:
    shutil.copy(shard(directory), directory / "model.safetensors")
    (directory / INDEX).unlink()


def forget_a_shard(directory: Path) -> None:
    """The index and the files of a part of a model."""
    path = shard(directory)
    path.unlink()

    def forget(entries: dict[str, str]) -> None:
        for name in [name for name, file in entries.items() if file == path.name]:
            del entries[name]

    index(forget)(directory)


def claim_a_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def nested(_: str) -> str:
    return '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"


SAFETENSORS = [
    Reject("path", named("../x.safetensors"), "is no file beside it"),
    Reject("path", named("/etc/passwd"), "is no file beside it"),
    Reject("path", in_shard(link_outside), "is a link to outside"),
    Reject("dtype", entry(dtype="F4"), "is of dtype 'F4'"),
    Reject("shape", entry(shape=[-8, 4]), "shape [-8, 4]"),
    Reject("shape", entry(shape=[1 << 62, 4]), "lies at"),
    Reject("shape", entry(shape=[8.5, 4]), "shape [8.5, 4]"),
    Reject("hole", entry(data_offsets=[4, 132]), "lies at 4:132"),
    Reject("overlap", header(lambda e: e.update(other={**first(e)})), "lies at 0:"),
    Reject("duplicate", header(text=repeated), "comes twice"),
    Reject("duplicate", lambda at: shutil.copy(shard(at), shard(at, 1)), "and in model-00001"),
    Reject("missing file", in_shard(Path.unlink), "is missing; model.safetensors.index.json"),
    Reject("missing file", lose_the_index, "the index is missing"),
    Reject(
        "extra file",
        lambda at: shutil.copy(shard(at), at / "model-00001-of-00099.safetensors"),
        "no index names it",
    ),
    Reject(
        "truncated", in_shard(lambda path: os.truncate(path, path.stat().st_size - 1)),
        "is damaged or truncated",
    ),
    Reject("bomb", in_shard(claim_a_header), "a header of 1099511627776 bytes"),
    Reject("bomb", in_shard(lambda path: os.truncate(path, 1 << 20)), "by its header"),
    Reject("count", entry(shape=[1] * 99), "has shape [1, 1"),
    Reject("count", header(text=nested), "nested too deep"),
    Reject("digest", spoil(f"param/{NORM}"), "says was written", 4),
    Reject("world", forget_a_shard, "by their names"),
    OF_THE_REPORT, NAN,
]  # fmt: skip

MAKERS: dict[str, Callable[[Path], object]] = {
    "torch_dist": lambda path: write(path, tp=2),
    "torch_dist-object": lambda path: write(path, source=newest(), tp=2),
    "torch": lambda path: convert(gpt(), path, tp=2, pp=2),
    "torch-whole": lambda path: convert(gpt(), path, is_split=False, tp=2),
    "deepspeed_zero0": lambda path: write(path, "deepspeed_zero0", deepspeed_state(), dp=2),
    "deepspeed_zero1": lambda path: write(path, "deepspeed_zero1", deepspeed_state(), dp=2),
    "deepspeed_zero3": lambda path: write(path, "deepspeed_zero3", deepspeed_state(), dp=2),
    "experts-zero0": lambda path: write(path, "deepspeed_zero0", experts_state(), dp=2, ep=2),
    "experts-zero2": lambda path: write(path, "deepspeed_zero2", experts_state(), dp=4, ep=2),
    "deepspeed_universal": lambda path: write(path, "deepspeed_universal", deepspeed_state(), dp=1),
    "megatron_local": write_local,
    "dcp": lambda path: write(path, "dcp", dp=2),
    "dcp-alone": write_dcp_alone,
    "fsdp_dtensor": write_fsdp_dtensor,
    "scalai": lambda path: write(path, "scalai"),
    "safetensors": write_shards,
}
"""Whole checkpoints by layout, and by their forms."""

NO_JOB = "nothing in it says of which job it is"
NO_PLACES = "files say no places: they follow from shapes, and sizes must fit exactly"
TABLE: dict[str, tuple[list[Reject], dict[str, str]]] = {
    "torch_dist": (
        TORCH_DIST,
        {
            "setting": "arguments travel as they are; the degrees among them decide nothing",
            "world": "what lies where is told by .metadata alone, not by names of files",
            "run": NO_JOB,
        },
    ),
    "torch": (
        TORCH,
        {"setting": "arguments travel as they are; their degrees are the files'", "run": NO_JOB},
    ),
    "megatron_local": (MEGATRON_LOCAL, {}),
    "deepspeed_zero0": (
        ZERO_0,
        {
            "overlap": "every tensor is whole",
            "duplicate": "one file, whose dictionaries have a key once",
            "missing file": "one file: without it there is no checkpoint",
            "count": "nothing in it is counted",
            "world": "every rank is equal, and one file holds all",
            "run": NO_JOB,
        },
    ),
    "deepspeed_zero1": (ZERO_1, {"overlap": NO_PLACES, "run": NO_JOB}),
    "deepspeed_zero3": (zero(3, PART), {"overlap": NO_PLACES, "run": NO_JOB}),
    "deepspeed_universal": (
        UNIVERSAL,
        {
            "overlap": "every tensor is whole in a file of its own",
            "duplicate": "a folder has one name",
            "run": NO_JOB,
        },
    ),
    "dcp": (
        DCP,
        {
            "count": "pieces are no more than the entries of .metadata",
            "world": "what lies where is told by .metadata alone, not by names of files",
            "run": NO_JOB,
        },
    ),
    "fsdp_dtensor": (
        FSDP_DTENSOR,
        {
            "count": "pieces are no more than the entries of .metadata",
            "world": "what lies where is told by .metadata alone, not by names of files",
            "run": NO_JOB,
        },
    ),
    "scalai": (
        GENERATION,
        {
            "setting": "it holds no settings that decide how it is read",
            "overlap": "pieces that hosts fetched from each other may overlap: all are proven",
            "world": "no file is named by a rank of a world",
            "code": "JSON and raw bytes alone",
        },
    ),
    "safetensors": (
        SAFETENSORS,
        {
            "setting": "it holds no settings of a job",
            "iterations": "weights without a step",
            "run": NO_JOB,
            "code": "JSON and raw bytes alone",
        },
    ),
}
"""By layout its cases, and the reasons for items without one."""
