"""An agent joins in few bytes: it brings what the coordinator has not had from another one."""

from collections.abc import Callable

from scalai.core.messages.shared import Request
from scalai.launch.coordinator.calls import Join, JoinBriefly, Joined
from scalai.runtime.codec import encode
from scalai.runtime.pieces import cut, digest_of

SHORT_BYTES = 1 << 14
"""A join of so many bytes is sent as it is."""
TRIES = 4


def join(call: Callable[[Request[Joined]], Joined], request: Join) -> Joined:
    """Return the coordinator's answer to a join. Raises what ``call`` raises."""
    data = encode(request)
    if len(data) <= SHORT_BYTES:
        return call(request)
    pieces = cut(data)
    digests, brought = tuple(map(digest_of, pieces)), tuple[bytes, ...]()
    for _ in range(TRIES):
        answer = call(JoinBriefly(request.job, request.host, request.incarnation, digests, brought))
        if not answer.wanted:
            return answer
        brought = tuple(pieces[place] for place in answer.wanted)
    return call(request)  # it keeps less than a join has
