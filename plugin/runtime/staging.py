"""A small ring of pinned buffers between a device and host memory, made before it is needed.

Pinning costs seconds a GB, so the ring is small and stays; a copy through it overlaps with the one
before."""

from collections.abc import Iterable

import torch

RING_BYTES = 32 << 20
RING_BUFFERS = 3


class StagingRing:
    """Pinned buffers used in turn, with a stream of their own. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # torch leaves these two constructors without annotations.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(RING_BUFFERS)
        ]
        self._events = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in self._buffers
        ]
        self._turn = 0

    def begin(self) -> None:
        """Make the ring's stream wait for what the current stream has queued."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make the current stream wait for what the ring's stream has queued."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a free buffer [RING_BYTES] and the event to record behind its use; waits until it
        is free."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        self._events[turn].synchronize()
        return self._buffers[turn], self._events[turn]


def rings_for(devices: Iterable[torch.device]) -> dict[torch.device, StagingRing]:
    """Make a ring for every device that is not the host. Call it before the first step: pinning is
    slow."""
    return {
        device: StagingRing(device)
        for device in sorted(set(devices), key=str)
        if device.type == "cuda"
    }
