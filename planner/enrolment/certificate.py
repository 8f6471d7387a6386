"""The certificate that the enrolment listener shows: self-signed, made once, known by its digest.

Join tokens carry the digest, so there is no authority to trust and no name or date to check: a new device may
have any time on its clock.
"""

import datetime
import hashlib
import ssl
from pathlib import Path
from typing import Final

from stageloom.shared.errors import StateError
from stageloom.shared.private_file import read_private, write_private

CERTIFICATE_FILE: Final = "enrolment.pem"
_LIMIT_CHARS: Final = 8192
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


def certificate_digest(path: Path) -> bytes:
    """SHA-256 of the certificate (DER) in `path`; certificate and key are made first if there is no file.

    Raises:
        StorageError: the file cannot be written or read, or others could have read it.
        StateError: it holds no certificate.
    """
    if not path.exists():
        write_private(path, _new_certificate())
    text = read_private(path, limit_chars=_LIMIT_CHARS, remedy="remove it: the planner makes a new one")
    begin, end = text.find(_BEGIN), text.find(_END)
    try:
        der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)])
    except ValueError as error:
        raise StateError(
            f"{path} holds no certificate", remedy="remove it: the planner makes a new one"
        ) from error
    return hashlib.sha256(der).digest()


def _new_certificate() -> str:
    """A key (ECDSA, P-256) and its self-signed certificate in PEM."""
    # 10 MiB that only the first start needs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stageloom enrolment")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")
