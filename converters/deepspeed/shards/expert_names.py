"""DeepSpeed's names of experts (``deepspeed.moe.layer.MoE``) and of their files.

    layer_<l>_expert_<e>_mp_rank_00_model_states.pt   the weights of one expert
    expp_rank_<r>_mp_rank_00_optim_states.pt          without ZeRO: an expert-parallel rank's
                                                      optimizer

``l`` counts the layers with experts, ``e`` the experts of a layer.

Source: ``_get_expert_ckpt_name`` and ``_get_optimizer_ckpt_name`` of deepspeed/runtime/engine.py,
0.19.8.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import RefusedError

_EXPERT = re.compile(
    r"(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d{1,9})(?P<rest>\..*)"
)
_FILE = re.compile(
    r"(?:layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states"
    r"|expp_rank_(?P<rank>\d+)_mp_rank_(?P<optimizer_mp>\d+)_optim_states)\.pt"
)
_OLD = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter's name in parts: the layer, the expert's number, the rest."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}.deepspeed_moe.experts.deepspeed_experts.{self.number}{self.rest}"


def expert_of(name: str) -> Name | None:
    """Take an expert's name apart; None: the name is of no expert."""
    found = _EXPERT.fullmatch(name)
    return Name(found["layer"], int(found["number"]), found["rest"]) if found else None


def model_file(layer: int, expert: int) -> str:
    """Return the name of an expert's file."""
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def optimizer_file(ep_rank: int) -> str:
    """Return the name of an expert-parallel rank's optimizer file, without ZeRO."""
    return f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The files of experts in a tag.

    Attributes:
        model: Files by the place of the layer and the expert's number.
        optimizers: Files by expert-parallel rank, without ZeRO.
    """

    model: Mapping[tuple[int, int], str]
    optimizers: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path, names: Iterable[str]) -> "ExpertNames":
        """Find them among the names of a tag's files.

        Raises:
            RefusedError: A file is missing, or of an unsupported kind.
        """
        layers: dict[int, dict[int, str]] = {}
        ranks: dict[int, str] = {}
        for name in names:
            if _OLD.fullmatch(name):
                raise RefusedError(
                    f"{directory} holds experts in files that do not name their layer ({name}), "
                    "as old releases wrote them. Load it in DeepSpeed and save it again."
                )
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            if int(match["mp"] or match["optimizer_mp"]):
                raise RefusedError(
                    f"{directory} holds experts of several model-parallel ranks ({name}), which "
                    "are not read. Load it in DeepSpeed at the degrees that saved it."
                )
            is_model = match["expert"] is not None
            into = layers.setdefault(int(match["layer"]), {}) if is_model else ranks
            number = int(match["expert"] if is_model else match["rank"])
            if number in into:
                raise RefusedError(
                    f"{directory} has {into[number]} and {name}: files of two checkpoints are "
                    "mixed. Remove those of one."
                )
            into[number] = name
        firsts = {layer: next(iter(of.values())) for layer, of in layers.items()}
        check_numbers(directory, "layer with experts", firsts)
        for layer, of in layers.items():
            check_numbers(directory, f"expert (of layer {layer})", of)
        check_numbers(directory, "expert-parallel rank", ranks)
        model = {(at, number): name for at, of in layers.items() for number, name in of.items()}
        return cls(model, tuple(ranks[rank] for rank in sorted(ranks)))


NO_EXPERTS = ExpertNames({}, ())


def check_numbers(directory: Path, what: str, names: Mapping[int, str]) -> None:
    """Refuse a gap in numbers from 0 on."""
    missing = next((at for at, number in enumerate(sorted(names)) if number != at), None)
    if missing is not None:
        like = next(iter(names.values()))
        raise RefusedError(
            f"{directory} has no file of {what} {missing} (of {max(names) + 1}, as {like}). "
            "Copy the missing files of the same save, or use another checkpoint."
        )
