"""A PEFT adapter merged into its base: ``W + scale * B @ A``, computed while the base is read.

An overlay on a file (``Overlay``) says what to add to one of its matrices, or to take instead of
it; ``SourceFiles.view`` applies it to the box that is read. So a merged model has every target,
mapping, limit of memory and proof of another source, and the base's files stay as they are.

Sums are in fp32 and rounded once, to the base's dtype; PEFT rounds 16-bit products before the sum.

Source: ``get_delta_weight`` of peft/tuners/lora/layer.py, ``get_peft_model_state_dict`` of
peft/utils/save_and_load.py and ``get_pattern_key`` of peft/utils/other.py, 0.21.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    CONFIG,
    PARAM,
    AuxiliaryFile,
    Checkpoint,
    CheckpointTarget,
    FilePiece,
    Overlay,
)
from scalai.converters.opening import file_inside, read_json
from scalai.converters.safetensors_index import SafetensorsLayout, read_header
from scalai.converters.trainer_files import ADAPTER, model_files
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import ITEM_BYTES, bits_dtype
from scalai.store.files import decode, map_file

SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
FLOATS = ("F32", "F16", "BF16")
KNOWN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""``init_lora_weights`` that leave the base as it was."""
REFUSED_SETTINGS = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "velora_config",
    "monteclora_config", "kasa_config",
)  # fmt: skip
"""Settings with which an adapter is more than B @ A."""
WAY_OUT = "Merge it in PEFT (merge_and_unload) and save that"

EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "embed_in", "shared"}
HEADS = {"lm_head", "embed_out"}
"""Modules that are one in a tied model, by the last part of their names."""

_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_PATTERN = re.compile(r"[\w.^$*|\\\[\]-]{1,200}")
"""Of layers, without groups: those may take for ever, as more stars than these may."""
MOST_STARS = 4


@dataclass(frozen=True, eq=False, slots=True)
class _Adapter:
    """An adapter's directory.

    ``tensors``: its tensors by their names in the base (of factors with ``lora_A.weight`` ...), as
    bits in the mapped file, with their dtypes.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> "_Adapter":
        try:
            config = read_json(directory / SETTINGS)
        except (OSError, ValueError) as error:
            raise RefusedError(
                f"{directory / SETTINGS} cannot be read ({error}). Name the directory of a PEFT "
                f"adapter, with {SETTINGS} and {ADAPTER}."
            ) from error
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            found = config.get("peft_type") if isinstance(config, dict) else config
            raise RefusedError(
                f"{directory / SETTINGS} is of a {found!r:.40} adapter, and LORA is merged alone. "
                f"{WAY_OUT}."
            )
        odd = [name for name in REFUSED_SETTINGS if config.get(name)]
        start = config.get("init_lora_weights", True)
        if (start.lower() if isinstance(start, str) else start) not in KNOWN_STARTS:
            odd.append("init_lora_weights")  # the base was changed at the start
        if odd:
            raise RefusedError(
                f"{directory / SETTINGS} has {odd[0]} = {config[odd[0]]!r:.80}, with which an "
                f"adapter is more than a product added to its base. {WAY_OUT}."
            )
        path = file_inside(directory, ADAPTER, SETTINGS)
        adapter, data = cls(directory, config), map_file(path)
        for entry in read_header(path, path.stat().st_size):
            bits = np.ndarray(entry.shape, bits_dtype(entry.dtype), data, entry.begin)
            own = entry.name.removeprefix(PREFIX).replace(".base_layer.", ".")
            adapter.tensors[own] = entry.dtype, bits
        adapter.check()
        return adapter

    def check(self) -> None:
        """Raise ``RefusedError`` where a factor lacks the other, or a tensor is not of LoRA, or
        holds no numbers."""
        factors = {name: match for name in self.tensors if (match := _FACTOR.fullmatch(name))}
        for name, match in sorted(factors.items()):
            other = f"{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
            if other not in factors:
                raise RefusedError(
                    f"{self.directory / ADAPTER} has {name} and no {other}: a half is missing. "
                    "Copy the adapter again."
                )
        for name, (dtype, bits) in self.tensors.items():
            if (name not in factors and ".lora_" in name) or dtype not in FLOATS:
                raise RefusedError(
                    f"{self.directory / ADAPTER} has {name} ({dtype}), which is no factor of a "
                    f"linear layer. {WAY_OUT}."
                )
            if not np.isfinite(decode(bits, dtype)).all():
                raise RefusedError(
                    f"{self.directory / ADAPTER}: {name} holds NaN or infinity. Use another "
                    "checkpoint of the training."
                )

    def values(self, name: str) -> npt.NDArray[np.float32]:
        dtype, bits = self.tensors[name]
        return np.asarray(decode(bits, dtype), dtype=np.float32)

    def layers(self) -> Iterator[str]:
        """Yield the layers with factors."""
        for name in self.tensors:
            match = _FACTOR.fullmatch(name)
            if match and match[2] == "A":
                yield match[1]

    def wholes(self) -> Iterator[str]:
        """Yield the tensors to be taken instead of the base's: ``modules_to_save`` and biases."""
        yield from (name for name in self.tensors if not _FACTOR.fullmatch(name))

    def needed(self) -> list[str]:
        """Return the tensors of the base that change."""
        return [*(f"{layer}.weight" for layer in self.layers()), *self.wholes()]

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Return a layer's rank and scale, by the configuration."""
        rank = self._setting("rank_pattern", layer, self.config.get("r"))
        alpha = self._setting("alpha_pattern", layer, self.config.get("lora_alpha"))
        if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
            raise self._odd(f"r = {rank!r:.40}, lora_alpha = {alpha!r:.40}")
        scale = alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
        if not isfinite(scale):
            raise self._odd(f"lora_alpha = {alpha}")
        return rank, scale

    def _setting(self, patterns: str, layer: str, default: Any) -> Any:
        given = self.config.get(patterns) or {}
        if not isinstance(given, dict):
            raise self._odd(f"{patterns} = {given!r:.40}")
        for key, value in given.items():
            if key.count("*") > MOST_STARS or not _PATTERN.fullmatch(key):
                raise self._odd(f"{patterns} {key!r:.80}, a pattern that is not read")
            try:
                if re.match(rf"(.*\.)?({key})$", layer):
                    return value
            except re.error as error:
                raise self._odd(f"{patterns} {key!r:.80} ({error})") from error
        return default

    def _odd(self, what: str) -> RefusedError:
        return RefusedError(f"{self.directory / SETTINGS} has {what}. {WAY_OUT}.")


def merged(base: Checkpoint, directory: Path) -> Checkpoint:
    """Return a base's checkpoint as its adapter makes it.

    Args:
        base: A model of Hugging Face, in safetensors.
        directory: The directory of the adapter.

    Raises:
        RefusedError: The adapter is of another base, of another kind, or not whole.
    """
    if base.layout != SafetensorsLayout().name:
        raise RefusedError(
            f"{base.directory} is {base.layout}, and an adapter is merged into the safetensors of "
            "its base. Name the base as SRC; another layout by --to."
        )
    adapter = _Adapter.read(directory)
    merging = _Merging(base, adapter, _pieces(base, adapter))
    overlays = [*merging.overlays()]
    files = tuple(
        replace(file, overlays=tuple(over for path, over in overlays if path == file.path))
        for file in base.placed.files
    )
    layers, wholes = len([*adapter.layers()]), len([*adapter.wholes()])
    stated = adapter.config.get("base_model_name_or_path")
    note = (
        f"{directory} is merged into {layers} matrices, in fp32; {wholes} tensors are the "
        f"adapter's own; it names as its base {stated!r:.200}"
    )
    return replace(
        base,
        placed=replace(base.placed, files=files),
        changed=base.changed | merging.changed,
        notes=(*base.notes, note),
    )


def with_model_files(base: Checkpoint, target: CheckpointTarget) -> CheckpointTarget:
    """Return a target in safetensors with the base's ``config.json`` and tokenizer."""
    if target.layout != SafetensorsLayout().name:
        return target
    there = {file.path for file in target.auxiliary}
    files = [name for name in model_files(base.directory) if name not in there]
    paths = [(name, base.directory / name) for name in files]
    copies = (AuxiliaryFile(name, path.stat().st_size, path) for name, path in paths)
    return replace(target, auxiliary=(*target.auxiliary, *copies))


def _pieces(base: Checkpoint, adapter: _Adapter) -> dict[str, FilePiece]:
    """Return the base's pieces by the adapter's names: an adapter of a class with a head has one
    module around a base saved without it (``transformer.`` of GPT-2 and BLOOM)."""
    rows = (base.placed.piece(row) for row in range(len(base.placed.collection)))
    pieces = {piece.tensor.name.removeprefix(f"{PARAM}/"): piece for piece in rows}
    names = [name for name in adapter.needed() if _module(name) not in HEADS]
    around = {name.partition(".")[0] for name in names}
    if len(around) == 1 and not any(name in pieces for name in names):
        longer = {f"{min(around)}.{name}": piece for name, piece in pieces.items()}
        return longer if all(name in longer for name in names) else pieces
    return pieces


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, eq=False, slots=True)
class _Merging:
    base: Checkpoint
    adapter: _Adapter
    pieces: Mapping[str, FilePiece]
    changed: set[str] = field(default_factory=set)

    def overlays(self) -> Iterator[tuple[str, Overlay]]:
        """Yield each overlay with its file. Raises as ``merged``."""
        adapter = self.adapter
        shared = self._shared()
        heads = {name for name in shared if _module(name) in HEADS}
        needed = [name for name in adapter.needed() if name not in heads]
        lacking = sorted(name for name in needed if name not in self.pieces)
        if lacking or not needed:
            raise RefusedError(
                f"{self.base.directory} lacks {len(lacking)} of {len(needed)} tensors under the "
                f"adapter {adapter.directory}{', first ' + lacking[0] if lacking else ''}. It is "
                f"of another base ({adapter.config.get('base_model_name_or_path')!r:.200})."
            )
        for layer in adapter.layers():
            yield self._product(layer)
        for name in adapter.wholes():
            if name not in shared:
                yield self._whole(name, name)
        for name in self.pieces:
            if shared and _module(name) in EMBEDDINGS | HEADS:
                yield self._whole(shared[0], name)

    def _shared(self) -> list[str]:
        """Return the adapter's tensors that are the one embedding and head of a tied base.

        Raises:
            RefusedError: They would be two.
        """
        adapter, config = self.adapter, self.base.values.extra.get(CONFIG) or {}
        is_headless = not any(_module(name) in HEADS for name in self.pieces)
        found = [name for name in adapter.needed() if _module(name) in EMBEDDINGS | HEADS]
        if not found or not config.get("tie_word_embeddings", is_headless):
            return []
        wholes = [adapter.tensors[name] for name in adapter.wholes() if name in found]
        are_equal = len(wholes) == len(found) and all(
            dtype == wholes[0][0] and np.array_equal(bits, wholes[0][1]) for dtype, bits in wholes
        )
        are_both = len({_module(name) in HEADS for name in found}) == 2
        if are_equal and (are_both or adapter.config.get("ensure_weight_tying")):
            return found
        raise RefusedError(
            f"the embedding and the head of {self.base.directory} are one tensor "
            f"(tie_word_embeddings), and with {' and '.join(dict.fromkeys(found))} of "
            f"{adapter.directory} they are two. Save the base untied, with the embedding as its "
            "head and tie_word_embeddings false, and name that as SRC."
        )

    def _product(self, layer: str) -> tuple[str, Overlay]:
        a, b = (self.adapter.values(f"{layer}.lora_{half}.weight") for half in "AB")
        rank, scale = self.adapter.rank_and_scale(layer)
        if a.ndim != 2 or b.ndim != 2 or {a.shape[0], b.shape[1]} != {rank}:
            raise RefusedError(
                f"{self.adapter.directory / ADAPTER}: {layer} has A{[*a.shape]} and B{[*b.shape]}, "
                f"and rank {rank} is expected by {SETTINGS}. Files of two adapters are mixed."
            )
        left, right = (a.T, b.T) if self.adapter.config.get("fan_in_fan_out") else (b, a)
        return self._over(f"{layer}.weight", (left.shape[0], right.shape[1]), left, right, scale)

    def _whole(self, name: str, of: str) -> tuple[str, Overlay]:
        """Return what puts the adapter's tensor ``name`` in the place of the base's ``of``."""
        values = self.adapter.values(name)
        flat = values.reshape(1, -1)
        return self._over(of, values.shape, np.ones((1, 1), np.float32), flat, 1.0, is_sum=False)

    def _over(
        self, name: str, shape: tuple[int, ...], left: npt.NDArray[np.float32],
        right: npt.NDArray[np.float32], scale: float, *, is_sum: bool = True,
    ) -> tuple[str, Overlay]:  # fmt: skip
        piece = self.pieces[name]
        if piece.tensor.shape != shape or piece.tensor.dtype not in FLOATS:
            raise RefusedError(
                f"{name} is {piece.tensor.dtype}{[*piece.tensor.shape]} in {self.base.directory}, "
                f"and the adapter {self.adapter.directory} is for floats {[*shape]}: it is of "
                "another base, or the base is quantised or was resized. Use the base it was "
                "trained on."
            )
        self.changed.add(piece.tensor.name)
        end = piece.begin + prod(shape) * ITEM_BYTES[piece.tensor.dtype]
        return piece.file, Overlay(piece.begin, end, left, right, scale, is_sum)
