"""Which addresses a planner sends to: whoever may add a webhook must not reach the planner's own network.

A name is resolved once, what it resolves to is checked, and the connection goes to that address: a name that
resolves to something else the next moment gains nothing.
"""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

from stageloom.shared.errors import InputError

_NAT64: Final = IPv6Network("64:ff9b::/96")
_PORTS: Final = {"https": 443, "http": 80}

_NEVER: Final = tuple(
    ip_network(text)
    for text in (
        "100.100.100.200",  # Alibaba's metadata
        "168.63.129.16",  # Azure's channel to its machines
        "192.0.0.0/24",  # protocols' own, and Oracle's older metadata: Python 3.11 calls it global
        "192.88.99.0/24",  # relays of 6to4, given up: Python calls it global
        "fd00:ec2::/32",  # Amazon's metadata and resolvers
        "fd20:ce::254",  # Google's metadata
    )
)


def checked_url(url: str, *, private: bool) -> SplitResult:
    """The parts of a URL that messages may go to; `private`: addresses of local networks are allowed.

    Raises:
        InputError: no http or https URL with a host; http, or a literal address, that is not allowed.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url[:80]!r} is no URL: {error}", remedy="write https://HOST/PATH") from error
    if parts.scheme not in _PORTS or not parts.hostname or port == 0 or parts.username is not None:
        raise InputError(f"{url[:80]!r} is no https URL with a host", remedy="write https://HOST/PATH")
    if any(character <= " " or character == "\x7f" for character in url):
        raise InputError("the URL has a space or a control character", remedy="escape it")
    if not url.isascii():
        raise InputError(
            "the URL is not ASCII, and HTTP carries nothing else",
            remedy="escape its path and query with percent signs, and write its host in punycode (xn--...)",
        )
    if parts.scheme == "http" and not private:
        raise InputError(
            "http sends messages that anybody on the way can read",
            remedy="use https, or --allow-private within your own network",
        )
    try:
        literal = ip_address(parts.hostname)
    except ValueError:
        return parts
    problem = address_problem(literal, private=private)
    if problem:
        raise InputError(f"{parts.hostname} is {problem}", remedy="use a public address")
    return parts


def port_of(parts: SplitResult) -> int:
    """The port of a checked URL."""
    return parts.port or _PORTS[parts.scheme]


def address_problem(address: IPv4Address | IPv6Address, *, private: bool) -> str:
    """Why nothing is sent there; empty where it may be.

    Link-local addresses and others where clouds keep their metadata are refused always, and so are those that
    mean no one host. Loopback and local networks are refused unless `private`.
    """
    inner = _embedded(address)
    if inner is not None:
        return address_problem(inner, private=private)
    nowhere = address.is_reserved and not address.is_loopback  # Python counts ::1 among the reserved
    metadata = any(address in network for network in _NEVER)
    if address.is_link_local or address.is_multicast or address.is_unspecified or nowhere or metadata:
        return "an address that webhooks never go to (link-local, metadata, multicast or reserved)"
    site = isinstance(address, IPv6Address) and address.is_site_local  # Python counts it among the global
    if (site or not address.is_global) and not private:
        return "an address of a local network, which needs --allow-private"
    return ""


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """The IPv4 address inside one of the IPv6 forms that lead to it."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour
