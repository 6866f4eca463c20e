"""``verify``: recompute every claim of a statement that the run's files and the store's ledgers
allow.

Each check is ok, failed, or not checked with the reason. A missing or damaged file fails its check;
checks that need a run or store that was not given are not made. docs/verify.md explains every line.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.checkpoint import find_checkpoint, list_checkpoints, read_manifest
from dpvision.errors import CheckpointError, DataError, DPVisionError, PrivacyError
from dpvision.eval.score_file import read_scores
from dpvision.privacy.ledger import LedgerContents, read_ledger
from dpvision.privacy.ledger_format import Line
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import count
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.runs.folder import read_run, run_base
from dpvision.runs.run import code_versions
from dpvision.statement.audits import read_audits
from dpvision.statement.check import (
    Check,
    compared,
    differences,
    failed,
    not_checked,
    ok,
    unverified,
)
from dpvision.statement.check_releases import check_charges, check_releases
from dpvision.statement.other_runs import check_other_runs
from dpvision.statement.recompute import check_epsilons, check_figures, check_schema
from dpvision.statement.signature import (
    fingerprint,
    read_public_key,
    require_signature,
    signature_of,
)
from dpvision.statement.statement import (
    beside_weights,
    read_evidence,
    settings_of,
    sha256_of,
    statement_of,
    versions_of,
)
from dpvision.strict_json import parse_json
from dpvision.weights import lineage_digest, unpack

NO_RUN = "no run given: give its folder with --run"
NO_STORE = "no store given: give its folder with --store"
NO_KEY = "no key given: give the signer's public key with --public-key"


def verify_statement(
    path: str | Path,
    run_dir: str | Path | None = None,
    store_dir: str | Path | None = None,
    public_key: str | Path | None = None,
) -> list[Check]:
    """Check a statement.

    Args:
        path: statement.json.
        run_dir: the run's folder, with or without confidential/.
        store_dir: the store that it was trained on, with the LEDGERS folder next to it.
        public_key: PEM file of the key that must have signed the statement (``signature``).

    Raises:
        DataError: the statement cannot be read or was not signed with the key, or a folder does
            not exist.
        ConfigError: the key cannot be read.
    """
    statement, signed = _read(Path(path), None if public_key is None else Path(public_key))
    for folder in (run_dir, store_dir):
        if folder is not None and not Path(folder).is_dir():
            raise DataError(
                f"verify: {folder}: no such folder; expected a run or store. Check the path, or "
                "drop the option."
            )
    schema = check_schema(statement)
    if schema.status == "failed":
        return [
            *signed,
            schema,
            not_checked("everything else", "the statement does not fit its schema"),
        ]
    checks = [*signed, schema, *check_figures(statement), *check_epsilons(statement)]
    copy = manifest = None
    if run_dir is None:
        checks.append(not_checked("run, weights, config, code, ledger, lineage, scores", NO_RUN))
    else:
        about, manifest, found = _run(statement, Path(run_dir))
        checks += found
        if about is not None:
            copy, found = check_ledger(statement, Path(run_dir) / "ledger.jsonl", about, manifest)
            checks += [
                *found,
                check_lineage(statement, Path(run_dir), copy),
                check_scores(statement, Path(run_dir)),
                *check_releases(statement, Path(run_dir)),
            ]
            if statement["history"]["audits"]["runs"] and copy is not None:
                checks.append(check_audits(statement, Path(run_dir), copy.plan))
    if store_dir is None:
        checks.append(not_checked("store, other runs", NO_STORE))
    else:
        checks += check_store(statement, Path(store_dir), copy, manifest)
    checks += check_charges(statement, None if store_dir is None else Path(store_dir))
    if copy is not None and run_dir is not None:
        checks.append(
            check_every_word(
                statement, Path(run_dir), None if store_dir is None else Path(store_dir)
            )
        )
    return checks


def _read(path: Path, public_key: Path | None) -> tuple[Any, list[Check]]:
    """Read a statement, and check the signature of the bytes that are read if there is a key."""
    key = None if public_key is None else read_public_key(public_key)
    try:
        data = path.read_bytes()
        statement = parse_json(data)
    except (OSError, ValueError) as error:
        raise DataError(
            f"verify: {path}: {error}; expected a statement.json. Make one with `dpvision report "
            "RUN`."
        ) from None
    if key is not None:
        require_signature(path, data, key)
        return statement, [ok("signature", f"of these bytes, by the key {fingerprint(key)}")]
    if signature_of(path).exists():
        return statement, [not_checked("signature", NO_KEY)]
    return statement, []


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export, which has a model card, and not a run."""
    return (folder / "README.md").exists() and not (folder / "run.json").exists()


def _run(
    statement: dict[str, Any], root: Path
) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[Check]]:
    """Check the run's files: its id, weights, config and code. Return run.json and the manifest,
    None where they cannot be read.
    """
    base = run_base(root)
    if is_export(root):
        why = "an export: its statement has the hashes of the run's files, not of these"
        return None, None, [not_checked("run", f"{root}: {why}. A signature of the folder has")]
    if base is None or not (base / "run.json").exists():
        remedy = "Ask whoever released the statement for it, or omit --run"
        why = f"{root}: no config.json or no run.json; expected all of the run's folder but "
        return None, None, [failed("run", f"{why}confidential/. {remedy}")]
    try:
        _, _, about = read_run(root)
    except DPVisionError as error:
        return None, None, [failed("run", str(error))]
    checks = [
        compared(
            "run",
            [("run_id", statement["run_id"], about["run_id"])],
            f"run.json is that of run {about['run_id']}",
        )
    ]
    folder, found = check_weights(statement, root)
    checks.append(found)
    if folder is not None:
        checks.append(check_beside(statement, root, folder))
    if folder is None:
        return about, None, checks
    try:
        manifest = read_manifest(folder)
        return about, manifest, [*checks, *check_manifest(statement, manifest)]
    except CheckpointError as error:
        return about, None, [*checks, failed("checkpoint", str(error))]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        return (
            about,
            None,
            [*checks, failed("checkpoint", f"{folder}: its manifest is incomplete ({error!r})")],
        )


def check_weights(statement: dict[str, Any], root: Path) -> tuple[Path | None, Check]:
    """Find the checkpoint whose files have the statement's hashes."""
    stated = statement["hashes"]["weights"]
    try:
        folders = list_checkpoints(root) or [find_checkpoint(root)]
    except CheckpointError as error:
        return None, failed("weights", str(error))
    wrong = []
    for folder in reversed(folders):
        wrong = [name for name, digest in stated.items() if sha256_of(folder / name) != digest]
        if stated and not wrong:
            return folder, ok(
                "weights", f"files of {folder.name} with the hashes of the statement: {len(stated)}"
            )
    return folders[-1], failed(
        "weights",
        f"{', '.join(wrong) or 'no file named'}: other hashes than the statement's, in every "
        f"checkpoint of {root}",
    )


def check_beside(statement: dict[str, Any], root: Path, folder: Path) -> Check:
    """Check the files beside the weights that decide what the model answers."""
    name, stated, found = "manifest, calibration", statement["hashes"], beside_weights(root, folder)
    if found.keys() - stated.keys():
        return not_checked(name, "an older statement, without their hashes: write it again")
    wrong = [
        f"{file}.json: "
        + (
            "missing"
            if digest is None
            else "not in the statement"
            if stated[file] is None
            else "another hash than the statement's"
        )
        for file, digest in found.items()
        if stated[file] != digest
    ]
    if wrong:
        return failed(
            name,
            f"{', '.join(wrong)}: altered, or, if the run was calibrated since, the statement was "
            "written before: write it again",
        )
    none = "" if found["calibration"] else "; not calibrated"
    return ok(name, f"files with the hashes of the statement{none}")


def check_manifest(statement: dict[str, Any], manifest: dict[str, Any]) -> list[Check]:
    """Check config, steps and code of the checkpoint."""
    own, charged, executed = (
        manifest["lineage"][-1]["guarantee"],
        manifest["ledger_steps"],
        statement["mechanism"]["steps_executed"],
    )
    config = hashlib.sha256(
        json.dumps(manifest["config"], sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    pairs = [
        ("hash of the config", statement["hashes"]["config"], config),
        ("run_id", statement["run_id"], manifest["run_id"]),
        ("steps_in_weights", statement["history"]["steps_in_weights"], manifest["updates"]),
        ("hash of the code", statement["hashes"]["code"], manifest["versions"]["code_sha256"]),
        ("recipe", statement["recipe"], manifest["config"]["recipe"]),
        ("settings", statement["settings"], json.loads(json.dumps(settings_of(manifest)))),
        ("versions", statement["versions"], versions_of(manifest)),
        ("steps_executed", executed, max(executed, charged)),
        (
            "steps charged by the lineage in the weights",
            charged if own is None else own.get("steps", charged),
            charged,
        ),
        (
            "steps in the weights, at most those charged",
            min(manifest["updates"], charged),
            manifest["updates"],
        ),
    ]
    checks = [
        compared(
            "checkpoint",
            pairs,
            "it has the config, settings, steps, versions and code that the statement names",
        )
    ]
    if statement["hashes"]["code"] == code_versions()["code_sha256"]:
        return [
            *checks,
            ok("code", "the dpvision installed here is the code that made the checkpoint"),
        ]
    made = statement["versions"].get("dpvision", "?")
    return [
        *checks,
        not_checked(
            "code",
            f"made by other code (dpvision {made}) than the dpvision "
            f"{code_versions()['dpvision']} installed here",
        ),
    ]


def check_ledger(
    statement: dict[str, Any], path: Path, about: dict[str, Any], manifest: dict[str, Any] | None
) -> tuple[LedgerContents | None, list[Check]]:
    """Check the run's copy of the ledger: an unbroken chain of this run and plan that contains the
    statement's line.
    """
    try:
        ledger = read_ledger(path)
    except PrivacyError as error:
        return None, [failed("ledger", str(error))]
    pairs = [
        ("run_id", statement["run_id"], ledger.run_id),
        ("store_id", statement["history"]["lineage"][-1]["store_id"], ledger.store_id),
        ("store_id of run.json", about["store_id"], ledger.store_id),
        *_plan_pairs(statement, ledger.plan),
    ]
    checks = [
        compared("ledger", pairs, "an unbroken chain of this run, under the plan of the statement")
    ]
    checks.append(check_line("ledger, last line", statement, ledger, manifest))
    if checks[-1].status == "not checked":
        checks[-1] = not_checked(
            checks[-1].name, f"the run's copy {checks[-1].detail}: give the store"
        )
    return ledger, checks


def _plan_pairs(statement: dict[str, Any], plan: DPPlan) -> list[tuple[str, Any, Any]]:
    """Return pairs of the statement's mechanism and the plan in the ledger."""
    mechanism, scope = statement["mechanism"], statement["scope"]
    pairs = [
        ("guaranteed", statement["guaranteed"], plan.guarantee == "dp"),
        ("sample_rate", mechanism["sample_rate"], plan.sample_rate),
        ("noise_multiplier", mechanism["noise_multiplier"], plan.noise.multiplier),
        ("max_grad_norm", mechanism["max_grad_norm"], plan.max_grad_norm),
        ("divisor", mechanism["divisor"], plan.expected_batch_size),
        ("max_batch_size", mechanism["max_batch_size"], plan.sampler.max_batch_size),
        ("steps_planned", mechanism["steps_planned"], plan.steps),
        ("dataset_size", scope["dataset_size"]["value"], plan.dataset_size),
        ("max_records_per_unit", scope["unit"]["max_records_per_unit"], plan.unit.max_records),
        ("sampling_unit", scope["unit"].get("sampling_unit", "record"), plan.unit.drawn),
        ("selection", mechanism["selection"] is not None, plan.selection is not None),
    ]
    own = statement["history"]["lineage"][-1]["guarantee"]
    if own is not None:
        pairs += [
            ("delta", own["delta"], plan.delta),
            ("the whole plan", own["plan"], json.loads(json.dumps(plan.to_dict()))),
        ]
    return pairs


def check_line(
    name: str, statement: dict[str, Any], ledger: LedgerContents, manifest: dict[str, Any] | None
) -> Check:
    """Check the line of the ledger whose hash is in the statement: steps and restarts up to it are
    those stated, and the weights' line is not after it. A ledger that ends before is not checked.
    """
    line = statement["hashes"]["ledger"]
    stated = Line(statement["mechanism"]["steps_executed"], statement["history"]["restarts"])
    found, saved = (
        ledger.at(line),
        None if manifest is None else ledger.at(manifest["ledger_digest"]),
    )
    if found is None:
        if ledger.steps < stated.steps and ledger.restarts <= stated.restarts:
            return not_checked(name, "ends before the line that the statement names")
        return failed(name, f"no line has the hash {line[:16]}... of the statement")
    if found != stated:
        return failed(
            name, f"{_of_line(found)} up to the line of the statement, {_of_line(stated)} stated"
        )
    if manifest is not None and (saved is None or saved.steps != manifest["ledger_steps"]):
        return failed(name, f"no line of the weights, after {manifest['ledger_steps']} steps")
    if saved is not None and (saved.steps > found.steps or saved.restarts > found.restarts):
        return failed(
            name,
            f"the weights were saved later, after {_of_line(saved)}; {_of_line(stated)} stated",
        )
    if ledger.steps and not stated.steps:
        return failed(
            name,
            f"no step stated, {ledger.steps} charged: a run counts with its whole plan from the "
            "first step on",
        )
    if (
        ledger.steps > stated.steps
        and (statement["history"].get("stop") or {}).get("declared") == "independent"
    ):
        return unverified(
            name,
            f"declared to have ended after {stated.steps} steps, {ledger.steps} charged: write "
            "the statement again",
        )
    since = f"; charged since: {ledger.steps - stated.steps}" if ledger.steps > stated.steps else ""
    return ok(name, f"steps charged up to the line that the statement names: {stated.steps}{since}")


def _of_line(line: Line) -> str:
    return f"{count(line.steps, 'step')}, {count(line.restarts, 'restart')}"


def check_lineage(statement: dict[str, Any], root: Path, ledger: LedgerContents | None) -> Check:
    """Check that the lineage is the same in the ledger's header, the manifest, the weights files
    and the statement.
    """
    if ledger is None:
        return not_checked("lineage", "the ledger, whose first line it is bound to, cannot be read")
    stated = statement["history"]["lineage"]
    digests: list[tuple[str, Any, Any]] = [
        (
            "digest of the ledger's header",
            statement["hashes"]["lineage"],
            lineage_digest(ledger.lineage),
        )
    ]
    try:
        folder = find_checkpoint(root)
        manifest = read_manifest(folder)
        carried = {name: unpack(folder / name)[1] for name in manifest["tensors"]}
    except (DPVisionError, OSError) as error:
        return failed("lineage", str(error))
    if not manifest["lineage"]:
        return failed("lineage", f"{folder}: the manifest has none")
    digests.append(("manifest", manifest["lineage"][:-1], ledger.lineage))
    digests += [(f"{name}", lineage, manifest["lineage"]) for name, lineage in carried.items()]
    digests += [
        (
            "store and run of the manifest's last entry",
            [manifest["lineage"][-1][k] for k in ("store_id", "run_id")],
            [ledger.store_id, ledger.run_id],
        ),
        ("entries", len(stated), len(manifest["lineage"])),
    ]
    for said, found in zip(stated[:-1], ledger.lineage, strict=False):
        for field in ("store_id", "visibility", "run_id", "guarantee"):
            digests.append(
                (
                    f"{field} of {str(found['store_id'])[:16]}",
                    said[field],
                    json.loads(json.dumps(found[field])),
                )
            )
    own = json.loads(json.dumps(manifest["lineage"][-1]))
    for field in ("visibility", "licence"):
        digests.append((f"{field} of this run's store", stated[-1][field], own.get(field)))
    for said, kept in zip(stated, [*ledger.lineage, own], strict=False):
        for field in ("licence", "declared", "deduplicated", "curation"):
            plain = said.get(field)
            if isinstance(plain, dict):
                plain = {k: v for k, v in plain.items() if k != "text"}
            digests.append(
                (
                    f"{field} of {str(kept['store_id'])[:16]}",
                    plain,
                    json.loads(json.dumps(kept.get(field))),
                )
            )
    wrong = [what for what, one, other in digests if one != other]
    if wrong:
        return failed(
            "lineage",
            f"not the same in ledger, manifest, weights and statement: {', '.join(wrong)}",
        )
    return ok(
        "lineage", f"the same in ledger, manifest, weights and statement; entries: {len(stated)}"
    )


def check_scores(statement: dict[str, Any], root: Path) -> Check:
    """Check that the scores are in the run's public file. They are not measured again."""
    try:
        found = read_scores(root / "scores.json")
    except DPVisionError as error:
        return failed("scores", str(error))
    missing = [score["name"] for score in statement["scores"] if score not in found]
    if missing:
        return failed("scores", f"not in scores.json of the run: {', '.join(missing)}")
    return ok(
        "scores", f"as in scores.json, not measured again; scores: {len(statement['scores'])}"
    )


def check_audits(statement: dict[str, Any], root: Path, plan: DPPlan) -> Check:
    """Check that the audits are in the run's public files. They are not made again."""
    stated = statement["history"]["audits"]["runs"]
    try:
        found = _audits_of(stated, read_audits(root, plan))
    except DPVisionError as error:
        return failed("audits", str(error))
    if stated != found:
        return failed("audits", "not as in the files of `dpvision audit` in the run")
    return ok("audits", f"as in the run's files, not made again; audits: {len(found)}")


def _audits_of(stated: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the audits of the kinds that are stated; of others the run was audited since."""
    kinds = [one.get("kind") for one in stated if isinstance(one, dict)]
    return [audit for audit in found if audit["kind"] in kinds]


def check_every_word(statement: dict[str, Any], root: Path, store_dir: Path | None) -> Check:
    """Compare every field with the statement that the same code writes from the same files."""
    name = "written again"
    try:
        evidence = read_evidence(root, store_dir)
        if not statement["history"]["other_runs"][
            "known"
        ]:  # written without the store, which may be given now
            evidence = replace(evidence, from_store=False, store_dir=None)
        stated = statement["history"]["audits"]["runs"]
        evidence = replace(evidence, audits=_audits_of(stated, evidence.audits))
        if statement["hashes"]["code"] != code_versions()["code_sha256"]:
            return not_checked(
                name, "the dpvision installed here is not the code that made the checkpoint"
            )
        if evidence.ledger.digest != statement["hashes"]["ledger"]:
            return not_checked(
                name,
                "the run's ledger, where it can be read, is not at the line that the statement "
                "names",
            )
        stop = (statement["history"].get("stop") or {"declared": "not_declared"})["declared"]
        again = json.loads(
            json.dumps(statement_of(evidence, statement["history"]["tuning"]["declared"], stop))
        )
    except DPVisionError as error:
        return failed(name, str(error))
    # More scores and runs may have been added since: these have checks of their own.
    left_out: tuple[str, ...] = (
        ("scores",) if evidence.store_dir is None else ("scores", "history.other_runs")
    )
    if store_dir is None and statement["history"]["other_runs"]["known"]:
        left_out += ("history.other_runs", "history.ledger")
    changed = differences(statement, again)
    other = [where for where in changed if not where.startswith(left_out)]
    if other:
        return failed(
            name,
            "not as written from these files: "
            f"{', '.join(other[:5])}{', ...' if len(other) > 5 else ''}",
        )
    more = [part for part in left_out if any(where.startswith(part) for where in changed)]
    but = f" but for {', '.join(more)}, which have checks of their own" if more else ""
    return ok(name, f"the statement that this dpvision writes from these files is the same{but}")


def check_store(
    statement: dict[str, Any],
    store_dir: Path,
    copy: LedgerContents | None,
    manifest: dict[str, Any] | None,
) -> list[Check]:
    """Check all ledgers of the store against the store's own record of them, this run's ledger, and
    the other runs.
    """
    store_id, run_id = statement["history"]["lineage"][-1]["store_id"], statement["run_id"]
    try:
        ledgers = StoreLedgers.of(store_dir)
        if ledgers.store_id != store_id:
            return [
                failed(
                    "store",
                    f"{store_dir} is store {ledgers.store_id[:8]}, the statement is for "
                    f"{store_id[:8]}",
                )
            ]
        truth, visibility = (
            ledgers.read_all().get(run_id),
            "private" if ledgers.private else "public",
        )
    except DPVisionError as error:
        return [failed("store", str(error))]
    if truth is None:
        return [failed("store", f"the store has no ledger of run {run_id}")]
    if copy is not None and not truth.continues(copy):
        return [
            failed(
                "store",
                "the run's copy of the ledger is no earlier state of the one beside the store",
            )
        ]
    checks = [
        compared(
            "store",
            [
                *_plan_pairs(statement, truth.plan),
                ("visibility", statement["history"]["lineage"][-1]["visibility"], visibility),
            ],
            "every ledger beside the store is unbroken and as the store remembers it",
        ),
        check_line("store, last line", statement, truth, manifest),
    ]
    if checks[-1].status == "not checked":
        checks[-1] = failed(checks[-1].name, f"the store's ledger {checks[-1].detail}")
    return [*checks, check_other_runs(statement, store_dir)]
