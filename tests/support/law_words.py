"""Reports and orders of the job's law, as its tests say them."""

import numpy as np

from scalai.core.messages import reports
from scalai.core.messages.actions import Action, Send
from scalai.core.messages.commands import Command
from scalai.core.tensors.collection import Collection


def published(round: int) -> reports.Published:
    return reports.Published(round, ())


def restored(round: int) -> reports.Restored:
    """Return the report of a host whose workers hold no tensors."""
    return reports.Restored(round, Collection.of([]), np.zeros(0, np.uint64), {}, 0, 0)


def ordered(action: Action) -> Action | Command:
    """Return the command of an order, and other actions as they are."""
    return action.command if isinstance(action, Send) else action
