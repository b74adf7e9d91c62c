"""Limits of a job's size beside its hosts: a person's requests, and layouts out of memory."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from scalai.converters.megatron.model_shape import recompute_of
from scalai.core.degrees.assignment import make_assign
from scalai.core.degrees.batches import Shares
from scalai.core.degrees.degrees import Degrees, parse_request
from scalai.core.degrees.passes import Passes, offload_of_json, recompute_of_json
from scalai.core.degrees.policy import Choice, Needing, Preferring
from scalai.core.errors import RefusedError, ScalaiError, UsageError
from scalai.core.job.membership import Assign, Assignment, Place
from scalai.core.job.remembered import ASKED
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.planner.columns import Layout, columns_of
from scalai.core.planner.devices import GB, device_named
from scalai.core.planner.meter import (
    WINDOWS,
    ChangeTime,
    host_ratios,
    replica_hosts,
    replica_paces,
)
from scalai.core.planner.placement import MOST_PAIRS, make_place
from scalai.core.planner.preference import (
    Measured,
    Preference,
    change_of_json,
    change_to_json,
    measured_of_json,
    measured_to_json,
)
from scalai.core.planner.reconfiguration import Hosts, Reconfiguration, reconfiguration
from scalai.core.planner.step_memory import fits_host, step_memory
from scalai.launch.config.elastic_config import MEASURED
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.config.script_facts import (
    read_planner,
    read_sharding,
    read_workload,
    told_by,
)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class GuardedPlanner:
    """Asks a planner and logs its unexpected errors."""

    planner: Preferring
    say: Callable[[str], object]

    def order(
        self,
        choices: Sequence[Choice],
        present: Degrees | None,
        ran: Passes,
        failed: Sequence[Choice],
    ) -> Sequence[Choice]:
        """The planner's order of ``choices``.

        Raises:
            ScalaiError: No order, or a failure; its traceback is in the log.
        """
        return self._told(lambda: self.planner.order(choices, present, ran, failed))

    def spilled(self, choice: Choice) -> str:
        """The reason for a choice's state in host memory. Errors as of ``order``."""
        return self._told(lambda: self.planner.spilled(choice))

    def _told(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except ScalaiError:
            raise
        except Exception as error:  # our own slip: the job has degrees that run
            self.say(f"event=planner failed: {error!r}\n{traceback.format_exc()}")
            raise ScalaiError(f"{error!r}, and the coordinator's log says where") from error

    def on_hosts(self, slots: int) -> "GuardedPlanner":
        """The planner for hosts with ``slots`` ranks each."""
        return GuardedPlanner(self.planner.on_hosts(slots), self.say)


Stepped = tuple[Degrees, Passes, str]
"""A layout in which all ranks have made a step, and the device ("": unknown)."""
ANY_DEVICE = "a100-80gb"
"""Any device: the bytes of a layout do not depend on it."""
MOST_PACED = 4096
"""Number of slower and faster hosts kept for a job."""
SHOWN = 8
"""Largest number of replicas with a share each in a log line."""
MOST_STEPPED = 64
"""Number of such layouts kept for a job."""


class Sizing:
    """Inputs of ``make_assign`` for one job. ``scalai scale`` and out-of-memory change them."""

    def __init__(self, spec: JobSpec, say: Callable[[str], object] = lambda line: None) -> None:
        """Start with a person's settings."""
        facts, self._say = spec.script, say
        self._planner, self._arguments = spec.config.planner, facts.arguments
        self._limits, self._policy = facts.limits, facts.policy
        self._host_memory = (self._planner.host_memory_gb or 0) * GB
        self._recalled: tuple[tuple[Measured, ...], ChangeTime | None] = ((), None)
        """Measurements of the coordinator before: steps, and the seconds of a change."""
        self._deepspeed = spec.config.deepspeed, spec.deepspeed
        self._told = None if spec.deepspeed is None else told_by(spec.deepspeed)
        self._windows: dict[str, tuple[int, tuple[float, ...]]] = {}
        """Newest window of passes of each host in a round, and seconds of a pass in windows since
        the last comparison."""
        self._windows_of, self._ratios = 0, dict[str, float]()
        """Their round; slower and faster hosts, as of ``host_ratios``."""
        self._is_own_loop = self._arguments is None and self._told is None
        self._has_news = False
        self._preference = self._read_preference()
        self._place = self._made_place()
        self._min_hosts, self._max_hosts = spec.min_hosts, spec.max_hosts
        self._max_workers: int | None = None
        self._degrees: str | None = None
        self._is_asked, self._asked_at = False, -1
        """Whether a person has asked this coordinator or its predecessor for a size; else the
        newest generation with a record of the request."""
        self._stepped: tuple[Stepped, ...] = ()
        self._excluded: tuple[Choice, ...] = ()
        self._assign: Assign | None = None
        """Result of ``assign``, until something is learned."""
        self._learned_from: tuple[Preference, Assign] | None = None
        """The planner that began to learn, and the result of ``assign`` then."""

    def assign(self) -> Assign:
        """The present function that assigns workers to hosts.

        Degrees asked for by a person hold until the next ``rescale``, wherever they fit; elsewhere
        they have no effect.
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

    def why_not(self, hosts: tuple[tuple[str, int], ...], ran: Assignment | None) -> str:
        """Reason for no assignment, and the way out; a ``WhyNot``."""
        why = [""]
        self._with(self._max_workers, self._max_hosts, None, why.append)(hosts, ran)
        return why[-1]

    def place(self, target: Assignment, ran: Assignment, slots: Hosts) -> Assignment:
        """An assignment with its hosts in the order of the fewest bytes to move; a ``Place``. After
        an error it stays unchanged: nothing depends on the order."""
        try:
            return self._place(target, ran, slots)
        except Exception as error:  # our own slip: it must not end a job
            self._say(f"event=not_placed {error!r}: hosts keep the order of joining")
            return target

    def note_pace(
        self, round: int, current: Assignment, host: str, window: int, seconds: float
    ) -> str:
        """Record the seconds of a pass in a host's window. Returns a log line, if other hosts are
        slower or faster now than were before."""
        if round != self._windows_of:
            self._windows_of, self._windows = round, {}
        newest, found = self._windows.get(host, (0, ()))
        if window != newest:
            self._windows[host] = window, (*found, seconds)[-WINDOWS:]
        windows = {each: self._windows.get(each, (0, ()))[1] for each in current.active}
        if host not in windows or any(len(each) < WINDOWS for each in windows.values()):
            return ""
        self._windows = {each: (number, ()) for each, (number, _) in self._windows.items()}
        replicas = replica_hosts(current.workers, current.degrees)
        judged = host_ratios(windows, replicas, self._ratios)
        others = {each: of for each, of in self._ratios.items() if each not in windows}
        before, self._ratios = self._ratios, dict([*others.items(), *judged.items()][-MOST_PACED:])
        if before.keys() == self._ratios.keys():
            return ""
        ratios = " ".join(f"{each}={of:.2f}" for each, of in sorted(judged.items())) or "all alike"
        return f"event=paces {ratios}: shares follow at the next change"

    def paced(self, target: Assignment) -> Assignment:
        """An assignment with its replicas' measured paces; a ``Share``."""
        if self._planner.shares != MEASURED:
            return target
        paces: tuple[int, ...] = ()
        if target.degrees.vpp == 1 and not self._ratios.keys().isdisjoint(target.members):
            replicas = replica_hosts(target.workers, target.degrees)
            paces = replica_paces(replicas, self._ratios)
        reason = target.reason
        if paces:
            reason += f"; shares {self._shares_of(target, paces)} by measured speeds"
        return replace(target, paces=paces, reason=reason)

    def _shares_of(self, target: Assignment, paces: tuple[int, ...]) -> str:
        """Micro-batches of each replica, in words; without a known number the times of a pass."""
        micro = target.micro_batch_size or self._limits.micro_batch_size
        batch, found, words = self._limits.global_batch_size, paces, "for passes of "
        if self._arguments is not None and batch and micro:
            shares = Shares(batch // micro, target.degrees.dp, paces)
            found, words = tuple(map(shares.of_replica, range(shares.dp))), ""
        return words + "·".join(map(str, found[:SHOWN])) + "·…" * (len(found) > SHOWN)

    def _made_place(self) -> Place:
        of_job = self._arguments, *self._deepspeed
        work = read_workload(self._arguments, self._limits)
        return make_place(work, lambda world_size: read_sharding(world_size, *of_job))

    def moved(self, ran: Assignment, target: Assignment) -> Reconfiguration | None:
        """The bytes of a change of a model stated by the script's flags; None: unknown, or too many
        hosts to compute it at once."""
        work = read_workload(self._arguments, self._limits)
        if work is None or len(target.workers) * ran.degrees.dp * ran.degrees.cp > MOST_PAIRS:
            return None
        of_job = self._arguments, *self._deepspeed
        before, after = (
            Layout(each.degrees, 1, sharding=read_sharding(each.degrees.world_size, *of_job))
            for each in (ran, target)
        )
        try:
            return reconfiguration(
                work, device_named(ANY_DEVICE), before, after, ran.workers, target.workers
            )
        except (RefusedError, UsageError):  # a layout unknown to the formulas
            return None

    def scaled(
        self,
        nproc: int | None,
        nnodes: int | None,
        degrees: str | None,
        explain: Callable[[str], object],
    ) -> Assign:
        """The result of ``rescale`` with these arguments, as a dry run. A request that does not fit
        gives no assignment, and ``explain`` gets the reason."""
        return self._with(nproc, nnodes or self._max_hosts, degrees, explain)

    def rescale(self, nproc: int | None, nnodes: int | None, degrees: str | None) -> None:
        """Apply a person's request.

        Args:
            nproc: Total workers; None: no limit.
            nnodes: Most hosts; None: unchanged.
            degrees: Degrees as text; None: automatic.
        """
        self._is_asked = True
        self._max_workers, self._degrees = nproc, degrees
        self._max_hosts = nnodes or self._max_hosts
        self._assign = None

    def note_ran(self, ran: Assignment | None) -> bool:
        """Record a layout that fits: all its ranks have stepped. Returns whether it is new."""
        if ran is None:
            return False
        gpu = self._planner.gpu or ""
        return self._know(((ran.degrees, ran.passes, gpu),))

    def _know(self, stepped: Iterable[Stepped]) -> bool:
        known = dict.fromkeys((*self._stepped, *stepped))
        if len(known) == len(self._stepped):
            return False
        self._stepped, self._assign = tuple(known)[-MOST_STEPPED:], None
        return True

    @property
    def request(self) -> JsonText:
        """Persons' requests, layouts out of memory, and measurements, for the next coordinator."""
        excluded = [
            [
                each.degrees.to_json(),
                each.micro_batch_size,
                each.reason,
                each.recompute,
                each.offload,
            ]
            for each in self._excluded
        ]
        measured, change = self._recalled
        if (planner := self._preference) is not None:
            measured, change = planner.measured, planner.terms.change
        return JsonText.of([
            self._max_workers, self._max_hosts, self._degrees, excluded,
            measured_to_json(measured), *change_to_json(change), _stepped_to_json(self._stepped),
        ])  # fmt: skip

    def take_over(self, request: JsonText) -> None:
        """Adopt the previous coordinator's ``request``. Its measurements affect other layouts only
        once ``recalibrated`` is adopted.

        Raises:
            ValueError: ``request`` has another form.
        """
        match request.value():
            case [
                nproc, nnodes, degrees, list() as excluded, measured, *change, list() as stepped,
            ]:  # fmt: skip
                self._know(_stepped_of_json(stepped))
                recalled = tuple(measured_of_json(measured)), change_of_json(change)
                failed = tuple(_choice_of_json(each) for each in excluded)
            case other:
                raise ValueError(f"{other!r} is no request of persons")
        self.rescale(nproc, nnodes, degrees)
        self._recalled, self._excluded = recalled, failed
        if self._preference is not None:
            self._preference = self._preference.recalling(*recalled)

    def exclude(self, assignment: Assignment) -> None:
        """Exclude a layout that ran out of memory in its first step."""
        degrees, passes = assignment.degrees, assignment.passes
        failed = Choice(degrees, (), assignment.reason, *astuple(passes))
        self._excluded = (*self._excluded, failed)
        self._assign = None

    @property
    def has_planner(self) -> bool:
        """Whether degrees are computed, at once or after enough measurements."""
        return self._preference is not None

    @property
    def micro_batch_size(self) -> int | None:
        """Default samples per pass."""
        if self._preference is not None:
            return self._preference.micro_batch
        return self._limits.micro_batch_size

    @property
    def step_samples(self) -> int | None:
        """Samples of each step; None: unknown, or not the same for all."""
        limits = self._limits
        return None if limits.ramp_batch_sizes else limits.global_batch_size

    def with_measured(
        self, found: Measured, change: ChangeTime | None
    ) -> tuple[Preference, Assign] | None:
        """The planner after these measurements, with its assignments; None without a planner.
        Nothing changes before ``adopt``; it may take its time."""
        if self._preference is None:
            return None
        self._learned_from = self._preference, self.assign()
        preference = self._preference.with_measured(found, change)
        return preference, self._made(preference)

    def recalibrated(self) -> tuple[Preference, Assign] | None:
        """The planner after computing adopted measurements, as in ``with_measured``; None: nothing
        to do."""
        if self._preference is None or self._preference.is_calibrated:
            return None
        self._learned_from = self._preference, self.assign()
        preference = self._preference.recalibrated()
        return preference, self._made(preference)

    def adopt(self, preference: Preference, assign: Assign) -> None:
        """Use a result of ``with_measured`` or ``recalibrated``.

        After a person's request in between, only the planner counts. Another coordinator's
        measurements, adopted in between, win.
        """
        if self._learned_from is None or self._preference is not self._learned_from[0]:
            return
        self._preference = preference
        self._assign = assign if self._assign is self._learned_from[1] else None

    def _read_preference(self) -> Preference | None:
        found = read_planner(self._planner, self._arguments, self._limits, self._told)
        if isinstance(found, str):
            return None
        found = replace(found, device=replace(found.device, host_memory=self._host_memory))
        return found.recalling(*self._recalled)

    def _recall(self, asked: object) -> None:
        """Adopt a request to the coordinator of an ended run, until the next request."""
        match asked:
            case [int() | None as nproc, _, str() | None as degrees, *_, list() as stepped]:
                self._know(_stepped_of_json(stepped))
            case _:
                return  # the file has another form
        if self._is_asked or (nproc, degrees) == (self._max_workers, self._degrees):
            return
        self._max_workers, self._degrees, self._assign = nproc, degrees, None
        words = [f"--nproc {nproc}"] * bool(nproc) + [f"--degrees '{degrees}'"] * bool(degrees)
        self._say(f"event=asked before this start, and holds until scalai scale: {' '.join(words)}")

    def _learn_shares(self, sizes: Sequence[int], *, is_weighted: bool) -> None:
        """Adopt the global batches of a loop of one's own, the usual one last, and whether DP need
        not divide them because it weighs its losses."""
        limits = replace(self._limits, has_uneven_shares=is_weighted)
        *others, usual = sizes
        is_alike = limits.global_batch_size in (None, usual) and not limits.ramp_batch_sizes
        if is_alike and (is_weighted or not others):
            limits = replace(limits, global_batch_size=usual, ramp_batch_sizes=tuple(others))
        self._has_news |= is_weighted and not self._limits.has_uneven_shares
        self._limits = limits

    def take_news(self) -> bool:
        """Return, once, whether more degrees are valid now than the round's start knew."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def learn(self, about: Mapping[str, Any], generation: int = 0) -> None:
        """Adopt facts of the running script from a snapshot's ``about``: limits, and from the
        newest generation persons' requests."""
        if (asked := about.get("facts", {}).get(ASKED)) and generation >= self._asked_at:
            self._asked_at = generation
            self._recall(asked)
        facts, before = about.get("facts", {}), (self._limits, self._told)
        if facts.get("padded_vocab_size") is not None:
            self._limits = replace(self._limits, padded_vocab_size=facts["padded_vocab_size"])
        if self._told is not None and self._told.micro_batch_size is None:
            micro = facts.get("first_micro_batch_size")
            self._told = replace(self._told, micro_batch_size=micro)
        if (is_uneven := facts.get("has_uneven_shares")) is not None:
            self._limits = replace(self._limits, has_uneven_shares=is_uneven)
        if self._is_own_loop and (sizes := facts.get("batch_sizes")):
            self._learn_shares(sizes, is_weighted=facts.get("is_weighted", False))
        if self._limits.eval_batch_size is None:
            self._limits = replace(self._limits, eval_batch_size=facts.get("eval_batch_size"))
        if self._limits.global_batch_size is None:
            # A person may change the configuration's value before the job goes on.
            batch_size = facts.get("global_batch_size")
            self._limits = replace(self._limits, global_batch_size=batch_size)
        if (layers := facts.get("pipeline_layers")) is not None:
            is_alike = self._limits.is_in_stages or facts.get("is_in_stages", False)
            self._limits = replace(self._limits, most_pp=layers, is_in_stages=is_alike)
        if (refused := facts.get("refused_layouts")) is not None:
            self._limits = replace(self._limits, refused=tuple(map(tuple, refused)))
        if (share := facts.get("first_share")) is not None:
            self._limits = self._limits.with_first_dp(share[1])
        if fault := facts.get("offload_fault"):
            freedom = self._policy.freedom
            if "offload" not in dict(freedom.fixed):
                freedom = replace(freedom, fixed=(*freedom.fixed, ("offload", fault)))
                self._policy, self._assign = replace(self._policy, freedom=freedom), None
        if (size := facts.get("host_memory")) and self._planner.host_memory_gb is None:
            self._know_host(float(size))
        if (self._limits, self._told) != before:
            self._preference = self._preference or self._read_preference()
            self._assign = None
            self._place = self._made_place()

    def _know_host(self, size_bytes: float) -> None:
        """Adopt the memory of a host, as its workers found it."""
        if 0 < self._host_memory <= size_bytes:
            return  # the smallest of them counts
        self._host_memory, self._assign = size_bytes, None
        if (planner := self._preference) is not None:
            device = replace(planner.device, host_memory=size_bytes)
            self._preference = replace(planner, device=device)

    def _fits(self) -> tuple[tuple[Degrees, Passes], ...]:
        """Layouts that have run on devices of the present kind."""
        here = self._planner.gpu or ""
        return tuple((degrees, passes) for degrees, passes, gpu in self._stepped if gpu == here)

    def _needs(self) -> Needing | None:
        """A model of the bytes of a layout; None: the script's flags are not enough."""
        work, arguments = read_workload(self._arguments, self._limits), self._arguments
        if work is None or arguments is None:
            return None
        of_job, parallel = (arguments, *self._deepspeed), self._limits.is_sequence_parallel
        own, usual = recompute_of(arguments), self._limits.micro_batch_size or 1
        device = replace(device_named(ANY_DEVICE), host_memory=self._host_memory)

        def needed(layouts: Sequence[tuple[Degrees, Passes]]) -> Sequence[float]:
            cases = [
                Layout(
                    degrees,
                    passes.micro_batch_size or usual,
                    passes.recompute or own,
                    read_sharding(degrees.world_size, *of_job),
                    parallel and degrees.tp > 1,
                    passes.offload or self._policy.freedom.own_offload,
                )
                for degrees, passes in layouts
            ]
            x = columns_of([(work, device, each) for each in cases])
            return [float(each) for each in np.where(fits_host(x), step_memory(x).total, np.inf)]

        return needed

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
            replace(self._policy, preference=guarded, stepped=self._fits(), needs=self._needs()),
            min_hosts=self._min_hosts,
            max_hosts=max_hosts,
            max_workers=max_workers,
            excluded=self._excluded,
            requested=parse_request(request) if request else None,
            explain=explain,
        )


def _stepped_to_json(stepped: Iterable[Stepped]) -> list[Json]:
    return [[degrees.to_json(), *astuple(passes), gpu] for degrees, passes, gpu in stepped]


def _stepped_of_json(data: Iterable[object]) -> Iterator[Stepped]:
    for each in data:
        match each:
            case [dict() as degrees, int() | None as size, again, str(gpu)]:
                yield Degrees.from_json(degrees), Passes(size, recompute_of_json(again)), gpu
            case [dict() as degrees, int() | None as size, again, spilled, str(gpu)]:
                passes = Passes(size, recompute_of_json(again), offload_of_json(spilled))
                yield Degrees.from_json(degrees), passes, gpu
            case _:
                raise ValueError(
                    f"{each!r} is no layout: degrees, samples, recompute, offload, device"
                )


def _choice_of_json(data: object) -> Choice:
    match data:
        case [dict() as degrees, int() | None as size, str(reason), again, *spilled] if (
            len(spilled) < 2
        ):
            passes = size, recompute_of_json(again), offload_of_json((*spilled, None)[0])
            return Choice(Degrees.from_json(degrees), (), reason, *passes)
    raise ValueError(f"{data!r} is no choice: degrees, samples of a pass, why, recompute, offload")
