"""A DeepSpeed checkpoint that is being laid out: for which job, stage and ranks, from what."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, Piece, WriteOptions
from scalai.converters.deepspeed.archives import Archives, Filled
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob, sub_group_elements, zero_config
from scalai.converters.deepspeed.loss_scale import to_plain
from scalai.converters.pickles import foreign
from scalai.converters.scalars import read_steps
from scalai.converters.torch_archive import NewTensor
from scalai.core.collection import Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import whole


def job_of(source: Checkpoint, options: WriteOptions) -> DeepSpeedJob:
    """Return the job that the target is for: the source's, or that of ``--args-from``.

    Raises:
        RefusedError: There is none.
    """
    for values in (source.values, options.reference):
        job = values.extra.get(STATE) if values is not None else None
        if isinstance(job, DeepSpeedJob):
            return job
    raise RefusedError(
        f"{source.directory} ({source.layout}) does not say in which order a DeepSpeed engine "
        "keeps its parameters. Pass --args-from with a DeepSpeed checkpoint of the same model."
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """A target that is being laid out.

    Attributes:
        source, options: What is written, and how.
        job: What will read it, with the parameters that this model-parallel rank has.
        stage, dp: Of the target.
        archives: The target's files so far.
        folder: The tag's directory.
        degrees: ``tp`` and ``pp`` of the target.
        rank: Which model-parallel rank this is.
        tensors: The source's tensors by name, in the rank's own shapes.
        kept: By parameter, what the optimizer keeps of it.
    """

    source: Checkpoint
    options: WriteOptions
    job: DeepSpeedJob
    stage: int
    dp: int
    archives: Archives
    folder: str
    degrees: tuple[int, int] = (1, 1)
    rank: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shard = self.archives.shards.shard
        tensors = {tensor.name: shard(tensor) for tensor in self.source.placed.collection.tensors}
        self.tensors.update(tensors)
        for tensor in tensors:
            kind, _, parameter = tensor.partition("/")
            if kind not in (PARAM, MAIN, STEP):
                self.kept.setdefault(parameter, []).append(kind)
        names = [name for name in self.job.dtypes if self.job.aliases.get(name, name) == name]
        missing = [name for name in names if f"{PARAM}/{name}" not in tensors]
        if missing:
            raise RefusedError(
                f"{self.source.directory} lacks {len(missing)} tensors of the DeepSpeed job's "
                f"module, first {missing[0]}. It is of another model, or names need a mapping."
            )

    @property
    def config(self) -> dict[str, Any]:
        """The job's configuration with the target's stage."""
        config = dict(self.job.model.get("ds_config") or {})
        config["zero_optimization"] = {**zero_config(config), "stage": self.stage}
        return config

    @property
    def clip_grad(self) -> float:
        """The largest norm of the gradient, as the source's optimizer or configuration says."""
        stated = self.job.optimizer.get("clip_grad", self.config.get("gradient_clipping", 0.0))
        return float(stated)

    def notes(self) -> Iterator[str]:
        """Yield what the target's job must know."""
        yield "ds_config of the source is kept, but for the stage: set the batch sizes anew"
        if self.stage == 3:
            size = sub_group_elements(self.config)
            yield f"sub_group_size is {size}, as in the source's ds_config or by default"
        is_scaled = to_plain(self.job.optimizer, 0)["cur_scale"] != 1
        if is_scaled and (self.source.layout == "deepspeed_zero0") != (self.stage == 0):
            yield (
                "without ZeRO, DeepSpeed 0.19.8 divides gradients by the fp16 loss scale and does "
                "not multiply the loss by it: the moments of such a job are smaller by the scale"
            )

    def parameter(self, name: str) -> Tensor:
        """Return a parameter's, or a buffer's, own tensor."""
        return self.tensors[f"{PARAM}/{name}"]

    def sizes(self, names: Iterable[str]) -> OrderedDict[str, Any]:
        """Return the shapes of parameters as torch has them."""
        size = foreign("torch", "Size")
        return OrderedDict((name, size(self.parameter(name).shape)) for name in names)

    def stored(self, kind: str | None, name: str) -> Tensor:
        """Return a parameter's tensor of a kind; ``kind`` None: its master.

        Raises:
            RefusedError: There is no master.
        """
        if kind is not None:
            return self.tensors[f"{kind}/{name}"]
        tensor = self.tensors.get(f"{MAIN}/{name}", self.parameter(name))
        if tensor.dtype != "F32":
            raise RefusedError(
                f"there is no fp32 master of {name} ({tensor.dtype}). Use a checkpoint that was "
                "saved with its optimizer; masters in 16 bits (fp16_master_weights_and_grads, "
                "bf16_master_weights_and_grads) are not written."
            )
        return tensor

    def kinds(self, names: Sequence[str]) -> list[str]:
        """Return what the optimizer keeps of parameters of one group, in the source's order.

        Raises:
            RefusedError: It is not the same of all.
        """
        kinds = list(dict.fromkeys(kind for name in names for kind in self.kept.get(name, ())))
        for name in names:
            missing = [kind for kind in kinds if kind not in self.kept.get(name, ())]
            if missing:
                raise RefusedError(
                    f"{self.source.directory} has no {', '.join(missing)} of {name}, and of others "
                    "in the same group. It is incomplete (run scalai verify on it), or an offload "
                    "ratio below 1 kept the optimizer's state of a part: save without that."
                )
        return kinds

    def step(self, name: str, filled: Filled) -> dict[str, Any]:
        """Return the optimizer's step for a parameter, under its key; nothing if it has none."""
        tensor = self.tensors.get(f"{STEP}/{name}")
        if tensor is None:
            return {}
        if self.job.has_number_steps:
            return {"step": int(read_steps(self.source) or 0)}
        step = NewTensor(tensor.dtype, ())
        filled[step] = [Piece(tensor, whole(()), "", 0)]
        return {"step": step}

    def param_groups(self, members: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups, each with the numbers of its tensors.

        Raises:
            RefusedError: The source has not as many.
        """
        values = self._group_values()
        if len(values) != len(members):
            raise RefusedError(
                f"{self.source.directory} has {len(values)} parameter groups, and the DeepSpeed "
                f"job {len(members)}. Pass --args-from with a checkpoint of the same job."
            )
        return [
            {**group, "params": list(numbers)}
            for group, numbers in zip(values, members, strict=True)
        ]

    @property
    def knows_param_groups(self) -> bool:
        """Whether there are hyperparameters of the groups; elastic checkpoints have none."""
        return bool(self._group_values())

    def _group_values(self) -> Sequence[Mapping[str, Any]]:
        reference = self.options.reference
        groups = self.source.values.param_groups
        return groups or (reference.param_groups if reference is not None else ())
