"""Certificates for servers on loopback: an authority, what it signed, and another authority."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)
_NAMES = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
_AUTHORITY, _OTHER = "objkv test authority", "another authority"


def make_certificates(folder: Path) -> Path:
    """Write ``ca.pem``, ``cert.pem``, ``key.pem`` and ``other-ca.pem``, which signed neither.

    The certificate is for ``localhost`` and 127.0.0.1, as a server and as a client, for a day.
    Returns the folder, absolute.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    key, authority_key, other_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    is_authority, names = x509.BasicConstraints(True, 0), x509.SubjectAlternativeName(_NAMES)
    _sign(folder / "ca.pem", _AUTHORITY, authority_key, _AUTHORITY, authority_key, is_authority)
    _sign(folder / "cert.pem", "localhost", key, _AUTHORITY, authority_key, names)
    _sign(folder / "other-ca.pem", _OTHER, other_key, _OTHER, other_key, is_authority)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return folder


def _sign(
    file: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> None:
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .public_key(key.public_key())
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .sign(issuer_key, hashes.SHA256())
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
