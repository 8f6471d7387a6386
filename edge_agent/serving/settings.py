"""Where the protocol is served, and to whom; what is not safe there is refused before anything starts."""

import ipaddress
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import msgspec
from msgspec import Meta, Struct

from stageloom.shared.errors import SettingError
from stageloom.shared.private_file import read_private

if TYPE_CHECKING:
    import ssl

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^:\[\]\s]+):([0-9]{1,5})")
Address = Annotated[str, Meta(max_length=256)]
_LEAST_TOKEN_CHARS: Final = 16
_TOKEN_FILE_CHARS: Final = 64 << 10
_NEEDED: Final = ("starlette", "uvicorn", "httptools", "grpc", "google.protobuf")

FAILED: Final = "failed"
"""Under this key a server's process tells the agent why it ends, in place of the addresses that it bound."""


class ServingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[agent.serving]`. An empty address: not served."""

    http: Address = ""
    grpc: Address = ""
    tokens: str = ""  # file of mode 0600 with one bearer token a line; empty: none is asked for
    certificate: str = ""  # PEM file for TLS; empty: no TLS
    key: str = ""  # PEM file of its key; empty: it is in the certificate's file
    open: bool = False  # beyond this machine without TLS or tokens
    message_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 64 << 20  # of one request
    waiting_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 512 << 20  # of all requests in work
    connections: Annotated[int, Meta(ge=1, le=1 << 16)] = 256  # over HTTP, at once
    rows: Annotated[int, Meta(ge=1, le=1 << 16)] = 64  # of a batch that is split

    @property
    def wanted(self) -> bool:
        """Whether anything is served."""
        return bool(self.http or self.grpc)


class ServingConfig(Struct, frozen=True, kw_only=True):
    """What the process is told when it starts."""

    settings: ServingSettings
    socket: str  # of the agent
    agent: int  # its process id: without this parent there is nothing to serve
    report: int  # descriptor of a socket of packets: the addresses or why it ends, then counts of requests
    count: bool = False  # requests, for metrics
    log_level: str = "INFO"


def encode_serving(config: ServingConfig) -> str:
    """For the process's command line."""
    return msgspec.json.encode(config).decode()


def decode_serving(text: str) -> ServingConfig:
    """What `encode_serving` made.

    Raises:
        SettingError: it is something else.
    """
    try:
        return msgspec.json.decode(text, type=ServingConfig)
    except msgspec.MsgspecError as error:
        raise SettingError(f"this process is started by the agent: {error}") from error


def host_and_port(address: str) -> tuple[str, int]:
    """`127.0.0.1:8000` or `[::1]:8000` in two parts.

    Raises:
        SettingError: it is something else.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2]) > 65535:
        raise SettingError(f"{address!r} is no address", remedy="write it like 127.0.0.1:8000")
    return parts[1].strip("[]"), int(parts[2])


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach it; a name other than localhost may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_tokens(file: str) -> frozenset[str]:
    """The tokens in a private file.

    Raises:
        StorageError: it cannot be read, or others can read it.
        SettingError: it holds none, or one that could be guessed.
    """
    # Made with sudo it is root's, and of mode 0600 no service reads it.
    remedy = "make it with mode 0600 and the agent's account as its owner (chown)"
    text = read_private(Path(file), limit_chars=_TOKEN_FILE_CHARS, remedy=remedy)
    tokens = frozenset(line.strip() for line in text.splitlines() if line.strip())
    if not tokens or any(len(token) < _LEAST_TOKEN_CHARS for token in tokens):
        raise SettingError(
            f"{file} holds no token, or one of fewer than {_LEAST_TOKEN_CHARS} characters",
            remedy="write one a line, such as `openssl rand -hex 32` prints",
        )
    return tokens


def tls_context(certificate: str, key: str) -> "ssl.SSLContext":
    """For a certificate and its key in PEM files; an empty `key`: it is in the same file.

    Raises:
        SettingError: they cannot be used.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password here OpenSSL would ask for one, and the process stand still.
        context.load_cert_chain(certificate, key or None, password="")
    except OSError as error:
        raise SettingError(
            f"{certificate} with {key or 'the key in it'} cannot be used for TLS: {error}",
            remedy="name a certificate in PEM and the key that belongs to it, without a passphrase",
        ) from error
    return context


class Guarded(Protocol):
    """Settings of something that listens; see `ServingSettings` for what they mean."""

    @property
    def tokens(self) -> str: ...
    @property
    def certificate(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def open(self) -> bool: ...


def check_settings(settings: ServingSettings) -> None:
    """Refuse what cannot work or would let strangers in.

    Raises:
        SettingError: an address beyond this machine without TLS and tokens, a file that is missing or
            no certificate with its key, or packages that are missing.
        StorageError: the tokens cannot be read, or others can read them.
    """
    check_guarded("serving", [one for one in (settings.http, settings.grpc) if one], settings)
    if settings.wanted:
        require_packages("serving over HTTP and gRPC", "serving", _NEEDED)


def check_guarded(table: str, addresses: Sequence[str], settings: Guarded) -> None:
    """Refuse addresses that would let strangers in; `table` is the setting's name.

    Raises:
        SettingError: an address beyond this machine without TLS and tokens, a file that is missing, or a
            certificate that cannot be used with its key.
        StorageError: the tokens cannot be read, or others can read them.
    """
    for address in addresses:
        host, _ = host_and_port(address)
        guarded = settings.certificate and settings.tokens
        if not is_loopback(host) and not guarded and not settings.open:
            raise SettingError(
                f"{address} can be reached from other machines, by anybody",
                remedy=f"give the settings {table}.certificate and {table}.tokens, or say --open",
            )
    if settings.tokens:
        read_tokens(settings.tokens)
    for file in filter(None, (settings.certificate, settings.key)):
        if not os.access(file, os.R_OK):
            raise SettingError(
                f"{file} cannot be read", remedy="name a PEM file that the agent's account may read"
            )
    if settings.certificate:
        tls_context(settings.certificate, settings.key)


def require_packages(what: str, extra: str, names: Sequence[str]) -> None:
    """Refuse to begin `what` where packages of an extra are missing.

    Raises:
        SettingError: they are.
    """
    missing = [name for name in names if not _found(name)]
    if missing:
        raise SettingError(
            f"{', '.join(missing)} cannot be imported, which {what} needs",
            remedy=f"pip install 'stageloom[{extra}]'",
        )


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
