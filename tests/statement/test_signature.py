"""Signatures of statements: against RFC 8032 and OpenSSL, and every way to miss one."""

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from dpvision.cli import main
from dpvision.errors import ConfigError
from dpvision.files import write_json
from dpvision.statement.signature import (
    fingerprint,
    read_private_key,
    read_public_key,
    write_signature,
)
from dpvision.statement.statement import write_statement
from dpvision.statement.verify import verify_statement

RFC_8032 = {  # section 7.1, test 1: the empty message
    "seed": "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
    "public": "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
    "signature": "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bac"
    "c61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
}


def private_pem(
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey,
    encryption: KeySerializationEncryption | None = None,
) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def write_keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """A new pair of keys in PEM files."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(private_pem(key))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def signed(copy_of: Callable[[], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A signed statement, and the signer's public key."""
    statement = write_statement(copy_of())
    private, public = write_keys(tmp_path)
    write_signature(statement, read_private_key(private))
    return statement, public


def test_a_signature_is_the_one_of_rfc_8032(tmp_path: Path) -> None:
    der = bytes.fromhex("302e020100300506032b657004220420" + RFC_8032["seed"])
    body = base64.b64encode(der).decode()
    pem = tmp_path / "key.pem"
    pem.write_text(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n")
    (tmp_path / "statement.json").touch()
    key = read_private_key(pem)
    path = write_signature(tmp_path / "statement.json", key)
    assert path.name == "statement.json.sig"
    assert path.read_bytes().hex() == RFC_8032["signature"]
    of_public = bytes.fromhex("302a300506032b6570032100" + RFC_8032["public"])
    assert fingerprint(key.public_key()) == hashlib.sha256(of_public).hexdigest()


def test_openssl_makes_the_keys_and_checks_the_signature(
    copy_of: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    run, private, public = copy_of(), str(tmp_path / "key.pem"), str(tmp_path / "public.pem")

    def openssl(*arguments: str) -> bytes:
        return subprocess.run(["openssl", *arguments], check=True, capture_output=True).stdout

    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    assert main(["report", str(run), "--sign", private]) == 0
    statement, der = run / "statement.json", openssl("pkey", "-pubin", "-in", public, *DER)
    assert f"the key {hashlib.sha256(der).hexdigest()}\n" in capsys.readouterr().out
    files = ["-in", str(statement), "-sigfile", f"{statement}.sig"]
    verified = openssl("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", *files)
    assert b"Verified Successfully" in verified
    assert main(["verify", str(statement), "--public-key", public]) == 0
    printed = capsys.readouterr().out
    assert f"by the key {hashlib.sha256(der).hexdigest()}\n" in printed


DER = ["-outform", "DER"]


def test_a_signature_without_a_key_is_not_checked(signed: tuple[Path, Path]) -> None:
    statement, public = signed
    first = verify_statement(statement)[0]
    assert (first.name, first.status) == ("signature", "not checked")
    assert "--public-key" in first.detail
    first = verify_statement(statement, public_key=public)[0]
    assert (first.name, first.status) == ("signature", "ok")
    statement.with_name("statement.json.sig").unlink()
    assert verify_statement(statement)[0].name == "schema"


@pytest.mark.parametrize("how", ["altered", "one byte", "cut", "empty", "missing", "another key"])
def test_what_was_not_signed_as_it_is_is_refused(
    how: str, signed: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statement, public = signed
    signature = statement.with_name("statement.json.sig")
    if how == "altered":
        write_json(statement, {**json.loads(statement.read_text()), "recipe": "another"})
    if how == "one byte":  # another space, the same JSON
        statement.write_text(statement.read_text() + " ")
    if how in ("cut", "empty"):
        signature.write_bytes(signature.read_bytes()[: 63 if how == "cut" else 0])
    if how == "missing":
        signature.unlink()
    if how == "another key":
        _, public = write_keys(tmp_path, "another")
    assert main(["verify", str(statement), "--public-key", str(public)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: verify: ") and "statement.json.sig: " in error
    right = "No such file" if how == "missing" else fingerprint(read_public_key(public))
    assert right in error and "signer" in error


@cache
def wrong_keys() -> dict[str, bytes]:
    ours, other = Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    spki = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {
        "private": private_pem(ours),
        "public": ours.public_key().public_bytes(*spki),
        "password": private_pem(ours, BestAvailableEncryption(b"secret")),
        "elliptic": private_pem(other),
        "elliptic public": other.public_key().public_bytes(*spki),
        "text": b"a password",
        "empty": b"",
    }


@pytest.mark.parametrize("which", [*wrong_keys(), "missing", "a folder"])
def test_another_file_than_the_key_is_one_error_with_the_remedy(which: str, tmp_path: Path) -> None:
    file = tmp_path if which == "a folder" else tmp_path / "file.pem"
    if which in wrong_keys():
        file.write_bytes(wrong_keys()[which])
    if which != "private":
        remedy = "openssl pkey -in FILE" if which == "password" else "openssl genpkey -algorithm"
        with pytest.raises(ConfigError, match=r"report: --sign .*; expected a PEM") as caught:
            read_private_key(file)
        assert remedy in str(caught.value) and "secret" not in str(caught.value)
    if which != "public":
        with pytest.raises(ConfigError, match=r"verify: --public-key .*an ed25519 public key"):
            read_public_key(file)


def test_a_report_made_again_has_no_old_signature_and_says_what_it_lacks(
    copy_of: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (private, public) = copy_of(), write_keys(tmp_path)
    told, signature = tmp_path / "declared.json", run / "statement.json.sig"
    lists = {"curators": ["x"], "sector": "Healthcare", "publication_date": "2026-11-29"}
    names = ("name", "intended_use", "region", "justification")
    write_json(told, dict.fromkeys(names, "x") | lists)
    more = ["--tuning", "none", "--declared", str(told)]
    assert main(["report", str(run), *more, "--sign", str(private)]) == 0
    assert main(["report", str(run), *more]) == 0  # the same bytes
    said = capsys.readouterr().err
    assert "give it again" not in said and "removed" not in said
    assert verify_statement(run / "statement.json", public_key=public)[0].status == "ok"
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().err
    assert "had --tuning none, this one has not: give it again" in said
    assert "had --declared FILE, this one has not: give it again" in said
    assert "statement.json.sig was removed" in said and "Sign this one with --sign" in said
    assert not signature.exists()
    assert main(["report", str(run), *more, "--sign", str(private)]) == 0
    assert signature.exists() and "again" not in capsys.readouterr().err
    write_statement(run)
    assert not signature.exists()


def test_a_wrong_key_is_found_before_the_report_is_written(
    copy_of: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of()
    assert main(["report", str(run), "--sign", str(tmp_path / "none.pem")]) == 2
    assert "error: report: --sign" in capsys.readouterr().err
    assert not (run / "statement.json").exists() and not (run / "report.html").exists()
