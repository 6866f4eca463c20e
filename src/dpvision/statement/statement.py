"""The guarantee statement of a run: computed from its ledger, its verified checkpoint and its
public scores, never from the config.

docs/statement.md explains every field; docs/statement.schema.json is the schema. Nothing from
``confidential/`` is read here.
"""

import dataclasses
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from dpvision.checkpoint import MANIFEST, load_checkpoint
from dpvision.config import unit
from dpvision.data.store import CURATION
from dpvision.dp import rounding
from dpvision.encoders.calibration import CALIBRATION
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.eval.score import is_of_the_run
from dpvision.eval.score_file import read_releases, read_scores
from dpvision.files import write_json
from dpvision.privacy import printed
from dpvision.privacy.ledger import LedgerContents, read_ledger, store_account
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.runs.folder import held_back, read_run
from dpvision.runs.lineage import shaped_in_confidence
from dpvision.statement import (
    history_phrases,
    phrases,
    preprocessing_phrases,
    released_scores,
)
from dpvision.statement.audits import read_audits
from dpvision.statement.guarantee import guarantee_of, headline, other_runs, other_stores
from dpvision.statement.schema import Stop, Tuning
from dpvision.statement.signature import signature_of
from dpvision.weights import lineage_digest

FORMAT = "dpvision-statement-1"
_WORDING = (
    unit,
    history_phrases,
    preprocessing_phrases,
    phrases,
    printed,
    released_scores,
    rounding,
)
"""The modules that write sentences."""
_NOT_SETTINGS = {"recipe", "privacy", "init_from", "public_weights"}
"""Config entries left out: they are elsewhere in the statement, or are local paths."""


@cache
def phrase_version() -> str:
    """Digest of the code that writes a statement's sentences: ``verify`` can write them again if
    its own is the same.
    """
    return hashlib.sha256(
        b"".join(Path(str(module.__file__)).read_bytes() for module in _WORDING)
    ).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The files behind a statement, read and checked against each other."""

    manifest: dict[str, Any]
    ledger: LedgerContents
    from_store: bool
    """Whether ``ledger`` is the store's, or the run folder's copy."""
    store_dir: Path | None
    scores: list[dict[str, Any]]
    releases: list[dict[str, Any]]
    """Of scores on private test stores."""
    audits: list[dict[str, Any]]
    beside: dict[str, str | None]
    """Hashes of the files beside the weights that decide what the model answers; None without
    calibration.
    """

    @property
    def plan(self) -> DPPlan:
        return self.ledger.plan

    @property
    def guaranteed(self) -> bool:
        return self.plan.guarantee == "dp"


def make_statement(
    run_dir: str | Path,
    *,
    store_dir: str | Path | None = None,
    tuning: Tuning = "not_covered",
    stop: Stop = "not_declared",
) -> dict[str, Any]:
    """Return the statement of a run, ready for JSON (schema: docs/statement.schema.json).

    Epsilon follows from the ledger: it is that of the whole plan in its first line once a step has
    been charged (``DPPlan.stated_steps``). Without a guarantee, on a public store, the statement
    says first that the run guarantees nothing, or what its weights keep from private runs:
    post-processing.

    Args:
        run_dir: run folder with at least one checkpoint.
        store_dir: the store trained on; if None, the path in the run's config if it still exists.
            With the store, its ledger is read and other runs on it are added up; without it, the
            run folder's copy is read.
        tuning: the operator's declaration of how settings and checkpoint were chosen.
        stop: "independent" declares that nothing computed from the private records had an influence
            on where the run stopped.

    Raises:
        ConfigError: ``stop`` is declared of a run that did not end early.
        PrivacyError: a run without a guarantee on a private store, a tainted parent, a ledger that
            was altered or does not lead to this checkpoint, a private score in the public file, an
            audit of another plan, or "charged" without a total of the store's runs.
        CheckpointError: there is no run or checkpoint, or it was altered.
    """
    evidence = read_evidence(Path(run_dir), None if store_dir is None else Path(store_dir))
    require_declarations(evidence, tuning, stop)
    return statement_of(evidence, tuning, stop)


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a statement says or is computed from, without its files: ``compose`` makes the
    statement of it.
    """

    plan: DPPlan
    steps: int
    """Steps charged."""
    run_id: str
    recipe: str
    inherited: list[dict[str, Any]]
    """Lineage of the weights that the run started from, as in its ledger."""
    own: dict[str, Any]
    """The run's own entry of the lineage, without its guarantee."""
    config: dict[str, Any]
    """Model, data and hardware of the config."""
    settings: dict[str, Any]
    from_store: bool
    """Whether the store's ledger was read, or the run folder's copy."""
    updates: int
    restarts: int
    other_runs: dict[str, Any]
    scores: list[dict[str, Any]]
    audits: list[dict[str, Any]]
    hashes: dict[str, Any]
    versions: dict[str, str]
    tuning: Tuning
    stop: Stop
    releases: list[dict[str, Any]]
    """Of scores on private test stores (``released_scores.kept``)."""


def statement_of(
    evidence: Evidence, tuning: Tuning = "not_covered", stop: Stop = "not_declared"
) -> dict[str, Any]:
    """Return the statement for given evidence (see ``make_statement``)."""
    manifest, ledger = evidence.manifest, evidence.ledger
    account = None if evidence.store_dir is None else store_account(evidence.store_dir)
    return compose(
        Facts(
            plan=evidence.plan,
            steps=ledger.steps,
            run_id=ledger.run_id,
            recipe=manifest["config"]["recipe"],
            inherited=ledger.lineage,
            own={**manifest["lineage"][-1], "guarantee": None},
            config=manifest["config"],
            settings=settings_of(manifest),
            from_store=evidence.from_store,
            updates=manifest["updates"],
            restarts=ledger.restarts,
            other_runs=other_runs(account, ledger.run_id),
            scores=evidence.scores,
            audits=evidence.audits,
            hashes={
                "code": manifest["versions"]["code_sha256"],
                "config": hashlib.sha256(
                    json.dumps(manifest["config"], sort_keys=True, separators=(",", ":")).encode()
                ).hexdigest(),
                "ledger": ledger.digest,
                "lineage": lineage_digest(ledger.lineage),
                "weights": manifest["tensors"] | manifest.get("files", {}),
                **evidence.beside,
            },
            versions=versions_of(manifest),
            tuning=tuning,
            stop=stop,
            releases=released_scores.kept(evidence.releases),
        )
    )


def compose(facts: Facts) -> dict[str, Any]:
    """Return the statement that these facts make."""
    plan, steps, config, tuning = facts.plan, facts.steps, facts.config, facts.tuning
    fixed, store_id, guaranteed = tuning == "none", facts.own["store_id"], plan.guarantee == "dp"
    guarantee = (
        guarantee_of(plan, steps, facts.inherited, store_id, fixed=fixed, stop=facts.stop)
        if guaranteed
        else None
    )
    others = other_stores(facts.inherited, store_id if guarantee else None, fixed=fixed)
    head, drawn = phrases.is_head(config), plan.unit.drawn
    lineage = _lineage(facts, guarantee)
    ended_early = None if guarantee is None else history_phrases.stop(plan, steps, facts.stop)
    kept = [] if guarantee is not None or shaped_in_confidence(lineage) else others
    if kept:
        in_words = history_phrases.kept_in_words(plan, kept)
        not_covered = history_phrases.kept_not_covered(lineage, kept)
        released = history_phrases.kept_released(phrases.HEAD_FILES if head else phrases.FILES)
    else:
        in_words = phrases.in_words(plan, guarantee)
        persons = all(store["unit_epsilon"] is not None for store in others)
        not_covered = phrases.not_covered(plan, persons=persons)
        released = phrases.released(plan, head=head)
    if guarantee is not None:
        in_words += history_phrases.of_stores(others)
        not_covered += history_phrases.not_covered_of(
            lineage, tuning, guarantee, ended_early, facts.other_runs, others
        )
    not_covered += released_scores.not_covered(facts.releases)
    return {
        "format": FORMAT,
        "phrases": phrase_version(),
        "guaranteed": guaranteed,
        "headline": headline(guarantee, drawn, kept if guarantee is None else others),
        "in_words": in_words,
        "run_id": facts.run_id,
        "recipe": facts.recipe,
        "scope": {
            "released": released,
            "not_covered": not_covered,
            "trust_model": phrases.trust_model(plan),
            "adjacency": phrases.adjacency(plan),
            "unit": {
                "max_records_per_unit": plan.unit.max_records,
                "num_units": plan.unit.num_people,
                "sampling_unit": plan.unit.drawn,
                "text": phrases.unit(plan, head=head),
            },
            "dataset_size": {
                "value": plan.dataset_size,
                "public": True,
                "text": phrases.DATASET_SIZE[drawn],
            },
        },
        "guarantee": guarantee,
        "other_stores": others,
        "mechanism": {
            "sampling_assumed": phrases.sampling_assumed(plan),
            "sampling_executed": phrases.sampling_executed(plan),
            "sample_rate": plan.sample_rate,
            "noise_multiplier": plan.noise.multiplier,
            "max_grad_norm": plan.max_grad_norm,
            "noise_std": plan.noise_std,
            "divisor": plan.expected_batch_size,
            "max_batch_size": plan.sampler.max_batch_size,
            "steps_planned": plan.steps,
            "steps_executed": steps,
            "clipping": phrases.clipping(plan, head=head),
            "sensitivity": phrases.sensitivity(plan, config),
            "noise_generator": phrases.noise_generator(plan),
            "bad_records": phrases.BAD_RECORDS[drawn],
            "selection": phrases.selection(plan),
        },
        "history": {
            "ledger": history_phrases.ledger_source(facts.from_store),
            "steps_in_weights": facts.updates,
            "steps_wasted": steps - facts.updates,
            "restarts": facts.restarts,
            "stop": ended_early,
            "other_runs": facts.other_runs,
            "tuning": {
                "declared": tuning,
                "charged": plan.selection is not None,
                "text": history_phrases.tuning(plan, tuning),
            },
            "preprocessing": preprocessing_phrases.head_preprocessing(config)
            if head
            else preprocessing_phrases.preprocessing(plan, config),
            "lineage": lineage,
            "heads_and_evaluations": history_phrases.OF_A_HEAD if head else history_phrases.HEADS,
            "audits": {"runs": facts.audits, "text": history_phrases.audits(facts.audits)},
        },
        "side_channels": phrases.side_channels(plan),
        "settings": facts.settings,
        "scores": facts.scores,
        **({"released_scores": released_scores.stated(facts.releases)} if facts.releases else {}),
        "hashes": facts.hashes,
        "versions": facts.versions,
    }


def require_declarations(evidence: Evidence, tuning: Tuning, stop: Stop) -> None:
    """Refuse declarations that do not fit the run.

    Raises:
        PrivacyError: the choice of a run is declared to be charged, and its store has no total to
            state.
        ConfigError: a stop is declared of a run that did not end early.
    """
    plan, steps = evidence.plan, evidence.ledger.steps
    if stop == "independent" and not (evidence.guaranteed and 0 < steps < plan.steps):
        raise ConfigError(
            f"report: --stop independent, steps={steps} of {plan.steps}, "
            f"guarantee={plan.guarantee}; expected a private run that ended early. Drop --stop."
        )
    if tuning != "charged":
        return
    account = None if evidence.store_dir is None else store_account(evidence.store_dir)
    if account is None or account.epsilon_filter is None:
        why = (
            "the store is not there"
            if account is None
            else "a run without a guarantee, or without Renyi accounting, used the store"
        )
        raise PrivacyError(
            f"report: tuning='charged', and {why}; expected the total of all runs, which covers "
            "the choice. Pass --store STORE, or declare --tuning not_covered."
        )


def write_statement(
    run_dir: str | Path,
    *,
    store_dir: str | Path | None = None,
    tuning: Tuning = "not_covered",
    stop: Stop = "not_declared",
) -> Path:
    """Write ``make_statement``'s result to RUN/statement.json and return the path. Raises as it
    does.
    """
    statement = make_statement(run_dir, store_dir=store_dir, tuning=tuning, stop=stop)
    return save_statement(run_dir, statement)


def save_statement(run_dir: str | Path, statement: dict[str, Any]) -> Path:
    """Write RUN/statement.json, remove the signature of another one, and return the path."""
    path = Path(run_dir) / "statement.json"
    before = sha256_of(path)
    write_json(path, statement)
    if sha256_of(path) != before:
        signature_of(path).unlink(missing_ok=True)
    return path


def read_evidence(root: Path, store_dir: Path | None = None) -> Evidence:
    """Read ledger, manifest and public scores of a run that may be reported, and check them against
    each other.

    Raises:
        PrivacyError, CheckpointError: as ``make_statement``.
    """
    base, config, about = read_run(root)
    if base != root or (about["guarantee"] != "dp" and about["store_visibility"] == "private"):
        raise _refused(root, "has no guarantee and was trained on a private store")
    # Loads the tensors too, so that the hashes in the statement are those of the current files.
    checkpoint = load_checkpoint(root)
    manifest = checkpoint.manifest
    if held_back(checkpoint.path):
        raise PrivacyError(
            f"report: {checkpoint.path} was written by the clock, whose steps depend on private "
            "batches; expected a checkpoint of the plan's end, or of a stop by a signal. Go on "
            "with --resume; Ctrl-C then writes one that may leave."
        )
    if manifest["run_id"] != about["run_id"] or not manifest["lineage"]:
        raise CheckpointError(
            f"report: {checkpoint.path} is of another run than {root}. Put the run's own "
            "checkpoints back."
        )
    store_dir = store_dir or _reachable(config.data.store, about["store_id"])
    ledger = _ledger(root / "ledger.jsonl", about, store_dir)
    if manifest["lineage"][:-1] != ledger.lineage:
        raise PrivacyError(
            f"report: the lineage of {checkpoint.path} is not the one in the first line of "
            f"ledger {ledger.path}; expected what the run started from. Restore the run's own "
            "checkpoints."
        )
    for entry in manifest["lineage"]:
        spoils_own = about["guarantee"] == "dp" and entry["store_id"] == about["store_id"]
        if entry["guarantee"] is None and (entry["visibility"] == "private" or spoils_own):
            raise _refused(
                root,
                f"comes from store {entry['store_id'][:8]} ({entry['visibility']}) without a "
                "guarantee",
            )
    saved = ledger.heads.get(manifest["ledger_digest"])
    if saved is None or saved.steps != manifest["ledger_steps"]:
        raise PrivacyError(
            f"report: ledger {ledger.path} does not lead to {checkpoint.path}; expected the "
            f"checkpoint's ledger_digest after {manifest['ledger_steps']} steps. Restore the "
            "ledger from its newest copy."
        )
    if (
        not DPPlan.from_dict(manifest["plan"]).same_mechanism(ledger.plan)
        or about["guarantee"] != ledger.plan.guarantee
    ):
        raise PrivacyError(
            f"report: plan of {checkpoint.path} differs from the ledger's; expected one plan. "
            "Restore the run's own files."
        )
    ledger.plan.require_settings(config.privacy, root / "config.json")
    return Evidence(
        manifest,
        ledger,
        store_dir is not None,
        store_dir,
        _public_scores(root / "scores.json"),
        read_releases(root),
        read_audits(root, ledger.plan),
        beside_weights(root, checkpoint.path),
    )


def beside_weights(root: Path, checkpoint: Path) -> dict[str, str | None]:
    """Return the SHA-256 of the checkpoint's manifest (class names, window) and of the run's
    calibration: files beside the weights that decide what the model answers. None: no such file.
    """
    return {
        "manifest": sha256_of(checkpoint / MANIFEST),
        "calibration": sha256_of(root / CALIBRATION),
    }


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of a file, in hexadecimal; None if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def _public_scores(path: Path) -> list[dict[str, Any]]:
    scores = read_scores(path)
    for score in scores:
        if score["visibility"] != "public":
            raise PrivacyError(
                f"report: {path} holds a score of {score['name']!r} on a private store; expected "
                "public ones. Move it to confidential/scores.json."
            )
    # The run's encoder before the baselines.
    return sorted(
        scores,
        key=lambda s: (
            s["test_data"],
            s["protocol"].rpartition(", ")[0],
            not is_of_the_run(s["name"]),
            s["name"],
        ),
    )


def _refused(root: Path, why: str) -> PrivacyError:
    return PrivacyError(
        f"report: {root} {why}; expected a run with guarantee=dp, or public stores only. Do not "
        "release it."
    )


def _check_parents(contents: LedgerContents, known: dict[str, LedgerContents]) -> None:
    """Refuse a lineage that contradicts the store's ledgers about a run on this store."""
    for entry in contents.lineage:
        if entry["store_id"] != contents.store_id or entry["guarantee"] is None:
            continue
        parent = known.get(entry["run_id"])
        plan, steps = DPPlan.from_dict(entry["guarantee"].get("plan")), entry["guarantee"]["steps"]
        # A parent that is said to have no step would cost nothing.
        if (
            parent is None
            or not parent.plan.same_mechanism(plan)
            or not min(parent.steps, 1) <= steps <= parent.steps
        ):
            raise PrivacyError(
                f"report: lineage of {contents.path} contradicts the store's ledger of run "
                f"{entry['run_id']}; expected that run's plan and its charged steps, at most all "
                "and not none. Restore the LEDGERS folder, or train again from the parent's "
                "checkpoint."
            )


def _reachable(path: str | None, store_id: str) -> Path | None:
    """Return the path of the config's store if it still is the store with this id, or None."""
    try:
        found = path is not None and StoreLedgers.of(Path(path)).store_id == store_id
    except DataError:
        return None
    return Path(path) if path is not None and found else None


def _ledger(copy: Path, about: dict[str, Any], store_dir: Path | None) -> LedgerContents:
    """Return the store's ledger if the store is given, which must continue the copy; otherwise the
    copy.
    """
    contents = read_ledger(copy)
    if store_dir is not None:
        ledgers = StoreLedgers.of(store_dir)
        if ledgers.store_id != about["store_id"]:
            raise PrivacyError(
                f"report: {store_dir} is another store than the run's. Give the store that the "
                "run was trained on."
            )
        known = ledgers.read_all()
        truth = known.get(about["run_id"])
        if truth is None or not truth.continues(contents):
            raise PrivacyError(
                f"report: {copy} does not agree with the ledger of {store_dir}. Restore the "
                "LEDGERS folder."
            )
        contents = truth
        _check_parents(contents, known)
    if (contents.run_id, contents.store_id) != (about["run_id"], about["store_id"]):
        raise PrivacyError(
            f"report: ledger {contents.path} is of another run or store than run.json says. "
            "Restore the run's own files."
        )
    return contents


def _lineage(facts: Facts, guarantee: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return every store in the lineage of the weights, oldest first. This run's guarantee comes
    from the ledger, not the manifest.
    """
    own = dict(facts.own)
    if guarantee is not None:
        figures = {
            name: guarantee["this_run"][name] for name in ("epsilon", "delta", "epsilon_rdp")
        }
        total = {name: guarantee[name] for name in ("epsilon", "delta")} | {
            "method": guarantee["composition"]["methods"]["epsilon"]
        }
        own["guarantee"] = {
            **figures,
            "steps": facts.steps,
            "plan": facts.plan.to_dict(),
            "total": total,
        }
    entries = [{"licence": None, **entry} for entry in [*facts.inherited, own]]
    more = [
        {
            "deduplicated": history_phrases.deduplicated(entry),
            "declared": history_phrases.declared(entry.get("declared")),
        }
        for entry in entries
    ]
    for entry, beside in zip(entries, more, strict=True):
        if CURATION in entry:
            beside[CURATION] = history_phrases.curation(entry[CURATION], entry["visibility"])
    last = len(entries) - 1
    joined = [entry | beside for entry, beside in zip(entries, more, strict=True)]
    return [
        entry | {"text": history_phrases.entry_text(entry, own=i == last)}
        for i, entry in enumerate(joined)
    ]


def settings_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of model, data, optimizer, hardware and seed, without local paths. A
    head's encoder is given by its public name and fingerprint.
    """
    config = manifest["config"]
    kept = {
        **{k: v for k, v in config.items() if k not in _NOT_SETTINGS},
        "data": {k: v for k, v in config["data"].items() if k != "store"},
    }
    if not phrases.is_head(config):
        return kept
    model, encoder = kept["model"], manifest["encoder"]
    frozen = {key: value for key, value in model["encoder"].items() if key != "spec"}
    frozen |= {name: encoder[name] for name in ("name", "licence", "fingerprint")}
    unused = {"labels"}
    if not model["candidates"]:
        unused |= {"candidates", "selection_runs", "selection_shape"}
    return kept | {
        "model": {k: v for k, v in model.items() if k not in unused} | {"encoder": frozen}
    }


def versions_of(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the versions of the software that made a checkpoint, without the digest of the
    code.
    """
    return {key: value for key, value in manifest["versions"].items() if key != "code_sha256"}
