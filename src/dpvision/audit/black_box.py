"""The black-box audit: a run of the plan on synthetic records, canaries among them by fair coins,
and an attacker who guesses the coins from the trained weights.

The run is that of ``dpvision train`` (``dpvision adapt``): its store, checks, ledger, loop and
optimizer. The data set is smaller than the plan's, at the plan's sample rate, noise multiplier,
steps, clipping and delta, which give the same epsilon. Canaries are records like the others: they
count in the data set and its sample rate, whether their coins put them in the data or not.

Everything is synthetic, so the result is public, canary by canary.

Legend: M canaries, B rows, N records.
"""

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import feature_stream
from dpvision.audit.bound import area_above, on_records
from dpvision.audit.canary_images import canary_rows, write_canaries
from dpvision.audit.lira import attack_head, fair_coins
from dpvision.audit.one_run import one_run_bound
from dpvision.config import CaptionerConfig, HeadConfig, PrivacyConfig, RunConfig
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.open import open_store
from dpvision.data.tokenizer import scene_captions, train_tokenizer
from dpvision.errors import ConfigError, RunStopped
from dpvision.privacy.coin_guesses import FALSE_ALARM
from dpvision.privacy.composition import curve
from dpvision.privacy.plan import DPPlan, draft_plan, make_plan
from dpvision.runs.run import code_versions
from dpvision.statement.audits import FORMAT
from dpvision.train.loop import Session, fit
from dpvision.train.start import new_session
from dpvision.train.step import to_device

FPRS = (0.001, 0.01)
"""False-positive rates at which true-positive rates are given."""
_OTHERS = 3
"""Scenes for each canary."""
_VOCABULARY, _SENTENCES = 440, 4000
"""Entries and training text of the tokenizer, at most."""
_KEYS = 8
"""Steps whose augmentations and masks a canary's loss is averaged over."""
_FEWEST = 20
_LARGEST = 1e300


def black_box(
    config: RunConfig,
    plan: DPPlan | None,
    num_canaries: int,
    *,
    data: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train once on synthetic records and canaries, attack the weights, and bound epsilon.

    Args:
        config: of a network or a head; random initial weights, whatever it starts from.
        plan: of a finished run; if None, the one of the config's privacy settings.
        num_canaries: M, at least 20; three times as many scenes are the other records.
        data: of a head: a public store, all of whose records are canaries, in place of synthetic
            ones.
        quiet: print no progress.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: too few canaries, no guarantee, a head chosen by a private selection, a
            store for a network, or a private store.
        DataError: the store does not fit the head.
        RunStopped: by a signal.
    """
    _check(config, num_canaries, data)
    with tempfile.TemporaryDirectory(prefix="dpvision-audit-") as folder:
        config = _on_canaries(config, plan, num_canaries, data, Path(folder))
        attack = _attack_head if isinstance(config.model, HeadConfig) else _attack_network
        executed, score_M, inside_M = attack(config, Path(folder) / "run", quiet)
    # Of weights that are not finite the losses are not either.
    score_M = np.nan_to_num(score_M, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    plan = plan or executed
    bound = one_run_bound(score_M, inside_M, executed)
    return {
        "format": FORMAT,
        "kind": "black-box",
        "passed": max(bound["epsilon_low"], bound["epsilon_low_of_plan"]) <= bound["epsilon"],
        "false_alarm": 2 * FALSE_ALARM,
        "recipe": config.recipe,
        "plan": plan.to_dict(),
        "executed": executed.to_dict(),
        "bound": bound,
        "attack": figures(score_M, inside_M),
        "limits": limits(executed),
        "score_of_canary": score_M.tolist(),
        "canary_inside": inside_M.tolist(),
        "code_sha256": code_versions()["code_sha256"],
    }


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


def _check(config: RunConfig, num_canaries: int, data: Path | None) -> None:
    if num_canaries < _FEWEST:
        raise ConfigError(
            f"audit: canaries={num_canaries}; expected at least {_FEWEST}. Use --canaries 500."
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
    """Return the config of the run on the public store, or on a new one of scenes and canaries in
    ``folder``.
    """
    model, data = config.model, config.data
    if isinstance(model, HeadConfig) and model.num_classes is None:
        names = None if public is None else open_store(public).label_names
        model = replace(model, num_classes=len(names or range(10)))
    if isinstance(model, CaptionerConfig):
        model = replace(model, vocab_size=min(model.vocab_size, _VOCABULARY))
        words = train_tokenizer(scene_captions(_SENTENCES), model.vocab_size)
        words.save(folder / "words.json")
        data = replace(data, tokenizer=str(folder / "words.json"))
    declared = config.public_weights if isinstance(model, HeadConfig) else None
    config = replace(config, model=model, init_from=None, public_weights=declared)
    store = (
        write_canaries(folder / "store", config, num_canaries, _OTHERS * num_canaries)
        if public is None
        else open_store(public)
    )
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


def _attack_network(
    config: RunConfig, root: Path, quiet: bool
) -> tuple[DPPlan, np.ndarray, np.ndarray]:
    """Train a network; return the plan that was executed, and the canaries' scores and coins. A
    score is how much the training lowered the canary's loss.
    """
    with new_session(config, root) as session:
        row_M = canary_rows(session.store)
        inside_M = fair_coins(len(row_M))
        session.rows = np.setdiff1d(np.asarray(session.rows), row_M[~inside_M])
        before_M = _losses(session, row_M)
        if not fit(session, quiet=quiet):
            raise RunStopped("audit: stopped by a signal. No result was written; start it again.")
        return session.plan, before_M - _losses(session, row_M), inside_M


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


def _attack_head(
    config: RunConfig, root: Path, quiet: bool
) -> tuple[DPPlan, np.ndarray, np.ndarray]:
    """The same of a head, by likelihood ratios; of a store without canaries, all records are
    canaries.
    """
    # A finished run's settings are complete, and its plan's noise is given.
    given = config.privacy.noise_multiplier is not None
    made = prepare(config, make_plan(config.privacy) if given else None)
    stream, row_M = feature_stream(made), canary_rows(made.store)
    row_M = row_M if len(row_M) else np.arange(stream.num_records)
    return made.plan, *attack_head(made, stream, row_M)
