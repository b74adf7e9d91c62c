"""The user's policy for degrees, and choices under it: values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits
from scalai.core.degrees.passes import AS_GIVEN, NO_FREEDOM, Freedom, Offload, Passes, Recompute
from scalai.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the ``[degrees]`` table: requests for ``world_size`` ranks.

    ``from_world_size`` limits it to a change from so many used ranks (``"2->4"``); None: always
    (``"4"``). The first valid request is taken, the next after an out-of-memory.

    One world may have other degrees after other changes, but the choice depends on the change
    alone: no history to lose in a restart of the coordinator.
    """

    world_size: int
    requests: tuple[DegreeRequest, ...]
    from_world_size: int | None = None

    @property
    def key(self) -> str:
        """The entry's key in the table."""
        came = "" if self.from_world_size is None else f"{self.from_world_size}->"
        return f"{came}{self.world_size}"


class Preferring(Protocol):
    """Orders valid choices by cost. Returns none if it does not decide; raises ``ScalaiError`` if
    it cannot. ``spilled`` is the reason for a choice's state in host memory."""

    def order(
        self,
        choices: Sequence["Choice"],
        present: Degrees | None,
        ran: Passes,
        failed: Sequence["Choice"],
    ) -> Sequence["Choice"]: ...  # pragma: no cover

    def on_hosts(self, slots: int) -> "Preferring": ...  # pragma: no cover

    def spilled(self, choice: "Choice") -> str: ...  # pragma: no cover


class Needing(Protocol):
    """Models the bytes of layouts on each device."""

    def __call__(
        self, layouts: Sequence[tuple[Degrees, Passes]]
    ) -> Sequence[float]: ...  # pragma: no cover


@dataclass(frozen=True, slots=True)
class DegreePolicy:
    """The user's policy for degrees.

    Attributes:
        rules: The ``[degrees]`` table.
        initial: Degrees of the script's flags, for a first start without a rule.
        allowed_sizes: World sizes allowed, ascending; empty: any.
        min_model_parallel: Smallest TP·PP known to fit in memory; None: from past rounds.
        preference: The job's planner; None: the running degrees stay.
        kept_axes: TP or PP, fixed unless the user asks: axes not known to be cut by the script.
        freedom: Passes that may differ from the script's flags.
        stepped: Layouts with completed steps of this job on its present devices.
        needs: Model of their bytes; None: no model.
    """

    rules: tuple[Rule, ...] = ()
    initial: DegreeRequest | None = None
    allowed_sizes: tuple[int, ...] = ()
    min_model_parallel: int | None = None
    preference: Preferring | None = None
    kept_axes: tuple[str, ...] = ()
    freedom: Freedom = NO_FREEDOM
    stepped: tuple[tuple[Degrees, Passes], ...] = ()
    needs: Needing | None = None

    def __post_init__(self) -> None:
        keys = [rule.key for rule in self.rules]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise UsageError(f"[degrees] has two entries for {twice[0]!r}; keep one.")

    def rule(self, world_size: int, from_world_size: int | None) -> Rule | None:
        """Return the entry for this change, else the one for this world size."""
        found = {r.from_world_size: r for r in self.rules if r.world_size == world_size}
        return found.get(from_world_size) or found.get(None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Degrees for a world, its idle ranks (the last ones), and one line with the reason."""

    degrees: Degrees
    idle_ranks: tuple[int, ...]
    reason: str = field(compare=False)
    micro_batch_size: int | None = None
    """Samples a forward pass and replica; None: unknown, the job's own."""
    recompute: Recompute | None = None
    """Recomputation; None: by the script's flags."""
    offload: Offload | None = None
    """State in host memory; None: by the script's flags."""

    @property
    def passes(self) -> Passes:
        return Passes(self.micro_batch_size, self.recompute, self.offload)

    @property
    def key(self) -> tuple[Degrees, Passes]:
        """Identity among choices."""
        return self.degrees, self.passes


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of ``choice.choose``."""

    world: int
    limits: ModelLimits
    policy: DegreePolicy
    present: Degrees | None
    excluded: tuple[Choice, ...]
    ran: Passes = AS_GIVEN

    @property
    def kept(self) -> Degrees | DegreeRequest:
        return self.present or self.policy.initial or DegreeRequest()

    @property
    def failed(self) -> int:
        """Largest TP·PP that ran out of memory; 0: none."""
        return max((choice.degrees.model_parallel for choice in self.excluded), default=0)

    @property
    def floor(self) -> int:
        """Smallest TP·PP known to fit: the user's, else from past rounds."""
        ran = [degrees.model_parallel for degrees, _ in self.policy.stepped]
        known = self.policy.min_model_parallel or min([self.kept.tp * self.kept.pp, *ran])
        return max(known, self.failed)

    @property
    def is_modelled(self) -> bool:
        """Whether modelled bytes may admit a TP·PP below the floor."""
        policy, is_stated = self.policy, self.policy.min_model_parallel is not None
        return bool(policy.stepped and policy.needs) and not is_stated and not self.excluded

    def is_known_to_fit(self, degrees: Degrees, passes: Passes) -> bool:
        """Whether a layout needs at most the bytes of a past one on each device."""
        if degrees.model_parallel >= self.floor or not self.is_modelled:
            return degrees.model_parallel >= self.floor
        assert self.policy.needs is not None
        needed, *ran = self.policy.needs([(degrees, passes), *self.policy.stepped])
        return needed <= max(ran)

    @property
    def own(self) -> Passes:
        """The passes of the script's flags."""
        initial = self.policy.initial
        return Passes((initial and initial.micro_batch_size) or self.limits.micro_batch_size)

    def floor_reason(self) -> str:
        return (
            f"TP·PP below {self.floor} is not known to fit in memory (--min-model-parallel says "
            "that a smaller one does)"
        )

    def sizes(self) -> list[int]:
        """World sizes to try, the largest first."""
        if not self.policy.allowed_sizes:
            return [self.world]
        return sorted((s for s in self.policy.allowed_sizes if s <= self.world), reverse=True)
