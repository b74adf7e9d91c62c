"""Where of alike layers only some are trained, no layer is an axis of a key."""

from dataclasses import replace
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, FilePiece, place
from scalai.converters.consistency import compare
from scalai.converters.megatron.torch_dist_metadata import read_metadata
from scalai.converters.megatron.torch_dist_writer import content_of
from scalai.converters.torch_archive import lay_out_archive
from support.checkpoints import state, write


def half_trained() -> Checkpoint:
    """Return a state whose layer 0 has no optimizer state, and objects by layer."""
    source = state()
    rows = [
        (tensor, box, source.placed.files[source.placed.file[row]].path)
        for row in range(len(source.placed.collection))
        for tensor, box in [source.placed.collection.box(row)]
        if tensor.name.startswith("param/") or ".layers.0." not in tensor.name
    ]
    pieces = [FilePiece(tensor, box, file, 0) for tensor, box, file in rows]
    names = (
        "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.3_2.4",
        "output_layer._extra_state/shard_0_1",
    )
    objects = {name: content_of(lay_out_archive([number])) for number, name in enumerate(names)}
    values = replace(source.values, extra={"objects": objects})
    return replace(source, placed=place(pieces, source.placed.files), values=values)


def test_layers_of_which_some_are_trained_are_in_the_names(tmp_path: Path) -> None:
    source = half_trained()
    written = write(tmp_path / "out", source=source)
    assert list(compare(source, written, 1)) == []
    assert written.values.extra["content_metadata"]["non_homogeneous_layers"] is True
    metadata = read_metadata(written.directory)
    assert {
        "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1",
        "decoder.layers.0.mlp.experts.experts.linear_fc1._extra_state/shard_3_4",
        "output_layer._extra_state/shard_0_1",
    } <= set(metadata.objects)
    keys = {stored.key for stored in metadata.tensors}
    assert "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight" in keys
    assert "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight" not in keys


def test_layers_that_are_all_trained_stay_an_axis(tmp_path: Path) -> None:
    written = write(tmp_path / "out")
    assert "non_homogeneous_layers" not in written.values.extra["content_metadata"]
    keys = {stored.key for stored in read_metadata(written.directory).tensors}
    assert "decoder.layers.mlp.linear_fc2.weight" in keys
