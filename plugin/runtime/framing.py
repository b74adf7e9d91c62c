"""One framing for all traffic between a job's processes: length-prefixed frames over a stream
socket.

After the proof of both sides (``handshake``) every frame is sealed with AES-256-GCM under a key of
its direction and its own number as nonce (NIST SP 800-38D, 8.2.1): a changed, missing, repeated or
moved frame ends the connection, and nobody on the way reads it.
"""

import array
import fcntl
import os
import socket
import struct
import termios
import time

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from scalai.core.errors import MessageError, PeerError, SilentError, UnprovenError

Buffer = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">4xQ")
"""A frame's nonce: 12 bytes, the last 8 count the frames of one direction from 0."""
_TAG_BYTES = 16

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
GONE_AFTER_S = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
"""Seconds until a connection to a vanished host breaks, with or without bytes on their way to it.
"""


class FramedSocket:
    """A connected socket with frames. One thread may send while another receives.

    ``timeout_s`` limits the other side's silence when it should act, in seconds; None: no limit.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float | None) -> None:
        self._socket = connection
        self.peer = peer
        self.timeout_s = timeout_s
        self._ends_at: float | None = None
        self._within_s = 0.0
        self._armed_s: float | None = _NEVER_ARMED
        self._sealing: _Direction | None = None
        self._opening: _Direction | None = None
        self.heard_at = time.monotonic()
        """Begin of the newest frame's arrival, by the monotonic clock."""

    def seal(self, send_key: bytes, receive_key: bytes) -> None:
        """Seal all frames from now on, in both directions. Keys of 32 bytes, of this connection
        alone.
        """
        self._sealing, self._opening = _Direction(send_key), _Direction(receive_key)

    def expire_in(self, seconds: float | None) -> None:
        """Limit all that follows to this time in all; None: only ``timeout_s`` counts again."""
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._within_s = seconds or 0.0

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def cut(self) -> None:
        """End the connection from another thread: waiting calls raise at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other side was faster.

    def __enter__(self) -> "FramedSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: Buffer) -> None:
        """Send one frame.

        Raises:
            MessageError: It is longer than ``MAX_FRAME_BYTES`` allows; nothing was sent.
            PeerError: The connection has ended.
            SilentError: The other side does not read it in time.
        """
        if len(data) > MAX_FRAME_BYTES - _TAG_BYTES:
            raise MessageError(
                f"a message of {len(data)} bytes is too long for {self.peer}; at most "
                f"{MAX_FRAME_BYTES - _TAG_BYTES} can be sent at once."
            )
        if self._sealing is not None:
            head = _LENGTH.pack(len(data) + _TAG_BYTES)
            data = self._sealing.cipher.encrypt(self._sealing.nonce(), data, head)
        else:
            head = _LENGTH.pack(len(data))
        try:
            if len(data) <= _JOINED_BYTES:
                self._arm()
                self._socket.sendall(head + bytes(data))
                return
            for part in (head, data):
                self._arm()
                self._socket.sendall(part)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, most: int = MAX_FRAME_BYTES) -> bytes:
        """Receive one frame of at most ``most`` bytes.

        Raises:
            PeerError: The connection has ended, or the bytes are no frame of the other side's.
            UnprovenError: They are none, before the other side's proof.
            SilentError: Nothing came in time.
        """
        head = bytearray(_LENGTH.size)
        self._fill(memoryview(head))
        self.heard_at = time.monotonic()
        (length,) = _LENGTH.unpack(head)
        extra = _TAG_BYTES if self._opening is not None else 0
        if not extra <= length <= most + extra:
            kind = UnprovenError if self._opening is None else PeerError
            raise kind(
                f"{self.peer} announces a message of {length - extra} bytes; 0 to {most} are "
                "expected. Is something else listening on that port?"
            )
        data = self._read(length)
        if self._opening is None:
            return bytes(data)
        try:
            return self._opening.cipher.decrypt(self._opening.nonce(), data, bytes(head))
        except InvalidTag:
            raise PeerError(
                f"a message from {self.peer} arrived damaged, or was changed on its way. Connect "
                "again."
            ) from None

    def has_unread(self) -> bool:
        """Return True if unread bytes have arrived. Callable from any thread."""
        count = array.array("i", [0])
        try:
            fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, count)
        except (OSError, ValueError):  # it is closed
            return False
        return count[0] > 0

    def _read(self, length: int) -> bytearray:
        """Receive so many bytes, in memory growing with them: an announcement alone takes none."""
        data = bytearray(min(length, _TAKEN_BYTES))
        begin = 0
        while True:
            with memoryview(data) as view:
                self._fill(view[begin:])
            begin = len(data)
            if begin == length:
                return data
            data.extend(bytes(min(begin, length - begin)))

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                self._arm()
                count = self._socket.recv_into(view)
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise PeerError(
                    f"{self.peer} closed the connection. Its log says why, if it lives."
                )
            view = view[count:]

    def _arm(self) -> None:
        limit_s = self.timeout_s
        if self._ends_at is not None:
            left_s = self._ends_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            limit_s = left_s if limit_s is None else min(left_s, limit_s)
        if limit_s != self._armed_s:  # each time costs a call of the kernel
            self._socket.settimeout(limit_s)
            self._armed_s = limit_s

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError) and error.errno is None:  # else it is the kernel's
            limit_s = self.timeout_s if self._ends_at is None else self._within_s
            return SilentError(f"{self.peer} was silent for {limit_s:g} s. Is its host alive?")
        return PeerError(f"the connection to {self.peer} broke ({error}). Is its host alive?")


_NEVER_ARMED = -1.0
_TAKEN_BYTES = 2 << 20
"""First room for a frame; then as much again as has come."""
_JOINED_BYTES = 1 << 16
"""Frames up to this length go with their length in one call."""


class _Direction:
    """The key of one direction, and the number of its frames so far.

    For one process: a fork would use the same nonces for other frames.
    """

    def __init__(self, key: bytes) -> None:
        self.cipher = AESGCM(key)
        self._number, self._process = 0, os.getpid()

    def nonce(self) -> bytes:
        """Return the next frame's nonce."""
        if os.getpid() != self._process:
            raise PeerError(
                f"a connection of process {self._process} is used by process {os.getpid()}, a fork "
                "of it. Connect anew in the fork, or call from the process that has connected."
            )
        number, self._number = self._number, self._number + 1
        return _NUMBER.pack(number)


def tune(connection: socket.socket) -> None:
    """Send small frames at once, and detect a vanished host."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # Keepalive sends nothing while bytes wait to be acknowledged (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_AFTER_S)
