"""A small ring of pinned buffers between a device and host memory, made before it is needed.

Pinning costs seconds a GB, so the ring is small and stays; a copy through it overlaps with the one
before. One thread is slower than the link: several share each buffer.
"""

import os
from collections.abc import Iterable

import torch

from scalai.runtime.at_once import at_once

RING_BYTES = 32 << 20
RING_BUFFERS = 3
MOST_COPIERS = 4
"""Most threads for a buffer. One moves 7.5 GB/s beside a link of 58 (H100, PCIe 5)."""
SHARED_BYTES = 1 << 20
"""Fewer bytes are not worth sharing."""


def copiers() -> int:
    """Return the number of copying threads for this worker, beside its host's other workers."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_COPIERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class StagingRing:
    """Pinned buffers used in turn, with a stream of their own. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # High priority: with one connection to the device (CUDA_DEVICE_MAX_CONNECTIONS) streams of
        # one priority wait behind each other. torch leaves both constructors unannotated.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(RING_BUFFERS)
        ]
        self._events = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in self._buffers
        ]
        self._turn = 0
        self._threads = copiers()
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Copy something of each width once.

        A device loads a kernel at its first use and waits with that for all queued work: in an
        emergency for ever, behind the collective of a dead partner.
        """
        with torch.cuda.stream(self.stream):
            for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
                turned = torch.zeros((2, 3), dtype=dtype, device=self.device).t()
                staged = self._buffers[0][: turned.nbytes].view(dtype).view(turned.shape)
                staged.copy_(turned, non_blocking=True)
                turned.copy_(staged, non_blocking=True)
        self.stream.synchronize()

    def begin(self) -> None:
        """Make the ring's stream wait for work queued on the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make the current stream wait for work queued on the ring's stream."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Wait for a free buffer [RING_BYTES]; return it and the event to record behind its use."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        self._events[turn].synchronize()
        return self._buffers[turn], self._events[turn]

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a buffer and other memory of the host; both of one shape and dtype."""
        move(target, source, self._threads)


def move(target: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    """Copy memory of the host of one shape and dtype, any strides, by several threads if it is
    large.

    Blocks until all of it is there.
    """
    parts = min(threads, source.nbytes // SHARED_BYTES) if source.dim() else 1
    if parts < 2:
        target.copy_(source)
        return
    pairs = zip(target.tensor_split(parts), source.tensor_split(parts), strict=True)
    at_once(lambda pair: pair[0].copy_(pair[1]), pairs, threads=parts)


def use_device_of(rings: Iterable[torch.device]) -> None:
    """Set this thread's device to the ring's.

    A new thread's device is the host's first one; each process touching it takes half a gigabyte
    there.
    """
    for device in rings:
        torch.cuda.set_device(device)


def rings_for(devices: Iterable[torch.device]) -> dict[torch.device, StagingRing]:
    """Make a ring for every CUDA device. Call it before the first step: pinning is slow."""
    return {
        device: StagingRing(device)
        for device in sorted(set(devices), key=str)
        if device.type == "cuda"
    }
