"""Certificates for servers on loopback: an authority, what it signed, and another authority."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


def make_certificates(folder: Path) -> Path:
    """Write ``ca.pem``, ``cert.pem``, ``key.pem`` and ``other-ca.pem``, which signed neither.

    The certificate is for ``localhost`` and 127.0.0.1, as a server and as a client, for a day.
    Returns the folder, absolute.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, authority = _authority("objkv test authority")
    _, other = _authority("another authority")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        _builder("localhost", issuer=authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    for name, value in (("ca", authority), ("cert", certificate), ("other-ca", other)):
        encoded = value.public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(encoded)
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder


def _authority(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(name, issuer=_name(name))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _builder(name: str, *, issuer: x509.Name) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
