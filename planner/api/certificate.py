"""A certificate that an operator gave the API, and renews."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

_SOON: Final = timedelta(days=14)


def expiry_notices(file: Path, now_us: int) -> list[str]:
    """What an operator should know of the certificates in this PEM file, the API's own and those that vouch
    for it: a line where the first of them ends within two weeks, or nobody can tell; else nothing."""
    from cryptography import x509  # 10 MiB that only who gave a certificate needs

    try:
        ends = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(file.read_bytes()))
    except (OSError, ValueError) as error:
        return [f"the API's certificate {file} cannot be read: {error}; name one in PEM"]
    left = ends - datetime.fromtimestamp(now_us * 1e-6, UTC)
    if left >= _SOON:
        return []
    when = (
        f"expires on {ends:%Y-%m-%d}, in {left.days} days"
        if left > timedelta(0)
        else f"expired on {ends:%Y-%m-%d}"
    )
    return [f"the API's certificate {file} {when}; renew the file: connections see it without a restart"]
