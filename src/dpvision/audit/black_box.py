"""The black-box audit: a run of the plan on synthetic records, canaries among them by fair coins,
and an attacker who guesses the coins from the trained weights.

The run is that of ``dpvision train`` (``dpvision adapt``): its store, checks, ledger, loop and
optimizer. The data set is smaller than the plan's, at the plan's sample rate, noise multiplier,
steps, clipping and delta, which give the same epsilon. Canaries are records like the others: they
count in the data set and its sample rate, whether their coins put them in the data or not. Shadow
models, by which the attacker learns what a canary does to a model, are runs of the same kind on the
same records, with coins of their own.

Everything is synthetic, so the result is public, canary by canary.

An audit that is stopped goes on (``keep``): a model's coins are drawn once, before it is trained,
and its run is resumed as a user's is. Nothing of its result is known before it is complete.

Legend: M canaries, B rows, N records.
"""

import contextlib
import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import feature_stream
from dpvision.audit.acceptance import Say
from dpvision.audit.bound import area_above, on_records
from dpvision.audit.canary_images import canary_rows, write_canaries
from dpvision.audit.lira import Scored, attack, fair_coins, score_head
from dpvision.audit.one_run import one_run_bound
from dpvision.audit.time_given import NotInTime
from dpvision.config import CaptionerConfig, HeadConfig, PrivacyConfig, RunConfig
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.open import open_store
from dpvision.data.tokenizer import scene_captions, train_tokenizer
from dpvision.errors import CheckpointError, ConfigError, RunStopped
from dpvision.files import remove_folder, write_json
from dpvision.privacy.coin_guesses import FALSE_ALARM
from dpvision.privacy.composition import curve
from dpvision.privacy.plan import DPPlan, draft_plan, make_plan
from dpvision.privacy.refusal import MAX_N_TIMES_DELTA
from dpvision.runs.folder import public_settings, run_base
from dpvision.runs.run import code_versions
from dpvision.statement.audits import FORMAT
from dpvision.strict_json import parse_json
from dpvision.train.loop import Session, fit
from dpvision.train.start import new_session, resumed_session
from dpvision.train.step import to_device

FPRS = (0.001, 0.01)
"""False-positive rates at which true-positive rates are given."""
_OTHERS = 3
"""Scenes for each canary."""
_VOCABULARY, _SENTENCES = 440, 4000
"""Entries and training text of the tokenizer, at most."""
_KEYS = 8
"""Steps whose augmentations and masks a canary's loss is averaged over."""
_FEWEST, _CANARIES = 20, 500
_FEWEST_SHADOWS = 4
HEAD_SHADOWS = 16
"""Shadow models of a head, which is cheap to train."""
_SAVE_EVERY_S = 60.0
"""A killed audit loses at most so much of its training."""
_ABOUT = "about.json"
"""What an audit in progress is of; written when its records are complete."""


def black_box(
    config: RunConfig,
    plan: DPPlan | None,
    num_canaries: int,
    *,
    data: Path | None = None,
    shadows: int | None = None,
    say: Say = lambda what, done, total: None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Train on synthetic records and canaries, attack the weights, and bound epsilon.

    Args:
        config: of a network or a head; random initial weights, whatever it starts from.
        plan: of a finished run; if None, the one of the config's privacy settings.
        num_canaries: M, at least 20; three times as many scenes are the other records.
        data: of a head: a public store, all of whose records are canaries, in place of synthetic
            ones.
        shadows: number of shadow models, each trained as the model itself: the attack is by
            likelihood ratios (LiRA). 0, or at least 4; if None, 16 of a head, 0 of a network,
            whose canaries' scores are then how much the training lowered their losses.
        say: shows progress; it may raise NotInTime.
        keep: folder in which an audit that was stopped goes on, if it is of the same settings and
            code, else starts; ``forget`` removes it. If None, a stopped audit is lost.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: too few canaries or shadow models, no guarantee, a head chosen by a private
            selection, a store for a network, or a private store.
        DataError: the store does not fit the head.
        NotInTime: from ``say``. RunStopped: by a signal.
    """
    shadows = num_shadows(config, shadows)
    check_settings(config, plan, num_canaries, data, shadows)
    with contextlib.ExitStack() as stack:
        folder = keep
        if folder is None:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="dpvision-audit-"))
            )
        folder = folder.resolve()
        asked = (num_canaries, shadows, data)
        config, audit_id = _begun(config, plan, asked, folder)
        attacked = _attack_head if isinstance(config.model, HeadConfig) else _attack_network
        executed, found = attacked(config, shadows, folder, say)
    plan = plan or executed
    bound = one_run_bound(found.score_M, found.inside_M, executed)
    return {
        "format": FORMAT,
        "kind": "black-box",
        "audit_id": audit_id,
        "passed": max(bound["epsilon_low"], bound["epsilon_low_of_plan"]) <= bound["epsilon"],
        "false_alarm": 2 * FALSE_ALARM,
        "recipe": config.recipe,
        "model": config.model.kind,
        "plan": plan.to_dict(),
        "executed": executed.to_dict(),
        "shadows": shadows,
        "steps_without_update": found.without_update,
        "bound": bound,
        "attack": figures(found.score_M, found.inside_M),
        "limits": limits(executed),
        "score_of_canary": found.score_M.tolist(),
        "canary_inside": found.inside_M.tolist(),
        "code_sha256": code_versions()["code_sha256"],
    }


def in_progress(keep: Path) -> str | None:
    """Return the ``audit_id`` of the audit that goes on in the folder; None if there is none."""
    return (_about(keep) or {}).get("audit_id")


def forget(keep: Path) -> None:
    """Remove the folder of an audit whose result is written."""
    if keep.exists():
        remove_folder(keep)


def _begun(
    config: RunConfig, plan: DPPlan | None, asked: tuple[int, int, Path | None], folder: Path
) -> tuple[RunConfig, str]:
    """Make the records, or find those of an audit that was stopped, with the same ``asked``:
    canaries, shadow models, store. Return the config of the run on them, and the audit's id.
    """
    num_canaries, shadows, data = asked
    of = {
        "folder": str(folder),
        "config": public_settings(config),
        "plan": None if plan is None else plan.to_dict(),
        "canaries": num_canaries,
        "shadows": shadows,
        "data": None if data is None else str(data.absolute()),
        "code_sha256": code_versions()["code_sha256"],
    }
    about = _about(folder)
    if about is not None:
        if about.get("of") != json.loads(json.dumps(of)) or "audit_id" not in about:
            raise CheckpointError(
                f"audit: {folder} has a black box in progress with other settings, code or place, "
                "whose coins are drawn; expected it to be finished, because of several audits none "
                "is chosen. Repeat its command, or remove the folder to give it up."
            )
        return _on_canaries(config, plan, num_canaries, data, folder), about["audit_id"]
    if any(folder.glob("*")):
        remove_folder(folder)
    folder.mkdir(exist_ok=True)
    config = _on_canaries(config, plan, num_canaries, data, folder)
    audit_id = secrets.token_hex(8)
    write_json(folder / _ABOUT, {"audit_id": audit_id, "of": of})
    return config, audit_id


def _about(folder: Path) -> dict[str, Any] | None:
    """Return what an audit in progress is of; None if none was begun, empty if it is damaged."""
    if not os.path.lexists(folder / _ABOUT):
        return None
    with contextlib.suppress(OSError, ValueError):
        found = parse_json((folder / _ABOUT).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def figures(score: np.ndarray, inside: np.ndarray) -> dict[str, float]:
    """Return the area under the ROC curve of the scores, and the true-positive rates at thresholds
    that at most ``FPRS`` of those outside exceed (at a rate of 0.001, none of fewer than 1,000).
    """
    ins, outs = score[inside], np.sort(score[~inside])[::-1]
    if not (len(ins) and len(outs)):
        return {"auc": 0.5} | {f"tpr_at_fpr_{fpr:g}": 0.0 for fpr in FPRS}
    above = {fpr: float(np.mean(ins > outs[math.floor(fpr * len(outs))])) for fpr in FPRS}
    return {"auc": area_above(ins, outs)} | {f"tpr_at_fpr_{f:g}": t for f, t in above.items()}


def limits(plan: DPPlan) -> dict[str, float]:
    """Return the largest values of the same figures that the plan allows any attack."""
    allowed = curve(((plan, plan.steps),), FPRS)
    return {"auc": allowed.auc} | {
        f"tpr_at_fpr_{fpr:g}": tpr for fpr, tpr in allowed.tpr_at_fpr.items()
    }


def num_shadows(config: RunConfig, asked: int | None) -> int:
    """Return the number of shadow models that is asked for, or the default of the model's kind."""
    if asked is not None:
        return asked
    return HEAD_SHADOWS if isinstance(config.model, HeadConfig) else 0


def num_canaries(config: RunConfig, plan: DPPlan | None, asked: int | None) -> int:
    """Return ``asked``; if None, 500, or as many as the plan's delta allows records for."""
    return min(_CANARIES, max(_FEWEST, _most_canaries(config, plan))) if asked is None else asked


def _most_canaries(config: RunConfig, plan: DPPlan | None) -> int:
    delta = (config.privacy.delta if plan is None else plan.delta) or 1e-5
    return int(MAX_N_TIMES_DELTA / delta) // (1 + _OTHERS)


def check_settings(
    config: RunConfig,
    plan: DPPlan | None,
    num_canaries: int,
    data: Path | None,
    shadows: int,
) -> None:
    if num_canaries < _FEWEST:
        raise ConfigError(
            f"audit: canaries={num_canaries}; expected at least {_FEWEST}. Use --canaries 500."
        )
    most = _most_canaries(config, plan)
    if data is None and num_canaries > most:
        raise ConfigError(
            f"audit: canaries={num_canaries}, with {_OTHERS} other records each; expected at most "
            f"{most}, since records x delta must be at most {MAX_N_TIMES_DELTA}. "
            + (f"Use --canaries {most}." if most >= _FEWEST else "Audit a run of smaller delta.")
        )
    if not (shadows == 0 or _FEWEST_SHADOWS <= shadows <= 99):
        raise ConfigError(
            f"audit: shadows={shadows}; expected 0, or {_FEWEST_SHADOWS} to 99, of which a "
            "canary's likelihoods are estimated. Use --shadows 16."
        )
    if config.privacy.guarantee != "dp":
        raise ConfigError(
            f"audit: {config.recipe} has guarantee={config.privacy.guarantee}; expected dp: "
            "without noise there is nothing to audit. Choose a private recipe or run."
        )
    if data is not None and not isinstance(config.model, HeadConfig):
        raise ConfigError(
            f"audit: data={data} with {config.recipe}, a network; expected none: canaries are few "
            "there, and synthetic. Drop --data."
        )
    if data is not None and open_store(data).results_visibility != "public":
        raise ConfigError(
            f"audit: data={data} is private; expected a store imported with --public, because the "
            "scores of its records are written and not charged. Give a public store, or drop "
            "--data."
        )
    if isinstance(config.model, HeadConfig) and config.model.choice.candidates:
        raise ConfigError(
            f"audit: {config.recipe} chooses among heads by a private selection; expected one "
            "head. Audit the recipe of a head, such as transfer.one_step."
        )


def _on_canaries(
    config: RunConfig, plan: DPPlan | None, num_canaries: int, public: Path | None, folder: Path
) -> RunConfig:
    """Return the config of the run on the public store, or on one of scenes and canaries in
    ``folder``, which is made if it is not there.
    """
    model, data = config.model, config.data
    if isinstance(model, HeadConfig) and model.num_classes is None:
        names = None if public is None else open_store(public).label_names
        model = replace(model, num_classes=len(names or range(10)))
    if isinstance(model, CaptionerConfig):
        model = replace(model, vocab_size=min(model.vocab_size, _VOCABULARY))
        if not (folder / _ABOUT).exists():
            words = train_tokenizer(scene_captions(_SENTENCES), model.vocab_size)
            words.save(folder / "words.json")
        data = replace(data, tokenizer=str(folder / "words.json"))
    declared = config.public_weights if isinstance(model, HeadConfig) else None
    save_s = min(config.hardware.checkpoint_every_s, _SAVE_EVERY_S)
    hardware = replace(config.hardware, checkpoint_every_s=save_s)
    config = replace(
        config, model=model, init_from=None, public_weights=declared, hardware=hardware
    )
    if public is None and not (folder / _ABOUT).exists():
        write_canaries(folder / "store", config, num_canaries, _OTHERS * num_canaries)
    store = open_store(public or folder / "store")
    data = replace(data, store=str(store.path), images="store")
    privacy = _privacy(config.privacy, plan, store.num_records)
    return replace(config, data=data, privacy=privacy)


def _privacy(asked: PrivacyConfig, plan: DPPlan | None, num: int) -> PrivacyConfig:
    """Return the settings of the plan on ``num`` records. A head's number of steps and target may
    still be open.
    """
    if plan is None and asked.steps is not None and asked.dataset_size > 1:
        plan = draft_plan(asked)
    if plan is None:
        size = {"dataset_size": num, "expected_batch_size": float(num)}
        return replace(asked, **size, delta=asked.delta or 1e-5)  # type: ignore[arg-type]
    return replace(on_records(plan, num), allow_weak_guarantee=True)


def _attack_network(config: RunConfig, shadows: int, kept: Path, say: Say) -> tuple[DPPlan, Scored]:
    """Train a network, and shadow networks. A score is how much the training lowered the canary's
    loss, or the likelihood ratio of that. Return it with the plan that was executed.
    """
    plan = make_plan(config.privacy)
    num = len(canary_rows(open_store(kept / "store")))
    total = (shadows + 1) * plan.steps

    def train(number: int, folder: Path) -> Scored:
        done = number * plan.steps
        return _score_network(
            config,
            plan,
            folder,
            lambda steps: say("black box, training steps", done + steps, total),
        )

    return plan, attack(train, num, shadows, kept)


def _score_network(
    config: RunConfig, plan: DPPlan, folder: Path, say: Callable[[int], None]
) -> Scored:
    """Train a network by the plan in ``folder``, or go on, and score its canaries."""
    folder.mkdir(exist_ok=True)
    with _session(config, folder / "run") as session:
        if not session.plan.same_mechanism(plan):
            raise CheckpointError(
                f"audit: {folder} has a run of another plan; expected the audit's. Remove the "
                f"folder {folder.parent} to give it up."
            )
        row_M, kept = canary_rows(session.store), folder / "canaries.json"
        if not kept.exists():  # before the first step: the weights are the initial ones
            assert session.run is not None
            if session.run.ledger.steps:
                raise CheckpointError(
                    f"audit: {kept} is missing, and the run beside it has begun; expected its "
                    f"coins. Remove the folder {folder.parent} to give this audit up."
                )
            coins, before = fair_coins(len(row_M)), _losses(session, row_M)
            write_json(kept, {"inside": coins.tolist(), "loss_before": before.tolist()})
        inside_M, before_M = _kept(kept, len(row_M))
        session.rows = np.setdiff1d(np.asarray(session.rows), row_M[~inside_M])
        late: list[NotInTime] = []

        def enough(steps: int) -> bool:
            try:
                say(steps)
            except NotInTime as error:
                late.append(error)
            return bool(late)

        if not fit(session, quiet=True, enough=enough):
            if late:
                raise late[0]
            raise RunStopped("audit: stopped by a signal. No result was written.")
        lost = session.plan.steps - session.updates
        return Scored(before_M - _losses(session, row_M), inside_M, lost)


def _kept(path: Path, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coins and first losses of ``num`` canaries, from the file of an audit in progress."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = parse_json(path.read_bytes(), nan=True)
        inside_M, before_M = np.array(found["inside"]), np.array(found["loss_before"], float)
        if inside_M.dtype == bool and inside_M.shape == before_M.shape == (num,):
            return inside_M, before_M
    raise CheckpointError(
        f"audit: {path} cannot be read; expected the coins and losses of {num} canaries. Remove "
        f"the folder {path.parent.parent} to give this audit up."
    )


def _session(config: RunConfig, root: Path) -> contextlib.AbstractContextManager[Session]:
    """Open the audit's run, a new one or the one that was stopped."""
    return new_session(config, root) if run_base(root) is None else resumed_session(root)


def _losses(session: Session, row_M: np.ndarray) -> np.ndarray:
    """Return each canary's loss under the session's weights, float64 (M,), its mean over the views
    and masks of ``_KEYS`` of the run's steps.
    """
    cfg, steps = session.config, session.plan.steps
    model, total_M = session.model, np.zeros(len(row_M))
    for step in np.linspace(0, steps - 1, min(steps, _KEYS), dtype=int).tolist():
        key, done = StepKey(cfg.seed, step), 0
        batches = physical_batches(
            session.store,
            row_M,
            key,
            cfg.data,
            cfg.model.encoder.image_size,
            physical_batch_size=cfg.hardware.physical_batch_size,
            workers=1,
            captions=session.words,
            num_classes=getattr(cfg.model, "num_classes", None),
        )
        for batch in batches:
            with torch.no_grad():
                loss_B = session.loss_fn(model, to_device(batch, session.group.device), key)
            total_M[done : done + len(loss_B)] += loss_B.double().cpu().numpy()
            done += len(loss_B)
    return total_M / min(steps, _KEYS)


def _attack_head(config: RunConfig, shadows: int, kept: Path, say: Say) -> tuple[DPPlan, Scored]:
    """The same of a head, whose scores are the log odds of the own label; of a store without
    canaries, all records are canaries.
    """
    # A finished run's settings are complete, and its plan's noise is given.
    given = config.privacy.noise_multiplier is not None
    made = prepare(config, make_plan(config.privacy) if given else None)
    stream, row_M = feature_stream(made), canary_rows(made.store)
    row_M = row_M if len(row_M) else np.arange(stream.num_records)

    found = attack(
        lambda number, folder: score_head(made, stream, row_M),
        len(row_M),
        shadows,
        kept,
        lambda number: say("black box, heads", number + 1, shadows + 1),
    )
    return made.plan, found
