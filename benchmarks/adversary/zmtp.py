"""A ZMTP 3.1 client with CURVE on a bare TCP socket: it does what libzmq never would.

Sources: https://rfc.zeromq.org/spec/37/ (ZMTP 3.1), https://rfc.zeromq.org/spec/26/ (CurveZMQ).
"""

import os
import socket
import struct
from types import TracebackType
from typing import Any, Final

from nacl import bindings as sodium
from zmq.utils import z85

from stageloom.shared.keyfile import KeyPair

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_COMMAND: Final = 0x04
_LARGE: Final = 0x02
_METADATA: Final = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
_IN_BOX_COMMAND: Final = 0x02  # the flag byte inside a CURVE message
_PING: Final = b"\x04PING\x00\x00"  # time to live 0: none


class HandshakeRefused(ConnectionError):
    """The server ended the handshake."""


class RawPeer:
    """One connection past the handshake; messages are sealed as CURVE demands, nothing else is checked."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.socket = connection
        self._key = key
        self._nonce = 3  # HELLO took 1, INITIATE 2

    @classmethod
    def connect(
        cls, host: str, port: int, keys: KeyPair, server_key: str, *, timeout_s: float = 10.0, **options: Any
    ) -> "RawPeer":
        """Connect and prove `keys` to the server of `server_key`, both in Z85.

        Raises:
            HandshakeRefused: the server ended the connection, as it does for a key that ZAP refuses.
            OSError: no connection, or no answer within `timeout_s`.
        """
        connection = socket.create_connection((host, port), timeout_s, **options)
        try:
            key = _handshake(connection, keys, z85.decode(server_key.encode()))
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            connection.close()
            raise HandshakeRefused(f"{host}:{port} ends the handshake") from error
        except BaseException:
            connection.close()
            raise
        return cls(connection, key)

    def message(self, body: bytes) -> bytes:
        """The bytes of one message of one frame."""
        return self._sealed(b"\x00" + body)

    def ping(self) -> bytes:
        """The bytes of one PING, which the other side answers by a PONG at once."""
        return self._sealed(bytes([_IN_BOX_COMMAND]) + _PING)

    def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            OSError: the connection is over, or takes nothing within its timeout.
        """
        self.socket.sendall(data)

    def reset(self) -> None:
        """End by RST: what the other side has not read yet is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _sealed(self, plain: bytes) -> bytes:
        nonce = struct.pack(">Q", self._nonce)
        self._nonce += 1
        box = sodium.crypto_box_afternm(plain, b"CurveZMQMESSAGEC" + nonce, self._key)
        return _frame(b"\x07MESSAGE" + nonce + box, 0)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return struct.pack(">BQ", flags | _LARGE, len(body)) + body


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("closed")
        data += part
    return data


def _command(connection: socket.socket, name: bytes) -> bytes:
    """The body of the next command, which must be `name`."""
    flags, length = _exactly(connection, 2)
    if flags & _LARGE:
        (length,) = struct.unpack(">Q", bytes([length]) + _exactly(connection, 7))
    body = _exactly(connection, length)
    if not body.startswith(bytes([len(name)]) + name):
        raise EOFError(f"{body[:8]!r} instead of {name!r}")
    return body[1 + len(name) :]


def _handshake(connection: socket.socket, keys: KeyPair, server_key: bytes) -> bytes:
    """The precomputed key of the session."""
    public, secret = (z85.decode(key.encode()) for key in (keys.public, keys.secret))
    connection.sendall(_GREETING)
    _exactly(connection, len(_GREETING))
    short_public, short_secret = sodium.crypto_box_keypair()
    nonce = struct.pack(">Q", 1)
    proof = sodium.crypto_box(bytes(64), b"CurveZMQHELLO---" + nonce, server_key, short_secret)
    connection.sendall(_frame(b"\x05HELLO\x01\x00" + bytes(72) + short_public + nonce + proof, _COMMAND))
    welcome = _command(connection, b"WELCOME")
    opened = sodium.crypto_box_open(welcome[16:], b"WELCOME-" + welcome[:16], server_key, short_secret)
    server_short, cookie = opened[:32], opened[32:]
    vouch_nonce = os.urandom(16)
    vouch = sodium.crypto_box(short_public + server_key, b"VOUCH---" + vouch_nonce, server_short, secret)
    nonce = struct.pack(">Q", 2)
    box = sodium.crypto_box(
        public + vouch_nonce + vouch + _METADATA, b"CurveZMQINITIATE" + nonce, server_short, short_secret
    )
    connection.sendall(_frame(b"\x08INITIATE" + cookie + nonce + box, _COMMAND))
    _command(connection, b"READY")
    return sodium.crypto_box_beforenm(server_short, short_secret)
