"""report.html: a run's guarantee as a page; it may be released together with statement.json."""

import contextlib
import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dpvision.config.resolve import unread
from dpvision.config.unit import Stated
from dpvision.data.open import open_store
from dpvision.errors import DataError, PrivacyError
from dpvision.eval.score import is_of_the_run, is_share
from dpvision.eval.score_file import CLASS_SCORES, NOTHING_FITTED, read_class_scores
from dpvision.eval.scored_run import check_not_private, trained_store
from dpvision.privacy.composition import total_epsilon
from dpvision.privacy.plan import DPPlan
from dpvision.report import figures
from dpvision.report.gallery import Gallery
from dpvision.report.html import render, setting_rows, write_page
from dpvision.report.learned import learned_of, predict_some
from dpvision.report.neighbours import neighbours_of_run
from dpvision.report.reconstructions import reconstruct_some
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import runs_on
from dpvision.statement.declarations import Declared
from dpvision.statement.schema import Stop, Tuning
from dpvision.statement.statement import (
    Evidence,
    read_evidence,
    require_declarations,
    save_statement,
    statement_of,
)

_CURVE_POINTS = 12
_OFF = ("none", "False", "")


def make_report(
    run_dir: str | Path,
    public_store: str | Path | None = None,
    *,
    store_dir: str | Path | None = None,
    tuning: Tuning = "not_covered",
    stop: Stop = "not_declared",
    gallery: Gallery | None = None,
    declared: Declared | None = None,
) -> Path:
    """Write RUN/statement.json and RUN/report.html, a page without scripts or network requests, and
    return the page's path.

    Args:
        run_dir: run folder.
        public_store: public store whose images are classified, reconstructed and compared on the
            page; if None, no images.
        store_dir, tuning, stop: as in ``statement.make_statement``.
        gallery: public part (``Gallery.public_part``) of a gallery of captioned images.
        declared: what only the operator knows. The page then has questions of data protection law
            too, with these facts and the statement's filled in and judgements left open.

    Raises:
        PrivacyError: the run may not be reported (``make_statement``), or ``public_store`` or
            ``gallery`` is private.
        DataError: ``public_store`` has images of the private training store, if that is there.
        CheckpointError: there is no run or checkpoint, or a file cannot be written.
    """
    root = Path(run_dir)
    evidence = read_evidence(root, None if store_dir is None else Path(store_dir))
    require_declarations(evidence, tuning, stop)
    statement = statement_of(evidence, tuning, stop)
    predictions = images = alike = None
    if public_store is not None:
        store = open_store(public_store)
        if store.results_visibility != "public":
            what = (
                "is private"
                if store.visibility == "private"
                else "was cleared of private twins, so that its choice of images is private"
            )
            raise PrivacyError(
                f"report: {public_store} {what}; expected a store imported with --public. Drop "
                "--public-store."
            )
        trained = None
        with contextlib.suppress(DataError):  # a run is reported without its training store too
            trained = trained_store(read_run(root)[1].data)
        if trained is not None:
            check_not_private(trained, store, "report")
        predictions, images, alike = (
            predict_some(root, store),
            reconstruct_some(root, store),
            neighbours_of_run(root, store),
        )
    if gallery is not None and gallery.visibility != "public":
        raise PrivacyError(
            f"report: the gallery of {gallery.store} is private; expected its public part. Drop "
            "--gallery."
        )
    save_statement(root, statement)
    guarantee, unit = statement["guarantee"], statement["scope"]["unit"]["sampling_unit"]
    said = (
        None
        if guarantee is None
        else Stated.of(unit, guarantee["epsilon"], guarantee["unit_epsilon"])
    )
    html = render(
        "report_page.html",
        s=statement,
        said=said,
        figures=_figures(
            evidence, statement, tuning, _asked(evidence.manifest["config"]["privacy"], said)
        ),
        learned=learned_of(statement["scores"]),
        classes=_public_class_scores(root),
        releases=evidence.releases,
        predictions=predictions,
        images=images,
        alike=alike,
        gallery=gallery,
        scale=0.0 if said is None else _place_on_scale(said.epsilon),
        recompute=recompute_code(evidence.plan, statement),
        settings=_settings_in_use(root, statement),
        declared=declared,
    )
    return write_page(root / "report.html", html)


def _settings_in_use(root: Path, statement: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that the run read, without those that are off."""
    left_out = unread(read_run(root)[1])
    rows = setting_rows(statement["settings"])
    return [(name, value) for name, value in rows if name not in left_out and value not in _OFF]


def _public_class_scores(root: Path) -> dict[str, dict[str, Any]]:
    found = read_class_scores(root)
    if any(one["visibility"] != "public" for one in found.values()):
        raise PrivacyError(
            f"report: {root / CLASS_SCORES} has private figures; expected public ones. Move it to "
            f"confidential/{CLASS_SCORES}."
        )
    return found


def recompute_code(plan: DPPlan, statement: dict[str, Any]) -> str | None:
    """Return a few lines of Python that compute the run's epsilon with dp-accounting alone, or None
    without a guarantee.
    """
    if statement["guarantee"] is None:
        return None
    steps, gaussian = (
        plan.stated_steps(statement["mechanism"]["steps_executed"]),
        f"dp.GaussianDpEvent({plan.noise.multiplier!r})",
    )
    lines = ["import dp_accounting as dp"]
    if plan.selection is not None:
        return "\n".join([*lines, *_recompute_selection(plan, steps), "print(epsilon)"])
    if not plan.sampler.amplifies:
        lines += [
            f"noise = {plan.noise.multiplier!r} / {steps} ** 0.5  # {steps} full-batch steps are "
            "one Gaussian"
        ]
        lines += [f"epsilon = dp.get_epsilon_gaussian(noise, {plan.delta!r})"]
    else:
        s = plan.sampler
        step = (
            f"dp.TruncatedSubsampledGaussianDpEvent({plan.unit.sampled_from}, {s.sample_rate!r}, "
            f"{s.max_batch_size}, {plan.noise.multiplier!r})"
            if s.max_batch_size is not None
            else f"dp.PoissonSampledDpEvent({s.sample_rate!r}, {gaussian})"
        )
        lines += [
            "from dp_accounting import pld",
            f"step = {step}",
            "accountant = "
            f"pld.PLDAccountant(value_discretization_interval={plan.value_discretization_interval!r})",
            f"epsilon = accountant.compose(step, {steps}).get_epsilon({plan.delta!r})",
        ]
    return "\n".join([*lines, "print(epsilon)"])


def _recompute_selection(plan: DPPlan, steps: int) -> list[str]:
    asked = plan.selection
    assert asked is not None
    sampled = plan.sampler.amplifies
    gaussian = f"dp.GaussianDpEvent({plan.noise.multiplier!r})"
    step = f"dp.PoissonSampledDpEvent({plan.sample_rate!r}, {gaussian})" if sampled else gaussian
    shape = "float('inf')" if asked.shape is None else repr(asked.shape)
    return [
        "from dp_accounting import dp_event, rdp",
        f"run = dp.SelfComposedDpEvent({step}, {asked.steps})",
        f"score = dp.GaussianDpEvent({asked.score_noise_ratio * plan.noise.multiplier!r})",
        "event = dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent([run, score]), "
        f"{asked.mean_runs!r}, {shape})",
        f"epsilon = rdp.RdpAccountant().compose(event, {steps}).get_epsilon({plan.delta!r})",
    ]


def _asked(privacy: dict[str, Any], said: Stated | None) -> float | None:
    """Return the target of the epsilon that is drawn by steps: a single image's if there is one
    beside a person's.
    """
    target: float | None = privacy["target_epsilon"]
    return (
        privacy.get("target_unit_epsilon")
        if target is None and said is not None and said.of_image is None
        else target
    )


def _place_on_scale(epsilon: float) -> float:
    """Return the horizontal position of epsilon on the page's scale: a third each for 0.1 to 1, 1
    to 10 and 10 to 100.
    """
    decades = math.log10(max(epsilon, 1e-9)) + 1
    return 8 + 64 * min(max(decades, 0.0), 2.94)


def _figures(
    evidence: Evidence, statement: dict[str, Any], tuning: Tuning, asked: float | None
) -> dict[str, Markup | None]:
    """Return the figures as SVG by name; None if there is nothing to draw."""
    drawn: dict[str, str | None] = dict.fromkeys(("epsilon", "profile", "scores"))
    guarantee = statement["guarantee"]
    if guarantee is not None:
        plan, behind = evidence.plan, runs_on(evidence.ledger.lineage, evidence.ledger.store_id)
        stated = plan.stated_steps(statement["mechanism"]["steps_executed"])
        steps = sorted(
            {
                0,
                1,
                stated,
                *(
                    math.ceil(plan.steps * (k / _CURVE_POINTS) ** 1.5)
                    for k in range(1, _CURVE_POINTS + 1)
                ),
            }
        )
        points = [
            (
                step,
                total_epsilon((*behind, *([(plan, step)] if step else ())), fixed=tuning == "none")[
                    0
                ],
            )
            for step in steps
        ]
        drawn["epsilon"] = figures.epsilon_figure(points, stated, asked)
        if guarantee["privacy_profile"] is not None:
            drawn["profile"] = figures.profile_figure(
                guarantee["privacy_profile"], guarantee["epsilon"], guarantee["delta"]
            )
    if shares := [score for score in statement["scores"] if is_share(score["protocol"])]:
        drawn["scores"] = figures.bars_figure(*_score_groups(shares))
    return {name: None if svg is None else Markup(svg) for name, svg in drawn.items()}


def _score_groups(
    scores: list[dict[str, Any]],
) -> tuple[list[tuple[str, list[tuple[str, float, float, float, bool]]]], list[float]]:
    """Return the scores grouped by protocol (without its last part, the pooling) and data, and the
    chance level of each group.
    """
    groups: dict[str, list[tuple[str, float, float, float, bool]]] = {}
    chances: dict[str, float] = {}
    for score in scores:
        protocol, _, pooling = score["protocol"].rpartition(", ")
        label = score["name"] if pooling == "pixels" else f"{score['name']}, {pooling}"
        fitted = (
            "" if score["train_data"] == NOTHING_FITTED else f" fitted to {score['train_data']},"
        )
        title = f"{protocol},{fitted} on {score['test_data']}"
        groups.setdefault(title, []).append(
            (label, score["value"], score["low"], score["high"], is_of_the_run(score["name"]))
        )
        chances[title] = max(score["chance"], chances.get(title, 0.0))
    return list(groups.items()), list(chances.values())
