"""The agent's part in a deposit: room for it beside the training, who writes what, and the seal."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from scalai.core import events
from scalai.core.errors import ScalaiError
from scalai.core.orders import WriteOrder
from scalai.core.reports import Report, Sealed
from scalai.core.worker_messages import AwaitSlot, BeginDeposit, RankDeposited
from scalai.launch.background import Background
from scalai.launch.round import DepositUnderWay, Round, keep_longest
from scalai.runtime.failpoints import reached
from scalai.store.deposit import Deposit
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_bytes

AGAIN_S, LONGEST_AGAIN_S = 5.0, 300.0
"""How long after a vain try room for the next deposit is made again: at first, and at most."""

log = logging.getLogger(__name__)


class Deposits:
    """Deposits of one host's workers, of any round. Only the agent's own thread calls it.

    Args:
        store: This host's.
        tell: Reports to the coordinator.
        background: Runs what blocks.
    """

    def __init__(
        self, store: HostStore, tell: Callable[[Report], None], background: Background
    ) -> None:
        self._store, self._tell, self._background = store, tell, background

    def reserve(self, current: Round | None) -> None:
        """Make the next deposit's files beside the training, once the store has room for them."""
        if current is None or not current.is_complete(current.published):
            return
        is_first = not current.is_restoring and current.deposit is None and not current.stepped
        if (
            current.reserved is not None
            or current.is_reserving
            or (current.deposit is None and time.monotonic() < current.reserve_at)
            or (
                not is_first
                and (not current.is_complete(current.stepped) or len(self._store.generations()) > 1)
            )
        ):
            return
        current.is_reserving = True
        held = current.held()

        def reserved(deposit: Deposit) -> None:
            current.reserved, current.is_reserving = deposit, False
            current.reserve_at = 0.0
            self._give_slots(current)
            self.give_orders(current)
            self.seal_if_complete(current)

        self._background.run(
            lambda: self._store.reserve(held),
            reserved,
            "making room for a deposit",
            self._store.discard,
            lambda reason: self._trains_on(current, reason),
        )

    @staticmethod
    def _trains_on(current: Round, reason: str) -> bool:
        """There is no room for the next deposit. The training needs none: it is tried again, later
        and later, and at the latest when the deposit is wanted."""
        current.is_reserving = False
        if current.deposit is not None or not current.is_complete(current.stepped):
            return False
        current.reserve_wait_s = min(2 * current.reserve_wait_s or AGAIN_S, LONGEST_AGAIN_S)
        current.reserve_at = time.monotonic() + current.reserve_wait_s
        log.warning(
            "event=no_room round=%d: %s Until there is room the training goes on, but a change or "
            "an end would lose the steps since the newest generation. Tried again in %.0f s.",
            current.number, reason, current.reserve_wait_s,
        )  # fmt: skip
        return True

    def retry(self, current: Round | None) -> None:
        """Make room where there was none before. Called now and then."""
        if current is not None and current.reserve_at:
            self.reserve(current)

    def give_back(self, ended: Round) -> None:
        """The workers are gone: the next deposit's files are used again."""
        self._store.stop_reserving()
        is_sealing = ended.deposit is not None and ended.deposit.is_sealing
        if ended.reserved is not None and not is_sealing:
            self._store.discard(ended.reserved)

    def await_slot(
        self, current: Round, answer: "Future[WriteOrder | None]", request: AwaitSlot
    ) -> None:
        """A worker wants to map its file of the next deposit, once it is there."""
        if request.rank not in current.ranks:
            answer.set_result(None)
            return
        current.slot_waiters.append((request.rank, answer))
        self._give_slots(current)

    @staticmethod
    def _give_slots(current: Round) -> None:
        if current.reserved is not None and current.deposit is None:
            for rank, answer in current.slot_waiters:
                answer.set_result(current.reserved.orders[rank])
            current.slot_waiters.clear()

    def begin(
        self, current: Round, answer: "Future[WriteOrder | None]", request: BeginDeposit
    ) -> None:
        """A worker has come to a step at which it deposits. At a stop that was taken back meanwhile
        it gets no order, and goes on."""
        rank, reason, step = request.rank, request.reason, request.step
        if reason == "stop" and current.stop != step:
            answer.set_result(None)
            return
        if current.deposit is None:
            current.deposit = DepositUnderWay(reason, step)
        elif current.deposit.step != step:
            # The others still write what this rank has written: its next deposit comes after it.
            current.postponed.append(lambda: self.begin(current, answer, request))
            return
        current.deposit.waiting[rank] = answer
        self.reserve(current)
        self.tell_arrived(current)
        self.give_orders(current)

    def tell_arrived(self, current: Round) -> None:
        """Tell the coordinator, once all workers of this host that live have ended the step at
        which to stop: who dies from then on leaves no other rank waiting for it in a
        collective."""
        under_way = current.deposit
        is_stop = under_way is None or under_way.reason == "stop"
        if current.stop is None or current.has_arrived or not is_stop:
            return
        waiting = set(under_way.waiting) if under_way else set()
        if current.is_complete(waiting | current.lost):
            current.has_arrived = True
            self._tell(events.Arrived(self._store.host, current.number, current.stop))

    def withdraw(self, current: Round) -> None:
        """The stop is taken back: workers that wait at it go on."""
        under_way = current.deposit
        if under_way is None or under_way.reason != "stop" or current.may_deposit:
            return
        current.deposit = None
        for answer in under_way.waiting.values():
            answer.set_result(None)

    def give_orders(self, current: Round) -> None:
        """Answer the workers that wait for their order, once the files and the job's tensor count
        are there; at a stop, once the workers of every host have come to it."""
        under_way = current.deposit
        if under_way is None or current.reserved is None or current.tensors is None:
            return
        if under_way.reason == "stop" and not current.may_deposit:
            return
        for rank, answer in list(under_way.waiting.items()):
            del under_way.waiting[rank]
            under_way.ordered.add(rank)
            answer.set_result(current.reserved.orders[rank])

    def deposited(
        self, current: Round, answer: "Future[WriteOrder | None]", written: RankDeposited
    ) -> None:
        """A worker has written its share, or what it took over from one that died."""
        if current.deposit is None:  # it was sealed without a worker that had died by then
            answer.set_result(None)
            return
        if current.is_draining and current.deposit.reason == "stop":
            current.deposit.done[written.rank] = answer
        else:
            answer.set_result(None)
        current.deposit.report(written.rank, written.part)
        keep_longest(current.deposit.seconds, written.seconds)
        current.deposit.consumed_samples = written.consumed_samples
        self.seal_if_complete(current)

    def seal_if_complete(self, current: Round) -> None:
        """Seal the deposit once every worker that lives has written, and tell of it."""
        under_way, deposit = current.deposit, current.reserved
        is_stop = current.is_draining and (under_way is None or under_way.reason == "stop")
        if is_stop and not current.may_deposit:
            return
        written = set(under_way.parts) if under_way else set()
        if not current.is_complete(written | current.lost):
            return
        if not written and current.is_draining:
            self._tell_sealed(current, None)
        if not written or under_way is None or under_way.is_sealing:
            return
        if under_way.reason != "stop" and current.lost - written:
            return  # the round has failed
        assert deposit is not None, "who has written had an order"
        under_way.hand_over(current.lost, deposit)
        if not under_way.is_handed_over:
            return
        under_way.is_sealing = True
        for answer in under_way.done.values():
            answer.set_result(None)
        reached("seal")
        about = {
            "deposit": f"{current.workers.run}-{current.number}-{under_way.step}",
            "consumed_samples": under_way.consumed_samples,
            "degrees": current.workers.degrees,
            "world_size": current.workers.placement.world_size,
            "tensors": current.tensors,
            "hosts": list(current.workers.placement.group),
            "facts": current.facts,
            "time": time.time(),
        }

        def seal() -> bytes:
            began = time.monotonic()
            try:
                manifest = self._store.seal(
                    deposit,
                    step=under_way.step,
                    about=about,
                    parts=under_way.parts,
                    taken_over=under_way.taken_over,
                )
            except (ScalaiError, OSError):
                # The round fails by it. Nobody else would, and later deposits need the room.
                self._store.discard(deposit)
                raise
            log.info("event=seal step=%d took_s=%.3f", under_way.step, time.monotonic() - began)
            return manifest_bytes(manifest)

        def sealed(manifest: bytes) -> None:
            reached("sealed")
            self._tell_sealed(current, manifest)
            current.reserved, current.deposit = None, None
            postponed, current.postponed = current.postponed, []
            for again in postponed:
                again()

        def too_late(manifest: bytes) -> None:
            if not current.is_expelled:  # else the coordinator may count on it by now
                self._store.discard(deposit)

        self._background.run(seal, sealed, "sealing the deposit", too_late)

    def _tell_sealed(self, current: Round, manifest: bytes | None) -> None:
        """Report a deposit; None: nobody lived to write."""
        under_way = current.deposit or DepositUnderWay("stop", 0)
        if current.has_sealed:
            return
        current.has_sealed = under_way.reason == "stop"
        current.give_up_at = None
        self._tell(Sealed(current.number, under_way.reason, manifest, dict(under_way.seconds)))
