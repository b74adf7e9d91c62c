"""Refusals of Megatron's layouts: the damage, and the words."""

import argparse
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import REPORT, Checkpoint
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey, read_metadata
from scalai.converters.megatron.torch_dist_writer import content_of
from scalai.converters.torch_archive import NewTensor, lay_out_archive
from scalai.core.tensors.region import Box
from support.checkpoints import state, write
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
from support.legacy_checkpoints import SHAPES, SHARED, convert, gpt
from support.rejects import (
    Case,
    copied,
    cut,
    lost,
    on,
    replaced,
    report_version,
    spoil,
    with_nan,
    written,
)

ITERATION = "iter_0000003"
METADATA, COMMON = f"{ITERATION}/.metadata", f"{ITERATION}/common.pt"
EMBEDDING = "embedding.word_embeddings.weight"
"""[8, 4], in two chunks of [4, 4]."""
RANK = f"{ITERATION}/mp_rank_01_001"
MODEL = f"{RANK}/model_optim_rng.pt"


def key(change: Callable[[StoredKey], StoredKey], name: str = EMBEDDING) -> Damage:
    return on(lambda here: change_key(here, name, change), ITERATION)


def point_at(file: str) -> Damage:
    def damage(directory: Path) -> None:
        first = read_metadata(directory / ITERATION).tensors[0]
        extent = first.chunks[0].extent
        shutil.copy(directory / ITERATION / extent.file, directory / "stolen")
        change_chunks(directory / ITERATION, first.key, {"extent": replace(extent, file=file)})

    return damage


def repeat_an_element(directory: Path) -> None:
    """A tensor of 2**62 elements by strides of 0, in a file of some bytes."""
    path = directory / ITERATION / "__2_0.distcp"
    write_view(path, View((1 << 62, 4), (0, 1)))
    chunk = Chunk(Box((0, 0), (1 << 62, 4)), Extent(path.name, 0, path.stat().st_size))
    key(lambda stored: replace(stored, shape=(1 << 62, 4), chunks=(chunk,)))(directory)


def overlap(directory: Path) -> None:
    data = content_of(lay_out_archive(NewTensor("F32", (5, 4), bytes(80))))
    (directory / ITERATION / "__2_0.distcp").write_bytes(data)
    chunk = Chunk(Box((3, 0), (5, 4)), Extent("__2_0.distcp", 0, len(data)))
    key(lambda stored: replace(stored, chunks=(stored.chunks[0], chunk)))(directory)


def many_layers(stored: StoredKey) -> StoredKey:
    shape = (1 << 40, 0, 16)
    chunk = replace(stored.chunks[0], box=Box((0,) * 3, shape))
    return replace(stored, shape=shape, chunks=(chunk,))


def mix_two_keys(directory: Path) -> None:
    tensors = {stored.key: stored for stored in read_metadata(directory / ITERATION).tensors}
    extent = tensors["decoder.final_layernorm.weight"].chunks[0].extent
    bias = "decoder.layers.mlp.linear_fc2.bias"
    change_chunks(directory / ITERATION, bias, {"extent": extent})


def mix_common_parts(directory: Path) -> None:
    other = write(directory.parent / "other", source=state(step=5), tp=2)
    shutil.copy(other.directory / "common.pt", directory / COMMON)


def mix_files(directory: Path) -> None:
    """A file of another step whose settings say this one, as if Megatron had written it."""
    source = state(step=7)
    source = replace(source, values=replace(source.values, step=3))
    name = write(directory.parent / "other", source=source, tp=2).directory / "__1_0.distcp"
    shutil.copy(name, directory / ITERATION)
    (directory / REPORT).unlink()


def mark(**entries: Any) -> Damage:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return on(change, f"{ITERATION}/metadata.json")


def merged(path: str, **entries: Any) -> Damage:
    return on(lambda file: merge(file, entries), path)


TORCH_DIST = [
    Case("path", point_at("../stolen"), "outside of the checkpoint"),
    Case("path", point_at("/etc/hostname"), "outside of the checkpoint"),
    Case("path", on(link_outside, f"{ITERATION}/__1_0.distcp"), "is a link to outside"),
    Case("dtype", replaced(METADATA, b"torch\nfloat32\n", b"torch\ncomplex64\n"), "is of dtype"),
    Case("shape", key(lambda stored: replace(stored, shape=(-8, 4))), "has shape [-8, 4]"),
    Case(
        "shape", key(lambda stored: replace(stored, shape=(1 << 62, 4))),
        "elements of embedding.word_embeddings.weight",
    ),
    Case(
        "shape",
        on(lambda at: change_chunks(at, EMBEDDING, {"box": Box((6, 0), (4, 4))}), ITERATION),
        "reaches outside of [8, 4]",
    ),
    Case(
        "hole", key(lambda stored: replace(stored, chunks=stored.chunks[1:])),
        "nobody holds 16 of the 32 elements of embedding.word_embeddings",
    ),
    # As a save that keeps one rank's layers: nothing but the arguments tells of the others.
    Case(
        "hole", merged(COMMON, args=argparse.Namespace(num_layers=3)),
        "has 2 layers by its tensors, and 3 by its arguments",
    ),
    Case("overlap", overlap, "overlap without being replicas"),
    Case(
        "duplicate", key(lambda stored: replace(stored, chunks=(stored.chunks[0],) * 2)),
        "nobody holds 16 of the 32 elements",
    ),
    Case("missing file", lost(f"{ITERATION}/__1_0.distcp"), "__1_0.distcp is missing"),
    Case("missing file", lost(COMMON), "has no common.pt, and .metadata places no"),
    Case("missing file", lost(METADATA), ".metadata cannot be read"),
    Case("missing file", lost(f"{ITERATION}/metadata.json"), "so the save was interrupted"),
    Case(
        "extra file", written(f"{ITERATION}/__7_0.distcp", b"old"),
        "__7_0.distcp is left over from another save", 0,
    ),
    Case("truncated", cut(f"{ITERATION}/__1_0.distcp", 1), "__1_0.distcp is truncated: it has"),
    Case("truncated", cut(METADATA, 200), ".metadata holds a damaged pickle"),
    Case("bomb", on(compress, COMMON), "is compressed; torch stores plainly"),
    Case("bomb", repeat_an_element, "reaches beyond its storage of 16 bytes"),
    Case(
        "count", key(many_layers, "decoder.layers.mlp.linear_fc2.weight"),
        "pieces of layers, and at most",
    ),
    Case("digest", replaced(COMMON, b"iteration", b"iterbtion"), "Bad CRC-32"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case("iterations", mix_common_parts, "common.pt is of iteration 5, not 3"),
    Case("iterations", mix_two_keys, "Files of two checkpoints are mixed"),
    Case("iterations", mix_files, "files of two checkpoints are mixed", 4),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", mark(sharded_backend_version=2), "has sharded_backend_version 2, and 1 is"),
    Case("version", mark(sharded_backend="zarr"), "is of the format 'zarr'"),
    Case("version", replaced(METADATA, b"1.0.0", b"2.0.0"), "is of version 2.0.0"),
    Case("version", on(age, COMMON), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", on(plant, COMMON), "os.system, which no checkpoint"),
    Case(
        "code", written(METADATA, b"cos\nsystem\n(S'touch /tmp/this-must-not-be'\ntR."),
        "os.system, which no checkpoint",
    ),
    Case(
        "code",
        written(METADATA, b"ctorch.utils.collect_env\nrun\n(S'touch /tmp/this-must-not-be'\ntR."),
        "calls torch.utils.collect_env.run, which no",
    ),
]  # fmt: skip
TORCH_DIST_NOT = {
    "setting": "arguments travel as they are, and the degrees among them decide nothing",
    "world": "what lies where is told by .metadata alone, not by names of files",
    "run": "nothing in it says of which job it is",
}


def model(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """Change the state dict of a rank's model."""

    def damage(path: Path) -> None:
        change_tree(path, lambda tree: {**tree, "model": change(tree["model"])})

    return on(damage, MODEL)


def without(name: str) -> Damage:
    return model(lambda state: {key: value for key, value in state.items() if key != name})


def view(shape: tuple[int, ...], stride: tuple[int, ...]) -> Damage:
    tree = {"model": {"w": View(shape, stride)}, "iteration": 3}
    return on(lambda path: write_view(path, tree), MODEL)


def claim_many_ranks(directory: Path) -> None:
    claimed = argparse.Namespace(tensor_model_parallel_size=1 << 40, pipeline_model_parallel_size=2)
    for path in (directory / ITERATION).glob("*/model_optim_rng.pt"):
        merge(path, {"args": claimed})


def of_another(make: Callable[[], Checkpoint], file: str, **degrees: int) -> Damage:
    """Put a file of another checkpoint in the place of one."""

    def damage(directory: Path) -> None:
        other = convert(make(), directory.parent / "other", **{**SHARED, **degrees})
        shutil.copy(other.directory / "mp_rank_01_001" / file, directory / RANK / file)

    return damage


def of_step_5() -> Checkpoint:
    return replace(gpt(), values=replace(gpt().values, step=5))


def of_other_values() -> Checkpoint:
    return replace(state(step=9, shapes=SHAPES), values=gpt().values)


def write_nonsense(directory: Path) -> None:
    shutil.rmtree(directory / ITERATION)
    path = directory / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content_of(lay_out_archive({"model": {}, "optimizer": 7, "iteration": 3})))


def hide_a_command(path: Path) -> None:
    hidden = pickle.dumps(print)
    rewrite_zip(path, lambda name, data: hidden if name.endswith("data.pkl") else data)


WIDE = NewTensor("F32", (8, 12), bytes(384))
TORCH = [
    Case("path", on(link_outside, MODEL), "is a link to outside"),
    Case("dtype", on(make_complex, MODEL), "of an unknown kind"),
    Case("shape", view((-4,), (1,)), "a tensor [-4] reaches beyond its storage"),
    Case("hole", without("decoder.final_layernorm.weight"), "does not fit its model"),
    Case(
        "overlap", model(lambda state: {**state, "decoder.layers.0.mlp.linear_fc2.weight": WIDE}),
        "does not fit its model",
    ),
    Case(
        "duplicate", copied(RANK, f"{ITERATION}/mp_rank_001_001"),
        "mp_rank_001_001 and mp_rank_01_001 of one rank",
    ),
    Case("missing file", lost(RANK), "the files of 1 ranks are missing (mp_rank_01_001)"),
    Case("missing file", lost(MODEL), "mp_rank_01_001/model_optim_rng.pt is missing"),
    Case(
        "missing file", lost(f"{RANK}/distrib_optim.pt"),
        "no whole distrib_optim.pt: the save or a copy was",
    ),
    Case(
        "extra file", copied(RANK, f"{ITERATION}/mp_rank_02_001"),
        "the files of 1 ranks are not of this job (mp_rank_02_001)",
    ),
    Case("truncated", cut(MODEL, 1), "is damaged or truncated"),
    Case("bomb", on(compress, MODEL), "is compressed; torch stores plainly"),
    Case("bomb", view((1 << 50, 4), (0, 1)), "reaches beyond its storage of 16 bytes"),
    Case("count", claim_many_ranks, "the job had tp=1099511627776"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case(
        "iterations", of_another(of_step_5, "model_optim_rng.pt"),
        "is of iteration 5, not 3. Files of two checkpoints",
    ),
    Case("iterations", of_another(of_other_values, "distrib_optim.pt"), "are not its weights"),
    Case("world", of_another(gpt, "model_optim_rng.pt", dp=4), "two checkpoints are mixed"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case(
        "version", merged(MODEL, checkpoint_version=4.0),
        "has checkpoint_version 4.0, and 3.0 is read",
    ),
    Case("version", on(age, MODEL), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", on(plant, MODEL), "os.system, which no checkpoint"),
    Case("code", on(hide_a_command, MODEL), "builtins.print, which no checkpoint"),
    Case("count", write_nonsense, "does not hold what a checkpoint of the layout torch does"),
]  # fmt: skip
TORCH_NOT = {
    "setting": "arguments travel as they are; the degrees among them are those of the files",
    "run": "nothing in it says of which job it is",
}
