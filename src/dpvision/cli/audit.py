"""``dpvision audit``: check by canaries that the mechanism that runs is the one that is stated."""

import contextlib
import math
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dpvision.cli.output import emit, parse, shown
from dpvision.cli.paths import check_run
from dpvision.cli.progress import ProgressLine
from dpvision.config import HeadConfig
from dpvision.config.resolve import resolve
from dpvision.errors import CheckpointError, ConfigError, RunStopped
from dpvision.privacy.printed import down, duration, up, up_delta
from dpvision.runs.folder import STOPPED

if TYPE_CHECKING:
    from dpvision.audit.parts import Parts
    from dpvision.audit.time_given import TimeGiven

_CHECKS = {
    "noise": "noise, of the plan's",
    "shift": "canary's shift, in clipping norms",
    "parameter": "noise in one parameter",
    "all_noise": "noise, all steps",
    "step_noise": "noise in one step",
    "repeated_noise": "likeness to the step before",
    "reused_noise": "likeness of any two steps",
    "all_shift": "canary's shift, all steps",
    "draws": "records drawn, of those expected",
    "batch_sizes": "spread of the batches' sizes",
    "record_draws": "spread of the records' draws",
}
"""Names of the checks on the screen."""
_WORDS = {"white-box": "White box", "black-box": "Black box"}
_BLIND = (
    " In our tests canaries of a masked autoencoder were hardly found even without noise: trust "
    "the white box."
)
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
    minutes: float | None = None,
    again: bool = False,
    canaries: int | None = None,
    shadows: int | None = None,
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

    No private image is read, so the results are public. A run's audit that is stopped (Ctrl-C,
    SIGTERM, a crash, --minutes) goes on with the same command: the black box where it was saved,
    the white box from its start. A result that is there is shown, not made again, so that none of
    several is chosen; with --again the file keeps all of them, and the statement counts them.

    Exit status 0 if all checks passed, 1 otherwise, 2 if there is nothing to audit, 75 if it was
    stopped or --minutes were too few for any part.

      dpvision audit --recipe vip.micro --white-box
      dpvision audit --recipe vip.micro --white-box --epsilon 1 --steps 50
      dpvision audit --recipe transfer.one_step --black-box --canaries 500
      dpvision audit runs/first                        writes audit.json and
                                                       audit_black_box.json in runs/first, which
                                                       `dpvision report` names in the statement
      dpvision audit runs/first --minutes 30           what fits, by the speed of its first steps
      dpvision audit runs/first --black-box --shadows 16     LiRA, in 17 times the time
      torchrun --nproc-per-node 2 -m dpvision audit --recipe vip.micro --white-box

    Args:
        run: Folder of a finished run, whose plan and settings are audited.
        recipe: Recipe to audit instead, with its own plan.
        white_box: The attacker knows all weights, gradients and coins but one.
        black_box: The attacker knows the first and the last weights, and the canaries.
        minutes: Time for all parts together. A part that cannot finish is left out, with the time
            that it needs.
        again: With RUN: audit again with new coins and new noise where there is a result.
        canaries: Number of canaries of the black box, 20 or more. Its time grows with them. If
            omitted, 500, or as many as the run's delta allows.
        shadows: Number of shadow models of the black box, 0 or 4 to 99, each trained as long as
            the first: canaries are then scored by likelihood ratios (LiRA). If omitted, 16 of a
            head and 0 of a network.
        data: Black box of a head: a public store with labels, whose records are the canaries.
        epsilon: With --recipe: another target epsilon.
        steps: With --recipe: another number of steps.
        out: With --recipe: file of the result of one kind of audit; if omitted, audit.json or
            audit_black_box.json in the current folder. A run's results are in its folder.
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
    if run is None and again:
        raise ConfigError(
            f"audit: again=True with the recipe {recipe}; expected a run: the audit of a recipe is "
            "made each time. Drop --again."
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(
            f"audit: minutes={minutes}; expected a number above 0. Omit it for no limit."
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
    from dpvision.audit.parts import Parts
    from dpvision.audit.time_given import TimeGiven

    parts = Parts(config, plan, run, canaries, shadows, data, out, again)
    parts.check(kinds, minutes)
    time_given = TimeGiven(math.inf if minutes is None else 60 * minutes)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # as Ctrl-C
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        of = str(run or config.recipe)
        made, left_out, stopped = _shown_parts(parts, of, kinds, time_given)
    if parts.is_main:
        result: Any = {"audits": [result for result, _ in made]}
        if left_out:
            result["left_out"] = left_out
        elif len(made) == 1:
            result = made[0][0]
        texts = [text for _, text in made] + [_left_out_text(one, run) for one in left_out]
        if made and run is not None:
            texts.append("Next:\n" + f"  dpvision report {run}")
        if texts or json:
            emit(result, json, "\n\n".join(texts))
        if stopped:
            kept = "The same command goes on." if run is not None else "A recipe's is not kept."
            print(f"Stopped by a signal. {kept}", file=sys.stderr)
    if not all(result["passed"] for result, _ in made):
        sys.exit(1)
    if stopped or not made:
        sys.exit(STOPPED)


def _shown_parts(
    parts: "Parts", of: str, kinds: list[str], given: "TimeGiven"
) -> tuple[list[tuple[dict[str, Any], str]], list[dict[str, Any]], bool]:
    """Make the audits that fit the time, one after the other, each written before it is shown.
    Return results with their texts, what was left out, and whether a signal came.
    """
    from dpvision.audit.time_given import NotInTime, Pace

    made, left_out = [], []
    quiet = not parts.is_main
    with ProgressLine(quiet=quiet) as line:
        limit = "" if math.isinf(given.left_s) else f", in at most {duration(given.left_s)}"
        line.stay(f"Audit of {of}: {', then '.join(_WORDS[k].lower() for k in kinds)}{limit}")
    for kind in kinds:
        if (found := parts.made_before(kind)) is not None:
            made.append((found, _made_before_text(found, parts.file(kind))))
            continue
        try:
            if not given.left_s:
                raise NotInTime(None)
            with ProgressLine(f"{_WORDS[kind]}: preparing", quiet=quiet) as line:
                line.stay(f"{_WORDS[kind]}: {_does(kind, parts)}")
                result = parts.make(kind, Pace(given, partial(line.say, public=True), line.stay))
        except NotInTime as late:
            left_out.append({"kind": kind, "needed_s": late.needed_s, "left_s": given.left_s})
            continue
        except (RunStopped, KeyboardInterrupt):
            return made, left_out, True
        made.append((result, f"{_TEXTS[kind](result)}\nResult: {parts.file(kind)}"))
    return made, left_out, False


def _does(kind: str, parts: "Parts") -> str:
    """Return what a part does, shown when it begins."""
    if kind == "white-box":
        return "50 steps on a small network of its kind, then all steps on a table of weights"
    text = f"trains by the plan on synthetic records, {parts.num_canaries:,} canaries among them"
    return f"{text}, with {n} shadow models" if (n := parts.num_shadows) else text


def _made_before_text(found: dict[str, Any], path: Path) -> str:
    try:
        text = _TEXTS[found["kind"]](found)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"audit: {path} cannot be read ({error!r}); expected a file of `dpvision audit`. "
            "Remove it, and audit again."
        ) from None
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return f"{text}\nMade before, not again: {path} (--again makes another)"


def _left_out_text(part: dict[str, Any], run: Path | None) -> str:
    kind, needed_s = part["kind"], part["needed_s"]
    more = f"Repeat the command with --{kind}"
    if needed_s is None:
        return f"{_WORDS[kind]}: left out, no time is left. {more}."
    goes_on = " It goes on from there." if kind == "black-box" and run is not None else ""
    return (
        f"{_WORDS[kind]}: left out. It needs {duration(needed_s)} more by the speed of its steps, "
        f"and {duration(part['left_s'])} were left. {more} --minutes "
        f"{math.ceil(1.1 * needed_s / 60)}, or without --minutes.{goes_on}"
    )


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
    lost = result.get("steps_without_update", 0)
    above = any(attack[name] > allowed[name] for name in _ATTACK)
    chance = " Rates of so few canaries may be above the plan's by chance." if above else ""
    return "\n".join(
        [
            f"Black-box audit of {result['recipe']}: {bound['canaries']:,} canaries, "
            f"{bound['inside']:,} of them in the data; epsilon {up(bound['epsilon'])} at delta "
            f"{up_delta(bound['delta'])}",
            *(
                [f"Scores are likelihood ratios, by {n} shadow models (LiRA)."]
                if (n := result.get("shadows", 0))
                else []
            ),
            f"Of the {bound['guesses']:,} most certain guesses {bound['right']:,} were right. "
            f"Bounds hold at confidence {bound['confidence']}.",
            *(
                [f"{lost:,} steps were lost when the audit was killed, and weaken it."]
                if lost
                else []
            ),
            "",
            *(
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in [("", "this attack", "the plan's"), *rows]
            ),
            "",
            f"Passed: epsilon is the test.{chance} A weak attack proves nothing: the plan's "
            f"figures are proven, not these. {bound['canaries']:,} canaries can show no epsilon "
            f"above {up(bound['epsilon_low_at_most'])} at this delta, whatever the mechanism."
            + (_BLIND if result.get("model") == "mae" else "")
            if result["passed"]
            else _failed("the weights give away more than the plan allows", result["false_alarm"]),
        ]
    )


def _failed(what: str, false_alarm: float) -> str:
    return (
        f"FAILED: {what}. Do not train with it. By chance alone a correct mechanism fails at most "
        f"one audit in {int(1 / false_alarm):,}: audit again, with fresh noise (a run with "
        "--again). A fault fails again."
    )


def _between(check: dict[str, Any]) -> str:
    return f"{shown(check['low'])} to {shown(check['high'])}"


def _verdict(check: dict[str, Any]) -> str:
    return "ok" if check["passed"] else "FAILED"


_TEXTS = {"white-box": _white_box_text, "black-box": _black_box_text}

run = partial(parse, audit, "audit")
