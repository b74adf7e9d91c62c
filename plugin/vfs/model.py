"""The model of a generation as folders: a parameter's path, and in it a file for each tensor.

``decoder.layers.0.mlp.weight`` is ``decoder/layers/0/mlp/weight.npy``, its fp32 master
``weight.main.npy``, its moments ``weight.exp_avg.npy``; a slice is ``weight[0:128,:].npy``, which
no listing shows. The same with ``.safetensors``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote

from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, whole
from scalai.vfs.array_files import HEADERS, ArrayContent, Elements, parse_slice
from scalai.vfs.nodes import Content, File, Node, missing

WEIGHTS = "param"
"""The kind of tensor whose file has no kind in its name."""

OpenBox = Callable[[Tensor, Box], Elements]
"""Opens the elements of a box of a tensor. Raises ``OSError``."""


def place_of(name: str) -> PurePosixPath:
    """Return where a tensor lies below the model, without the end of a file's name.

    Characters that have a meaning in these names, or none in a path, are percent-encoded.
    """
    kind, parameter = split_name(name)
    parts = [_component(part) for part in parameter.split(".")]
    last = parts[-1] if kind == WEIGHTS else f"{parts[-1]}.{_component(kind)}"
    return PurePosixPath(*parts[:-1], last)


def _component(text: str) -> str:
    # An empty one, as of a name with two dots in a row, is the one that ``quote`` cannot make.
    return quote(text, safe="").replace(".", "%2E") or "%2E"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One level of the model: folders below it, and tensors by the name of their file, without its
    end."""

    folders: Mapping[str, "ModelFolder"]
    tensors: Mapping[str, Tensor]
    mtime: float
    open_box: OpenBox

    def names(self) -> Iterable[str]:
        files = [name + end for name in sorted(self.tensors) for end in HEADERS]
        return [*sorted(self.folders), *files]

    def child(self, name: str) -> Node:
        if name in self.folders:
            return self.folders[name]
        for end, header_of in HEADERS.items():
            base, ended, rest = name.rpartition(end)
            if not ended or rest:
                continue
            base, bracket, ranges = base.partition("[")
            tensor = self.tensors.get(base)
            if tensor is None or (bracket and not ranges.endswith("]")):
                raise missing(name)
            box = parse_slice(ranges[:-1], tensor.shape) if bracket else whole(tensor.shape)
            return self._file(tensor, box, header_of(tensor, box))
        raise missing(name)

    def _file(self, tensor: Tensor, box: Box, header: bytes) -> File:
        size = len(header) + box.numel * ITEM_BYTES[tensor.dtype]

        def opened() -> Content:
            return ArrayContent(header, self.open_box(tensor, box), size)

        return File(size, self.mtime, opened)


def model_folder(tensors: Iterable[Tensor], mtime: float, open_box: OpenBox) -> ModelFolder:
    """Return the folders of these tensors."""
    root = ModelFolder({}, {}, mtime, open_box)
    for tensor in tensors:
        path = place_of(tensor.name)
        folder = root
        for name in path.parts[:-1]:
            below = folder.folders
            assert isinstance(below, dict)
            folder = below.setdefault(name, ModelFolder({}, {}, mtime, open_box))
        assert isinstance(folder.tensors, dict)
        folder.tensors[path.name] = tensor
    return root
