"""Sign a statement with an ed25519 key, and check the signature.

The signature is a file beside the statement, ``statement.json.sig``: the 64 bytes of RFC 8032 over
the statement's bytes. OpenSSL checks it too, without dpvision (docs/verify.md).
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from dpvision.errors import ConfigError, DataError, remedy_for
from dpvision.files import write_file


def signature_of(statement: Path) -> Path:
    """Return the path of a statement's signature."""
    return statement.with_name(f"{statement.name}.sig")


def read_private_key(file: Path) -> Ed25519PrivateKey:
    """Read the ed25519 key that signs, from a PEM file without a password.

    Raises:
        ConfigError: it cannot be read, has a password, or is another kind of key.
    """
    remedy = "Make one: openssl genpkey -algorithm ed25519 -out key.pem"
    with _key_errors(f"report: --sign {file}", "private", remedy):
        key = load_pem_private_key(file.read_bytes(), password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError
    return key


def read_public_key(file: Path) -> Ed25519PublicKey:
    """Read the signer's ed25519 public key from a PEM file.

    Raises:
        ConfigError: it cannot be read, or is another kind of key.
    """
    remedy = "Make it of the private key: openssl pkey -in key.pem -pubout -out public.pem"
    with _key_errors(f"verify: --public-key {file}", "public", remedy):
        key = load_pem_public_key(file.read_bytes())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError
    return key


@contextlib.contextmanager
def _key_errors(where: str, kind: str, remedy: str) -> Iterator[None]:
    expected = f"expected a PEM file with an ed25519 {kind} key"
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror or error}; {expected}. {remedy_for(error, remedy)}"
        ) from None
    except TypeError:  # cryptography's error where a password is missing
        raise ConfigError(
            f"{where}: has a password; {expected} without one. Write it to another file with "
            "openssl pkey -in FILE -out OTHER, and delete that file after signing."
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{where}: another kind of file; {expected}. {remedy}") from None


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key's DER form (SubjectPublicKeyInfo), in hexadecimal."""
    return hashlib.sha256(
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def write_signature(statement: Path, key: Ed25519PrivateKey) -> Path:
    """Sign the file and return the signature's path.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = signature_of(statement)
    write_file(path, key.sign(statement.read_bytes()))
    return path


def require_signature(statement: Path, data: bytes, key: Ed25519PublicKey) -> None:
    """Refuse a statement that was not signed with this key as it is.

    Args:
        data: the statement's bytes.

    Raises:
        DataError: its signature is missing, or is of other bytes or another key.
    """
    path = signature_of(statement)
    try:
        signature = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"verify: {path}: {error.strerror or error}; expected the signature of {statement}. "
            + remedy_for(error, "Ask the signer for it, or omit --public-key.")
        ) from None
    try:
        key.verify(signature, data)
    except InvalidSignature:
        raise DataError(
            f"verify: {path}: not a signature of {statement} by the key {fingerprint(key)}; "
            "expected the statement as it was signed, and the signer's public key. The statement "
            "was altered or written again since, or another key signed it: do not rely on it, and "
            "ask the signer for both files and the key's fingerprint."
        ) from None
