"""The model-parallel ranks of a DeepSpeed target, and each one's part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scalai.converters.checkpoint import Checkpoint, WriteOptions, parameters_of
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.deepspeed.shards.cut_rules import INFO, CutRules, info_at, read_cuts
from scalai.converters.deepspeed.shards.cuts import Cut, Shards
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.converters.deepspeed.shards.pipeline import read_pipeline, stages_at, unit_of
from scalai.converters.deepspeed.writing.archives import Archives
from scalai.converters.deepspeed.writing.draft import Draft
from scalai.core.errors import RefusedError


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The ranks of a target.

    Attributes:
        source, options, job, stage: As in ``Draft``, but for all ranks.
        cuts: The cuts at the target's ``tp``.
        stages: Units by stage; empty without a pipeline.
        how: Origin of the stages, for the notes.
    """

    source: Checkpoint
    options: WriteOptions
    job: DeepSpeedJob
    stage: int
    dp: int
    tp: int
    pp: int
    ep: int
    known: Mapping[str, Cut]
    cuts: Mapping[str, Cut]
    stages: tuple[frozenset[str], ...]
    how: str

    @classmethod
    def of(
        cls, source: Checkpoint, job: DeepSpeedJob, stage: int, options: WriteOptions
    ) -> "Ranks":
        """Find each rank's part of a target.

        Raises:
            RefusedError: The degrees are unknown or impossible; or the cuts of parameters, or the
                bounds of stages, are unknown.
        """
        dp, tp, pp, ep = _degrees(source, options, job)
        if job.experts is not None and (stage == 3 or tp * pp > 1):
            raise RefusedError(
                f"stage {stage} at tp={tp} pp={pp} is asked of a DeepSpeed job with experts, which "
                "are written for stages 0 to 2, tp=1 and pp=1. Convert to deepspeed_zero2."
            )
        shapes = {name: tensor.shape for name, tensor in parameters_of(source).items()}
        stages, how = _stages(source, job, stage, pp, shapes, options)
        uncut = {name: shape for name, shape in shapes.items() if name not in job.buffers}
        known = _known(job, uncut, options, is_needed=tp > 1)
        cuts = {name: known[name].recut(name, tp) for name in uncut} if tp > 1 else {}
        return cls(source, options, job, stage, dp, tp, pp, ep, known, cuts, stages, how)

    def notes(self) -> Iterator[str]:
        """Yield notes for the target's job."""
        if self.how:
            yield (
                f"stages begin where they do by {self.how}; DeepSpeed refuses other ones, and "
                "prints its own when it starts"
            )
        if self.job.of_ranks and not self._is_same and len(self.job.of_ranks) > 1:
            yield (
                "what the client saved beside the model is that of model-parallel rank 0 for every "
                "rank, RNG states included"
            )
        uneven = [name for name, cut in self.cuts.items() if any(map(_is_uneven, cut.widths))]
        if uneven:
            yield (
                f"tp={self.tp} cuts {len(uneven)} parameters unevenly (as {uneven[0]}), the first "
                "ranks having more, as DeepSpeed's AutoTP does"
            )

    def drafts(self, archives: Archives, folder: str) -> list[Draft]:
        """Return a draft of each model-parallel rank, in order.

        Raises:
            RefusedError: The source lacks tensors, or a parameter group would be empty.
        """
        return [
            Draft(
                self.source,
                self.options,
                self._job(rank),
                self.stage,
                self.dp,
                archives.of(Shards(self.cuts, rank % self.tp)),
                folder,
                (self.tp, self.pp),
                rank,
                self.ep,
            )
            for rank in range(self.tp * self.pp)
        ]

    @property
    def _is_same(self) -> bool:
        degrees = self.source.values.degrees
        return (degrees.get("tp"), degrees.get("pp")) == (self.tp, self.pp)

    def _job(self, rank: int) -> DeepSpeedJob:
        job = self.job
        if self._is_same and len(job.of_ranks) == self.tp * self.pp:
            job = replace(job, model=job.of_ranks[rank])
        elif INFO in job.model:
            model = {**job.model, INFO: info_at(job.model[INFO], self.cuts or self._alone())}
            job = replace(job, model=model)
        if not self.stages:
            return job
        return self._of_stage(job, rank // self.tp)

    def _alone(self) -> dict[str, Cut]:
        return {name: cut.recut(name, 1) for name, cut in self.known.items()}

    def _of_stage(self, job: DeepSpeedJob, stage: int) -> DeepSpeedJob:
        units = self.stages[stage]
        groups = tuple(tuple(n for n in group if unit_of(n) in units) for group in job.groups)
        for number, group in enumerate(groups):
            if not group:
                raise RefusedError(
                    f"stage {stage} of pp={self.pp} would have no parameter of group "
                    f"{number}, which DeepSpeed does not save. Choose another --pp."
                )
        return replace(
            job,
            groups=groups,
            dtypes={name: dtype for name, dtype in job.dtypes.items() if unit_of(name) in units},
            aliases={name: own for name, own in job.aliases.items() if unit_of(name) in units},
            buffers=tuple(name for name in job.buffers if unit_of(name) in units),
            frozen=tuple(name for name in job.frozen if unit_of(name) in units),
        )


def _degrees(
    source: Checkpoint, options: WriteOptions, job: DeepSpeedJob
) -> tuple[int, int, int, int]:
    degrees = {**source.values.degrees, **options.degrees}
    known = ("dp", "tp", "pp", "ep") if job.experts is not None else ("dp", "tp", "pp")
    for axis, size in sorted(degrees.items()):
        if axis not in known and size != 1:
            raise RefusedError(
                f"{axis}={size} is asked of a DeepSpeed checkpoint, which has {', '.join(known)} "
                f"alone. Give --{axis} 1."
            )
    if "dp" not in degrees:
        raise RefusedError("the number of data-parallel ranks is not known. Give --dp.")
    dp, ep = degrees["dp"], degrees.get("ep", 1)
    if job.experts is not None:
        job.experts.check(ep, dp)
    return dp, degrees.get("tp", 1), degrees.get("pp", 1), ep


def _stages(
    source: Checkpoint,
    job: DeepSpeedJob,
    stage: int,
    pp: int,
    shapes: Mapping[str, Shape],
    options: WriteOptions,
) -> tuple[tuple[frozenset[str], ...], str]:
    """Return the units by stage, empty without a pipeline; and their origin."""
    if job.pipeline is None:
        if pp != 1:
            raise RefusedError(
                f"pp={pp} is asked of {source.directory}, whose engine is no pipeline. Give --pp 1."
            )
        return (), ""
    if stage > 1:
        raise RefusedError(
            f"stage {stage} is asked of a pipeline, for which DeepSpeed has stages 0 and 1 alone. "
            "Convert to deepspeed_zero1."
        )
    other = _reference(options)
    if other is not None and other.pipeline is not None and len(other.pipeline.stages) == pp:
        return other.pipeline.stages, "the checkpoint of --args-from"
    trained = {name: shapes[name] for group in job.groups for name in group}
    return stages_at(job.pipeline, pp, trained, read_pipeline(options.cuts))


def _reference(options: WriteOptions) -> DeepSpeedJob | None:
    job = options.reference.extra.get(STATE) if options.reference is not None else None
    return job if isinstance(job, DeepSpeedJob) else None


def _known(
    job: DeepSpeedJob, shapes: Mapping[str, Shape], options: WriteOptions, *, is_needed: bool
) -> Mapping[str, Cut]:
    """Return the cuts of parameters: the source's; else by rules, a file's, or those of
    ``--args-from``. Raises if some ``is_needed`` and unknown."""
    if job.cuts:
        return job.cuts
    rules = CutRules(job.model.get(INFO) or {}, read_cuts(options.cuts))
    alone = {name: [shape] for name, shape in shapes.items()}
    other = _reference(options)
    known = {**(other.cuts if other is not None else {}), **rules.known_cuts(alone)}
    if is_needed:
        known |= rules.cuts({name: of for name, of in alone.items() if name not in known})
    return known


def _is_uneven(widths: tuple[int, ...]) -> bool:
    return len(set(widths)) > 1
