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


def audit(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None,
    recipe: str | None = None,
    white_box: bool = False,
    epsilon: float | None = None,
    steps: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Audit the mechanism of a recipe, or of a finished run, on synthetic canaries: records whose
    gradients have ten times the clipping norm.

    The steps are those of `dpvision train`: its draws, clipping, totals, noise and divisor. Noise,
    shift and draws are compared with the plan, and a lower bound on epsilon is computed, which
    holds for Gaussian noise of any size (docs/audits.md). No private image is read, so the result
    is public. Exit status 0 if all checks passed, 1 otherwise, 2 if there is nothing to audit.

      dpvision audit --recipe vip.micro --white-box
      dpvision audit --recipe vip.micro --white-box --epsilon 1 --steps 50
      dpvision audit runs/first --white-box            writes runs/first/audit.json, which
                                                       `dpvision report` names in the statement
      torchrun --nproc-per-node 2 -m dpvision audit --recipe vip.micro --white-box

    Args:
        run: Folder of a finished run, whose plan and settings are audited.
        recipe: Recipe to audit instead, with its own plan.
        white_box: The attacker knows all weights, gradients and coins but one. The only audit there
            is.
        epsilon: With --recipe: another target epsilon.
        steps: With --recipe: another number of steps.
        out: File of the result; if omitted, audit.json in the run's folder, or with --recipe in the
            current one.
        json: Print JSON.
    """
    if not white_box:
        raise ConfigError(
            "audit: white_box=False; expected the only kind of audit there is. Add --white-box."
        )
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
    else:
        from dpvision.recipes import get_recipe

        asked = {"epsilon": epsilon, "privacy.steps": steps}
        given = {name: value for name, value in asked.items() if value is not None}
        assert recipe is not None
        config = resolve(get_recipe(recipe), given)
    from dpvision.audit import finished_run
    from dpvision.audit import white_box as run_audit
    from dpvision.files import write_json
    from dpvision.statement.audits import FILE

    if run is not None:
        config, plan = finished_run(run)
    main_process = int(os.environ.get("RANK", "0")) == 0
    with ProgressLine("preparing", quiet=not main_process) as line:

        def say(what: str, done: int, total: int) -> None:
            line.say(f"{what}: step {done:,} of {total:,}", public=True)

        result = run_audit(config, say, plan)
    if main_process:
        path = out or (Path() if run is None else run) / FILE
        write_json(path, result)
        emit(result, json, f"{_text(result)}\nResult: {path}")
    if not result["passed"]:
        sys.exit(1)


def _text(result: dict[str, Any]) -> str:
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
        else "FAILED: what runs is not the mechanism of the plan. Do not train with it.",
    ]
    return "\n".join(lines)


def _between(check: dict[str, Any]) -> str:
    return f"{shown(check['low'])} to {shown(check['high'])}"


def _verdict(check: dict[str, Any]) -> str:
    return "ok" if check["passed"] else "FAILED"


run = partial(parse, audit, "audit")
