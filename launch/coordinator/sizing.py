"""What decides about the size of a job beside the hosts that are there: limits, a person's
requests, and what has turned out not to fit."""

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import Any

from scalai.core.assignment import make_assign
from scalai.core.degrees import Degrees, parse_request
from scalai.core.membership import Assign, Assignment, Place
from scalai.core.messages import JsonText
from scalai.core.passes import recompute_of_json
from scalai.core.planner.change_time import ChangeTime
from scalai.core.planner.preference import (
    Measured,
    Preference,
    change_of_json,
    change_to_json,
    measured_of_json,
    measured_to_json,
)
from scalai.core.planner.rank_order import Hosts, make_place
from scalai.core.policy import Choice
from scalai.launch.config.job import JobSpec
from scalai.launch.config.planning import (
    read_planner,
    read_sharding,
    read_workload,
    told_by,
)
from scalai.launch.coordinator.guarded_planner import GuardedPlanner


class Sizing:
    """The inputs of ``make_assign`` for one job. ``scalai scale`` and out-of-memory change them."""

    def __init__(self, spec: JobSpec, say: Callable[[str], object] = lambda line: None) -> None:
        """Take over what a person has stated.

        Args:
            say: Takes log lines.
        """
        facts, self._say = spec.script, say
        self._planner, self._arguments = spec.config.planner, facts.arguments
        self._limits, self._policy = facts.limits, facts.policy
        self._recalled: tuple[tuple[Measured, ...], ChangeTime | None] = ((), None)
        """What the coordinator before had measured: steps, and the seconds of a change."""
        self._deepspeed = spec.config.deepspeed, spec.deepspeed
        self._told = None if spec.deepspeed is None else told_by(spec.deepspeed)
        self._preference = self._read_preference()
        self._place = self._made_place()
        self._min_hosts, self._max_hosts = spec.min_hosts, spec.max_hosts
        self._max_workers: int | None = None
        self._degrees: str | None = None
        self._excluded: tuple[Choice, ...] = ()
        self._assign: Assign | None = None
        """What ``assign`` gives, until something is learned."""
        self._learned_from: tuple[Preference, Assign] | None = None
        """The planner that began to learn, and what ``assign`` gave then."""

    def assign(self) -> Assign:
        """Return the function that assigns workers to hosts, as things are now.

        Degrees that a person asked for hold until the next ``rescale``, wherever they fit; where
        they do not, the job goes on as if nobody had asked.
        """
        if self._assign is None:
            self._assign = self._made()
        return self._assign

    def _made(self, preference: Preference | None = None) -> Assign:
        preference = preference or self._preference
        size = self._max_workers, self._max_hosts
        as_requested = self._with(*size, self._degrees, preference=preference)
        otherwise = self._with(*size, None, preference=preference)
        return lambda hosts, present: as_requested(hosts, present) or otherwise(hosts, present)

    def place(self, target: Assignment, ran: Assignment, slots: Hosts) -> Assignment:
        """Return an assignment with its hosts in the order in which the fewest bytes cross; a
        ``Place``. Where that cannot be computed they stay as they are: nothing depends on it."""
        try:
            return self._place(target, ran, slots)
        except Exception as error:  # our own slip: it must not end a job
            self._say(f"event=not_placed {error!r}: hosts keep the order of joining")
            return target

    def _made_place(self) -> Place:
        of_job = self._arguments, *self._deepspeed
        work = read_workload(self._arguments, self._limits)
        return make_place(work, lambda world_size: read_sharding(world_size, *of_job))

    def scaled(
        self,
        nproc: int | None,
        nnodes: int | None,
        degrees: str | None,
        explain: Callable[[str], object],
    ) -> Assign:
        """Return what ``rescale`` with the same arguments would lead to; None for a request that
        does not fit, and ``explain`` is told why."""
        return self._with(nproc, nnodes or self._max_hosts, degrees, explain)

    def rescale(self, nproc: int | None, nnodes: int | None, degrees: str | None) -> None:
        """A person wants so many workers in total, hosts at most, and these degrees."""
        self._max_workers, self._degrees = nproc, degrees
        self._max_hosts = nnodes or self._max_hosts
        self._assign = None

    @property
    def request(self) -> JsonText:
        """What persons have asked for, and what has run out of memory, for whoever takes this
        coordinator's place."""
        excluded = [
            [each.degrees.to_json(), each.micro_batch_size, each.reason, each.recompute]
            for each in self._excluded
        ]
        measured, change = self._recalled
        if (planner := self._preference) is not None:
            measured, change = planner.measured, planner.terms.change
        return JsonText.of([
            self._max_workers, self._max_hosts, self._degrees, excluded,
            measured_to_json(measured), *change_to_json(change),
        ])  # fmt: skip

    def take_over(self, request: JsonText) -> None:
        """This held under the coordinator before. What it had measured says nothing of other
        layouts before ``recalibrated`` is adopted.

        Raises:
            ValueError: It is nothing that ``request`` gives.
        """
        match request.value():
            case [nproc, nnodes, degrees, list() as excluded, measured, *change]:
                recalled = tuple(measured_of_json(measured)), change_of_json(change)
                failed = tuple(_choice_of_json(each) for each in excluded)
            case other:
                raise ValueError(f"{other!r} is no request of persons")
        self.rescale(nproc, nnodes, degrees)
        self._recalled, self._excluded = recalled, failed
        if self._preference is not None:
            self._preference = self._preference.recalling(*recalled)

    def exclude(self, assignment: Assignment) -> None:
        """These degrees ran out of memory in their first step."""
        degrees, passes = assignment.degrees, assignment.passes
        failed = Choice(degrees, (), assignment.reason, *astuple(passes))
        self._excluded = (*self._excluded, failed)
        self._assign = None

    @property
    def has_planner(self) -> bool:
        """Whether degrees are computed, or will be once enough is measured."""
        return self._preference is not None

    @property
    def trial_steps(self) -> int:
        """For so many steps degrees are tried; 0: none are."""
        return self._planner.trial_steps

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a pass where no choice says it."""
        if self._preference is not None:
            return self._preference.micro_batch
        return self._limits.micro_batch_size

    def with_measured(
        self, found: Measured, change: ChangeTime | None
    ) -> tuple[Preference, Assign] | None:
        """Return the planner that has learned what steps take, and a change, with what it assigns;
        None: there is none. Nothing changes before ``adopt``, so that it may take its time."""
        if self._preference is None:
            return None
        self._learned_from = self._preference, self.assign()
        preference = self._preference.with_measured(found, change)
        return preference, self._made(preference)

    def recalibrated(self) -> tuple[Preference, Assign] | None:
        """Return the planner that has computed what was taken over, as ``with_measured`` does;
        None: there is nothing to compute."""
        if self._preference is None or self._preference.is_calibrated:
            return None
        self._learned_from = self._preference, self.assign()
        preference = self._preference.recalibrated()
        return preference, self._made(preference)

    def adopt(self, preference: Preference, assign: Assign) -> None:
        """Go by what ``with_measured`` or ``recalibrated`` has given; where a person has asked for
        something meanwhile, by the planner alone. Where meanwhile another coordinator's
        measurements were taken over, these stay."""
        if self._learned_from is None or self._preference is not self._learned_from[0]:
            return
        self._preference = preference
        self._assign = assign if self._assign is self._learned_from[1] else None

    def _read_preference(self) -> Preference | None:
        found = read_planner(self._planner, self._arguments, self._limits, self._told)
        return None if isinstance(found, str) else found.recalling(*self._recalled)

    def learn(self, about: Mapping[str, Any]) -> None:
        """Take over limits that only the running script knew, from a snapshot's ``about``."""
        facts, before = about.get("facts", {}), (self._limits, self._told)
        if facts.get("padded_vocab_size") is not None:
            self._limits = replace(self._limits, padded_vocab_size=facts["padded_vocab_size"])
        if self._told is not None and self._told.micro_batch_size is None:
            micro = facts.get("first_micro_batch_size")
            self._told = replace(self._told, micro_batch_size=micro)
        if self._limits.eval_batch_size is None:
            self._limits = replace(self._limits, eval_batch_size=facts.get("eval_batch_size"))
        if self._limits.global_batch_size is None:
            # What a configuration states may be changed by a person before the job goes on.
            batch_size = facts.get("global_batch_size")
            self._limits = replace(self._limits, global_batch_size=batch_size)
        if (layers := facts.get("pipeline_layers")) is not None:
            is_alike = self._limits.is_in_stages or facts.get("is_in_stages", False)
            self._limits = replace(self._limits, most_pp=layers, is_in_stages=is_alike)
        if (share := facts.get("first_share")) is not None:
            self._limits = self._limits.with_first_dp(share[1])
        if (self._limits, self._told) != before:
            self._preference = self._preference or self._read_preference()
            self._assign = None
            self._place = self._made_place()

    def _with(
        self,
        max_workers: int | None,
        max_hosts: int,
        request: str | None,
        explain: Callable[[str], object] = lambda reason: None,
        preference: Preference | None = None,
    ) -> Assign:
        planner = preference or self._preference
        guarded = None if planner is None else GuardedPlanner(planner, self._say)
        return make_assign(
            self._limits,
            replace(self._policy, preference=guarded),
            min_hosts=self._min_hosts,
            max_hosts=max_hosts,
            max_workers=max_workers,
            excluded=self._excluded,
            requested=parse_request(request) if request else None,
            explain=explain,
        )


def _choice_of_json(data: object) -> Choice:
    match data:
        case [dict() as degrees, int() | None as size, str(reason), *more] if len(more) < 2:
            # A release before did not say what is computed again: it was what the flags say.
            recompute = recompute_of_json(more[0]) if more else None
            return Choice(Degrees.from_json(degrees), (), reason, size, recompute)
    raise ValueError(f"{data!r} is no choice: degrees, samples of a pass, why, recompute")
