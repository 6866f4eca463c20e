"""``dpvision audit``: check by canaries that the mechanism that runs is the one that is stated."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from dpvision.cli.output import emit, parse, shown
from dpvision.cli.paths import check_run
from dpvision.cli.progress import ProgressLine
from dpvision.config import HeadConfig
from dpvision.config.resolve import resolve
from dpvision.errors import ConfigError
from dpvision.privacy.printed import down, up, up_delta

_CHECKS = {
    "noise": "noise, of the plan's",
    "shift": "canary's shift, in clipping norms",
    "parameter": "noise in one parameter",
    "all_noise": "noise, all steps",
    "all_shift": "canary's shift, all steps",
    "draws": "records drawn, of those expected",
    "batch_sizes": "spread of the batches' sizes",
    "record_draws": "spread of the records' draws",
}
"""Names of the checks on the screen."""
_ATTACK = {
    "auc": "area under the ROC curve",
    "tpr_at_fpr_0.01": "true positives at 1% false",
    "tpr_at_fpr_0.001": "true positives at 0.1% false",
}


def audit(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None,
    recipe: str | None = None,
    white_box: bool = False,
    black_box: bool = False,
    canaries: int = 500,
    data: Path | None = None,
    epsilon: float | None = None,
    steps: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Audit the mechanism of a recipe, or of a finished run, on synthetic canaries.

    White box: canaries' gradients have ten times the clipping norm; noise, shift and draws of the
    steps are compared with the plan, and a lower bound on epsilon is computed, which holds for
    Gaussian noise of any size. Black box: the plan is executed by `dpvision train` on synthetic
    records, canaries among them by fair coins, the coins are guessed from the weights, and the
    right guesses give a lower bound on epsilon, whatever the mechanism. Without either flag both
    are made (of a head the black box alone). docs/audits.md explains both.

    No private image is read, so the results are public. Exit status 0 if all checks passed, 1
    otherwise, 2 if there is nothing to audit.

      dpvision audit --recipe vip.micro --white-box
      dpvision audit --recipe vip.micro --white-box --epsilon 1 --steps 50
      dpvision audit --recipe transfer.one_step --black-box --canaries 500
      dpvision audit runs/first                        writes audit.json and
                                                       audit_black_box.json in runs/first, which
                                                       `dpvision report` names in the statement
      torchrun --nproc-per-node 2 -m dpvision audit --recipe vip.micro --white-box

    Args:
        run: Folder of a finished run, whose plan and settings are audited.
        recipe: Recipe to audit instead, with its own plan.
        white_box: The attacker knows all weights, gradients and coins but one.
        black_box: The attacker knows the first and the last weights, and the canaries.
        canaries: Number of canaries of the black box, 20 or more.
        data: Black box of a head: a public store with labels, whose records are the canaries.
        epsilon: With --recipe: another target epsilon.
        steps: With --recipe: another number of steps.
        out: File of the result of one kind of audit; if omitted, audit.json or
            audit_black_box.json in the run's folder, or with --recipe in the current one.
        json: Print JSON.
    """
    if (run is None) == (recipe is None):
        raise ConfigError(
            f"audit: RUN={run}, recipe={recipe!r}; expected one of the two. Give a run's folder, "
            "or --recipe NAME."
        )
    if run is not None and (epsilon is not None or steps is not None):
        raise ConfigError(
            f"audit: epsilon={epsilon}, steps={steps} with the run {run}; expected neither: the "
            "run has a plan. Drop them, or use --recipe."
        )
    plan = None
    if run is not None:
        check_run(run)
        from dpvision.audit import finished_run

        config, plan = finished_run(run)
    else:
        from dpvision.recipes import get_recipe

        asked = {"epsilon": epsilon, "privacy.steps": steps}
        given = {name: value for name, value in asked.items() if value is not None}
        assert recipe is not None
        config = resolve(get_recipe(recipe), given)
    both = white_box == black_box
    kinds = [
        kind
        for kind, wanted in (
            ("white-box", white_box or (both and not isinstance(config.model, HeadConfig))),
            ("black-box", black_box or both),
        )
        if wanted
    ]
    if out is not None and len(kinds) > 1:
        raise ConfigError(
            f"audit: out={out} with two kinds of audit; expected one. Add --white-box or "
            "--black-box."
        )
    if "black-box" in kinds and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"audit: WORLD_SIZE={os.environ['WORLD_SIZE']} with the black box; expected 1. Add "
            "--white-box, or start it without torchrun."
        )
    from dpvision.audit import black_box as run_black_box
    from dpvision.audit import white_box as run_white_box
    from dpvision.files import write_json
    from dpvision.statement.audits import FILES

    main_process = int(os.environ.get("RANK", "0")) == 0
    results, texts = [], []
    for kind in kinds:
        if kind == "white-box":
            with ProgressLine("preparing", quiet=not main_process) as line:

                def say(what: str, done: int, total: int) -> None:
                    line.say(f"{what}: step {done:,} of {total:,}", public=True)

                result = run_white_box(config, say, plan)
        else:
            result = run_black_box(config, plan, canaries, data=data)
        results.append(result)
        if main_process:
            path = out or (Path() if run is None else run) / FILES[kind]
            write_json(path, result)
            texts.append(f"{_TEXTS[kind](result)}\nResult: {path}")
    if main_process:
        shown_results: Any = results[0] if len(results) == 1 else {"audits": results}
        emit(shown_results, json, "\n\n".join(texts))
    if not all(result["passed"] for result in results):
        sys.exit(1)


def _white_box_text(result: dict[str, Any]) -> str:
    mechanism, bound, plan = result["mechanism"], result["bound"], result["plan"]
    checks = {**mechanism, **bound["checks"]}
    rows = [
        (title, shown(checks[name]["value"]), _between(checks[name]), _verdict(checks[name]))
        for name, title in _CHECKS.items()
        if name in checks
    ]
    low = {"low": bound["floor"], "high": bound["epsilon"]}
    rows.append(("epsilon is at least", down(bound["epsilon_low"]), _between(low), _verdict(bound)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"White-box audit of {result['recipe']}: noise multiplier "
        f"{shown(plan['noise_multiplier'])}, clipping norm {shown(plan['max_grad_norm'])}, sample "
        f"rate {shown(plan['sample_rate'])}, {plan['steps']:,} steps, epsilon "
        f"{up(bound['epsilon'])} at delta {up_delta(bound['delta'])}",
        f"{mechanism['scores']:,} scores in {mechanism['parameters']} parameters of a small "
        f"{mechanism['network']}; {bound['scores']:,} scores for the bound, at confidence "
        f"{bound['confidence']}",
        "",
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
        "",
        "Passed. The bound is model-based: it assumes Gaussian noise, and cannot show a fault of "
        "15%; the checks of noise and shift can."
        if result["passed"]
        else _failed("what runs is not the mechanism of the plan", result["false_alarm"]),
    ]
    return "\n".join(lines)


def _black_box_text(result: dict[str, Any]) -> str:
    bound, attack, allowed = result["bound"], result["attack"], result["limits"]
    rows = [
        (title, f"{shown(attack[name])}", f"at most {shown(allowed[name])}")
        for name, title in _ATTACK.items()
    ]
    rows += [
        ("epsilon is at least", down(bound["epsilon_low"]), up(bound["epsilon"])),
        ("with Gaussian noise", down(bound["epsilon_low_of_plan"]), up(bound["epsilon"])),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        [
            f"Black-box audit of {result['recipe']}: {bound['canaries']:,} canaries, "
            f"{bound['inside']:,} of them in the data; epsilon {up(bound['epsilon'])} at delta "
            f"{up_delta(bound['delta'])}",
            f"Of the {bound['guesses']:,} most certain guesses {bound['right']:,} were right. "
            f"Bounds hold at confidence {bound['confidence']}.",
            "",
            *(
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in [("", "this attack", "the plan's"), *rows]
            ),
            "",
            "Passed. A weak attack proves nothing: the plan's figures are proven, not these. So "
            f"many canaries show no epsilon above {up(bound['epsilon_low_at_most'])}, whatever "
            "the mechanism."
            if result["passed"]
            else _failed("the weights give away more than the plan allows", result["false_alarm"]),
        ]
    )


def _failed(what: str, false_alarm: float) -> str:
    return (
        f"FAILED: {what}. Do not train with it. By chance alone a correct mechanism fails at most "
        f"one audit in {int(1 / false_alarm):,}: audit again, with fresh noise. A fault fails "
        "again."
    )


def _between(check: dict[str, Any]) -> str:
    return f"{shown(check['low'])} to {shown(check['high'])}"


def _verdict(check: dict[str, Any]) -> str:
    return "ok" if check["passed"] else "FAILED"


_TEXTS = {"white-box": _white_box_text, "black-box": _black_box_text}

run = partial(parse, audit, "audit")
