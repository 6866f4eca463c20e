"""``dpvision verify``: check a statement against the run and the store."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import tyro

from dpvision.cli.output import emit, parse
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    from dpvision.statement.check import Check


def verify(
    statement: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STATEMENT")],
    run: Path | None = None,
    store: Path | None = None,
    public_key: Path | None = None,
    json: bool = False,
) -> None:
    """Check a guarantee statement: its schema and figures, and epsilon by a second accountant that
    shares no code with the first.

    --run adds the hashes of weights, config and code, the ledger's hash chain, and the lineage in
    ledger, manifest and weights. --store adds that the store's ledgers match its own record of
    them, and which other runs used the same records. --public-key first requires the signature
    statement.json.sig (`dpvision report --sign`).

    Every value is recomputed from the statement's plan and steps, whatever version wrote it, or
    listed as declared. Each check is ok, declared, not checked with a reason, unverified (a figure
    that could not be confirmed), or failed. The exit status is 0 if no check failed and no figure
    is unverified, 1 otherwise, 2 if the statement cannot be read or was not signed with the key.

    Args:
        statement: statement.json, written by `dpvision report`.
        run: Run folder, with or without confidential/.
        store: The store that the run was trained on, with its LEDGERS folder beside it.
        public_key: PEM file with the signer's ed25519 public key. Its fingerprint is printed:
            compare it with one that you have from the signer.
        json: Print JSON.
    """
    if statement.is_dir():
        raise ConfigError(_of_folder(statement))
    if not statement.exists():
        raise ConfigError(
            f"verify: {statement}: no such file; expected a statement.json. Make one with "
            "`dpvision report RUN`."
        )
    from dpvision.statement.verify import verify_statement

    checks = verify_statement(statement, run, store, public_key)
    bad, unverified = (
        sum(check.status == status for check in checks) for status in ("failed", "unverified")
    )
    result = {
        "statement": str(statement),
        "failed": bad,
        "unverified": unverified,
        "checks": [asdict(check) for check in checks],
    }
    emit(result, json, _text(checks, bad, unverified))
    if bad or unverified:
        sys.exit(1)


def _of_folder(folder: Path) -> str:
    """Return the error for a folder in place of a statement."""
    from dpvision.runs.folder import run_base
    from dpvision.statement.verify import is_export

    file, run = quote(str(folder / "statement.json")), quote(str(folder))
    if (folder / "statement.json").exists():
        of_run = "" if is_export(folder) else f" --run {run}"
        return (
            f"verify: {folder}: a folder; expected a statement.json. Use dpvision verify {file}"
            f"{of_run}"
        )
    if run_base(folder) is not None:
        return (
            f"verify: {folder}: a run without a statement; expected a statement.json. Write it "
            f"first: dpvision report {run}"
        )
    return (
        f"verify: {folder}: a folder without statement.json; expected the file. Make one with "
        "`dpvision report RUN`, and give its path."
    )


def _text(checks: "list[Check]", bad: int, unverified: int) -> str:
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:11}  {check.name:{width}}  {check.detail}" for check in checks]
    unknown = sum(check.status == "not checked" for check in checks)
    verdict = "Nothing failed."
    if unverified:
        verdict = (
            f"NOT VERIFIED: {unverified} of {len(checks)} checks could not confirm a figure. Do "
            "not rely on this statement."
        )
    if bad:
        verdict = f"{bad} of {len(checks)} checks FAILED: do not rely on this statement."
    return "\n".join(
        [*lines, "", verdict + (f" {unknown} could not be checked." if unknown else "")]
    )


run = partial(parse, verify, "verify")
