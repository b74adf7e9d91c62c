"""What is refused of Megatron's layouts, and with which words."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey, read_metadata
from scalai.converters.megatron.torch_dist_writer import content_of
from scalai.converters.torch_archive import NewTensor, lay_out_archive
from scalai.core.tensors.region import Box
from support.checkpoints import state, write
from support.damage import (
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
from support.legacy_checkpoints import SHARED, convert, gpt
from support.rejects import Case, rename, report_version, spoil, with_nan

ITERATION = "iter_0000003"
EMBEDDING = "embedding.word_embeddings.weight"
"""[8, 4], in two chunks of [4, 4]."""
RANK = f"{ITERATION}/mp_rank_01_001"
MODEL = f"{RANK}/model_optim_rng.pt"


def point_at(file: str) -> Any:
    def damage(directory: Path) -> None:
        here = directory / ITERATION
        extent = read_metadata(here).tensors[0].chunks[0].extent
        shutil.copy(here / extent.file, directory / "stolen")
        key = read_metadata(here).tensors[0].key
        change_chunks(here, key, {"extent": replace(extent, file=file)})

    return rename(damage, f"point_at_{Path(file).name}_{'absolute' * file.startswith('/')}")


def name_a_dtype(directory: Path) -> None:
    path = directory / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"torch\nfloat32\n", b"torch\ncomplex64\n"))


def make_a_size_negative(directory: Path) -> None:
    change_key(directory / ITERATION, EMBEDDING, lambda stored: replace(stored, shape=(-8, 4)))


def make_a_size_overflow(directory: Path) -> None:
    change_key(directory / ITERATION, EMBEDDING, lambda stored: replace(stored, shape=(1 << 62, 4)))


def repeat_an_element(directory: Path) -> None:
    """A tensor of 2**62 elements by strides of 0, in a file of some bytes."""
    here = directory / ITERATION
    path = here / "__2_0.distcp"
    write_view(path, View((1 << 62, 4), (0, 1)))
    extent = Extent(path.name, 0, path.stat().st_size)
    chunk = Chunk(Box((0, 0), (1 << 62, 4)), extent)
    change_key(here, EMBEDDING, lambda s: replace(s, shape=(1 << 62, 4), chunks=(chunk,)))


def leave_a_hole(directory: Path) -> None:
    def drop(stored: StoredKey) -> StoredKey:
        return replace(stored, chunks=stored.chunks[1:])

    change_key(directory / ITERATION, EMBEDDING, drop)


def store_a_chunk_twice(directory: Path) -> None:
    def double(stored: StoredKey) -> StoredKey:
        return replace(stored, chunks=(stored.chunks[0], stored.chunks[0]))

    change_key(directory / ITERATION, EMBEDDING, double)


def overlap(directory: Path) -> None:
    here = directory / ITERATION
    data = content_of(lay_out_archive(NewTensor("F32", (5, 4), bytes(80))))
    (here / "__2_0.distcp").write_bytes(data)
    chunk = Chunk(Box((3, 0), (5, 4)), Extent("__2_0.distcp", 0, len(data)))
    change_key(here, EMBEDDING, lambda s: replace(s, chunks=(s.chunks[0], chunk)))


def reach_outside(directory: Path) -> None:
    here = directory / ITERATION
    change_chunks(here, EMBEDDING, {"box": Box((6, 0), (4, 4))})


def claim_many_layers(directory: Path) -> None:
    def claim(stored: StoredKey) -> StoredKey:
        shape = (1 << 40, 0, 16)
        return replace(
            stored, shape=shape, chunks=(replace(stored.chunks[0], box=Box((0,) * 3, shape)),)
        )

    change_key(directory / ITERATION, "decoder.layers.mlp.linear_fc2.weight", claim)


def mix_two_keys(directory: Path) -> None:
    here = directory / ITERATION
    other = next(
        stored for stored in read_metadata(here).tensors
        if stored.key == "decoder.final_layernorm.weight"
    )  # fmt: skip
    change_chunks(here, "decoder.layers.mlp.linear_fc2.bias", {"extent": other.chunks[0].extent})


def lose_the_last_layer(directory: Path) -> None:
    """As a save that keeps one rank's layers: nothing but the arguments tells of the others."""
    merge(directory / ITERATION / "common.pt", {"args": arguments(num_layers=3)})


def arguments(**given: Any) -> Any:
    import argparse

    return argparse.Namespace(**given)


def lose(name: str) -> Any:
    return rename(lambda directory: (directory / ITERATION / name).unlink(), f"lose_{name}")


def truncate(directory: Path) -> None:
    file = directory / ITERATION / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def add_a_stray_file(directory: Path) -> None:
    (directory / ITERATION / "__7_0.distcp").write_bytes(b"old")


def cut_the_metadata(directory: Path) -> None:
    path = directory / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes()[:-200])


def flip_a_bit_of_the_pickle(directory: Path) -> None:
    path = directory / ITERATION / "common.pt"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"iteration", b"iterbtion", 1))


def mix_common_parts(directory: Path) -> None:
    other = write(directory.parent / "other", source=state(step=5), tp=2)
    shutil.copy(other.directory / "common.pt", directory / ITERATION / "common.pt")


def mark(**entries: Any) -> Any:
    def damage(directory: Path) -> None:
        path = directory / ITERATION / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return rename(damage, "mark_" + "_".join(entries))


def age_the_metadata(directory: Path) -> None:
    path = directory / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"1.0.0", b"2.0.0"))


def plant_in_the_metadata(directory: Path) -> None:
    (directory / ITERATION / ".metadata").write_bytes(
        b"cos\nsystem\n(S'touch /tmp/this-must-not-be'\ntR."
    )


def call_a_function_of_torch(directory: Path) -> None:
    (directory / ITERATION / ".metadata").write_bytes(
        b"ctorch.utils.collect_env\nrun\n(S'touch /tmp/this-must-not-be'\ntR."
    )


def on(change: Any, name: str) -> Any:
    """Return a damage of one file."""
    return rename(
        lambda directory: change(directory / name), f"{change.__name__}_{Path(name).name}"
    )


COMMON = f"{ITERATION}/common.pt"
TORCH_DIST = [
    Case("path", point_at("../stolen"), "outside of the checkpoint"),
    Case("path", point_at("/etc/hostname"), "outside of the checkpoint"),
    Case("path", on(link_outside, f"{ITERATION}/__1_0.distcp"), "is a link to outside"),
    Case("dtype", name_a_dtype, "is of dtype"),
    Case("shape", make_a_size_negative, "has shape [-8, 4]"),
    Case("shape", make_a_size_overflow, "elements of embedding.word_embeddings.weight"),
    Case("shape", reach_outside, "reaches outside of [8, 4]"),
    Case("hole", leave_a_hole, "nobody holds 16 of the 32 elements of embedding.word_embeddings"),
    Case("hole", lose_the_last_layer, "has 2 layers by its tensors, and 3 by its arguments"),
    Case("overlap", overlap, "overlap without being replicas"),
    Case("duplicate", store_a_chunk_twice, "nobody holds 16 of the 32 elements"),
    Case("missing file", lose("__1_0.distcp"), "__1_0.distcp is missing"),
    Case("missing file", lose("common.pt"), "has no common.pt, and .metadata places no"),
    Case("missing file", lose(".metadata"), ".metadata cannot be read"),
    Case("missing file", lose("metadata.json"), "so the save was interrupted"),
    Case("extra file", add_a_stray_file, "__7_0.distcp is left over from another save", 0),
    Case("truncated", truncate, "__1_0.distcp is truncated: it has"),
    Case("truncated", cut_the_metadata, ".metadata holds a damaged pickle"),
    Case("bomb", on(compress, COMMON), "is compressed; torch stores plainly"),
    Case("bomb", repeat_an_element, "reaches beyond its storage of 16 bytes"),
    Case("count", claim_many_layers, "pieces of layers, and at most"),
    Case("digest", flip_a_bit_of_the_pickle, "Bad CRC-32"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case("iterations", mix_common_parts, "common.pt is of iteration 5, not 3"),
    Case("iterations", mix_two_keys, "Files of two checkpoints are mixed"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", mark(sharded_backend_version=2), "has sharded_backend_version 2, and 1 is"),
    Case("version", mark(sharded_backend="zarr"), "is of the format 'zarr'"),
    Case("version", age_the_metadata, "is of version 2.0.0"),
    Case("version", on(age, COMMON), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", on(plant, COMMON), "os.system, which no checkpoint"),
    Case("code", plant_in_the_metadata, "os.system, which no checkpoint"),
    Case("code", call_a_function_of_torch, "calls torch.utils.collect_env.run, which no"),
]
TORCH_DIST_NOT = {
    "setting": "arguments travel as they are, and the degrees among them decide nothing",
    "world": "what lies where is told by .metadata alone, not by names of files",
    "run": "nothing in it says of which job it is",
}


def drop_a_weight(directory: Path) -> None:
    def drop(tree: Any) -> Any:
        name = "decoder.final_layernorm.weight"
        return {**tree, "model": {k: v for k, v in tree["model"].items() if k != name}}

    change_tree(directory / MODEL, drop)


def grow_a_weight(directory: Path) -> None:
    def grow(tree: Any) -> Any:
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        return {**tree, "model": {**tree["model"], name: NewTensor("F32", (8, 12), bytes(384))}}

    change_tree(directory / MODEL, grow)


def make_a_weight_negative(directory: Path) -> None:
    write_view(directory / MODEL, {"model": {"w": View((-4,), (1,))}, "iteration": 3})


def repeat_elements(directory: Path) -> None:
    write_view(directory / MODEL, {"model": {"w": View((1 << 50, 4), (0, 1))}, "iteration": 3})


def name_a_rank_twice(directory: Path) -> None:
    shutil.copytree(directory / RANK, directory / ITERATION / "mp_rank_001_001")


def add_a_rank(directory: Path) -> None:
    shutil.copytree(directory / RANK, directory / ITERATION / "mp_rank_02_001")


def lose_a_rank(directory: Path) -> None:
    shutil.rmtree(directory / RANK)


def lose_a_file(directory: Path) -> None:
    (directory / MODEL).unlink()


def lose_the_buffers(directory: Path) -> None:
    (directory / RANK / "distrib_optim.pt").unlink()


def truncate_a_rank(directory: Path) -> None:
    os.truncate(directory / MODEL, (directory / MODEL).stat().st_size - 1)


def claim_many_ranks(directory: Path) -> None:
    for path in (directory / ITERATION).glob("*/model_optim_rng.pt"):
        merge(path, {"args": arguments(
            tensor_model_parallel_size=1 << 40, pipeline_model_parallel_size=2
        )})  # fmt: skip


def other_legacy(directory: Path, source: Checkpoint, file: str, **degrees: int) -> None:
    """Put a file of another checkpoint in the place of one."""
    other = convert(source, directory.parent / "other", **{**SHARED, **degrees})
    shutil.copy(other.directory / "mp_rank_01_001" / file, directory / RANK / file)


def mix_iterations(directory: Path) -> None:
    made = gpt()
    made = replace(made, values=replace(made.values, step=5))
    other_legacy(directory, made, "model_optim_rng.pt")


def mix_degrees(directory: Path) -> None:
    other_legacy(directory, gpt(), "model_optim_rng.pt", dp=4)


def mix_buffers(directory: Path) -> None:
    made = replace(state(step=9, shapes=gpt_shapes()), values=gpt().values)
    other_legacy(directory, made, "distrib_optim.pt")


def gpt_shapes() -> dict[str, tuple[int, ...]]:
    tensors = gpt().placed.collection.tensors
    return {t.name[6:]: t.shape for t in tensors if t.name.startswith("param/")}


def write_nonsense(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)
    path = directory / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content_of(lay_out_archive({"model": {}, "optimizer": 7, "iteration": 3})))


def age_the_weights(directory: Path) -> None:
    merge(directory / MODEL, {"checkpoint_version": 4.0})


def hide_a_command(directory: Path) -> None:
    rewrite_zip(
        directory / MODEL,
        lambda name, data: pickle.dumps(print) if name.endswith("data.pkl") else data,
    )


TORCH = [
    Case("path", on(link_outside, MODEL), "is a link to outside"),
    Case("dtype", on(make_complex, MODEL), "of an unknown kind"),
    Case("shape", make_a_weight_negative, "a tensor [-4] reaches beyond its storage"),
    Case("hole", drop_a_weight, "does not fit its model"),
    Case("overlap", grow_a_weight, "does not fit its model"),
    Case("duplicate", name_a_rank_twice, "mp_rank_001_001 and mp_rank_01_001 of one rank"),
    Case("missing file", lose_a_rank, "the files of 1 ranks are missing (mp_rank_01_001)"),
    Case("missing file", lose_a_file, "mp_rank_01_001/model_optim_rng.pt is missing"),
    Case("missing file", lose_the_buffers, "no whole distrib_optim.pt: the save or a copy was"),
    Case("extra file", add_a_rank, "the files of 1 ranks are not of this job (mp_rank_02_001)"),
    Case("truncated", truncate_a_rank, "is damaged or truncated"),
    Case("bomb", on(compress, MODEL), "is compressed; torch stores plainly"),
    Case("bomb", repeat_elements, "reaches beyond its storage of 16 bytes"),
    Case("count", claim_many_ranks, "the job had tp=1099511627776"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case("iterations", mix_iterations, "is of iteration 5, not 3. Files of two checkpoints"),
    Case("iterations", mix_buffers, "are not its weights"),
    Case("world", mix_degrees, "Files of two checkpoints are mixed"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", age_the_weights, "has checkpoint_version 4.0, and 3.0 is read"),
    Case("version", on(age, MODEL), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", on(plant, MODEL), "os.system, which no checkpoint"),
    Case("code", hide_a_command, "builtins.print, which no checkpoint"),
    Case("count", write_nonsense, "does not hold what a checkpoint of the layout torch does"),
]
TORCH_NOT = {
    "setting": "arguments travel as they are; the degrees among them are those of the files",
    "run": "nothing in it says of which job it is",
}
