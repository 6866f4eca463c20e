"""``dpvision audit``: check by canaries that the mechanism that runs is the one that is stated."""

import contextlib
import math
import os
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dpvision.cli.output import emit, parse, shown
from dpvision.cli.paths import check_run
from dpvision.cli.progress import ProgressLine
from dpvision.config import HeadConfig, RunConfig
from dpvision.config.resolve import resolve
from dpvision.errors import CheckpointError, ConfigError, RunStopped
from dpvision.privacy.printed import down, duration, up, up_delta
from dpvision.runs.folder import STOPPED, run_base

if TYPE_CHECKING:
    from dpvision.audit.time_given import Pace, TimeGiven
    from dpvision.privacy.plan import DPPlan

_CHECKS = {
    "noise": "noise, of the plan's",
    "shift": "canary's shift, in clipping norms",
    "parameter": "noise in one parameter",
    "all_noise": "noise, all steps",
    "step_noise": "noise in one step",
    "repeated_noise": "likeness to the step before",
    "all_shift": "canary's shift, all steps",
    "draws": "records drawn, of those expected",
    "batch_sizes": "spread of the batches' sizes",
    "record_draws": "spread of the records' draws",
}
"""Names of the checks on the screen."""
_WORDS = {"white-box": "White box", "black-box": "Black box"}
_DOES = {
    "white-box": "50 steps on a small network of its kind, then all steps on a table of weights",
    "black-box": "trains by the plan on synthetic records, {canaries:,} canaries among them",
}
"""What a part does, shown when it begins."""
_BLIND = (
    " In our tests canaries of a masked autoencoder were not found even without noise: trust the "
    "white box."
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
      torchrun --nproc-per-node 2 -m dpvision audit --recipe vip.micro --white-box

    Args:
        run: Folder of a finished run, whose plan and settings are audited.
        recipe: Recipe to audit instead, with its own plan.
        white_box: The attacker knows all weights, gradients and coins but one.
        black_box: The attacker knows the first and the last weights, and the canaries.
        minutes: Time for all parts together. A part that cannot finish is left out, with the time
            that it needs.
        again: With RUN: audit again with new coins and new noise where there is a result.
        canaries: Number of canaries of the black box, 20 or more. Its time grows with them.
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
    if run is not None and out is not None:
        raise ConfigError(
            f"audit: out={out} with the run {run}; expected none: a run's results are kept in its "
            "folder, all of them. Drop --out; copy the file afterwards."
        )
    if out is not None and len(kinds) > 1:
        raise ConfigError(
            f"audit: out={out} with two kinds of audit; expected one. Add --white-box or "
            "--black-box."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _check_ranks(os.environ["WORLD_SIZE"], kinds, minutes)
    from dpvision.audit.results import one_audit
    from dpvision.audit.time_given import TimeGiven

    of = _Of(config, run, plan, canaries, data, out, again)
    for kind in kinds:
        _check_file(of, kind)
    if "black-box" in kinds:
        from dpvision.audit.black_box import check_settings

        check_settings(config, canaries, data)
    time_given = TimeGiven(math.inf if minutes is None else 60 * minutes)
    with contextlib.ExitStack() as stack:
        if run is not None and _is_main():
            stack.enter_context(one_audit(run))
        if threading.current_thread() is threading.main_thread():  # as Ctrl-C
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        made, left_out, stopped = _audit_parts(of, kinds, time_given)
    if _is_main():
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


@dataclass(frozen=True)
class _Of:
    """What is audited, and how."""

    config: RunConfig
    run: Path | None
    plan: "DPPlan | None"
    canaries: int
    data: Path | None
    out: Path | None
    again: bool

    def file(self, kind: str) -> Path:
        """File of a kind's result."""
        from dpvision.statement.audits import FILES

        return self.out or (self.run or Path()) / FILES[kind]


def _check_file(of: _Of, kind: str) -> None:
    """Refuse a file of a recipe's result that cannot be written, or would be taken for a run's."""
    path = of.file(kind)
    if of.run is None and run_base(path.parent) is not None:
        raise ConfigError(
            f"audit: {path} lies in the folder of a run, which is not what is audited; expected "
            "another folder. Add --out, or audit the run."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"audit: out={path}; expected a file in a folder that exists. Make the folder, or name "
            "a file."
        )


def _check_ranks(world_size: str, kinds: list[str], minutes: float | None) -> None:
    """Refuse under torchrun what one process does."""
    if "black-box" in kinds:
        raise ConfigError(
            f"audit: WORLD_SIZE={world_size} with the black box, which is a run of its own in one "
            "process; expected 1. Add --white-box, which audits the ranks together, or start it "
            "without torchrun."
        )
    if minutes is not None:
        raise ConfigError(
            f"audit: WORLD_SIZE={world_size} with minutes={minutes}; expected one process, whose "
            "clock decides. Drop --minutes, or start it without torchrun."
        )


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _audit_parts(
    of: _Of, kinds: list[str], given: "TimeGiven"
) -> tuple[list[tuple[dict[str, Any], str]], list[dict[str, Any]], bool]:
    """Make the audits that fit the time, one after the other, each written before it is shown.
    Return results with their texts, what was left out, and whether a signal came.
    """
    from dpvision.audit.time_given import NotInTime, Pace

    made, left_out = [], []
    with ProgressLine(quiet=not _is_main()) as line:
        limit = "" if math.isinf(given.left_s) else f", in at most {duration(given.left_s)}"
        what = of.run or of.config.recipe
        line.stay(f"Audit of {what}: {', then '.join(_WORDS[k].lower() for k in kinds)}{limit}")
    for kind in kinds:
        if (text := _made_before(of, kind)) is not None:
            made.append(text)
            continue
        try:
            if not given.left_s:
                raise NotInTime(None)
            with ProgressLine(f"{_WORDS[kind]}: preparing", quiet=not _is_main()) as line:
                line.stay(f"{_WORDS[kind]}: {_DOES[kind].format(canaries=of.canaries)}")
                pace = Pace(given, partial(line.say, public=True), line.stay)
                result = _make(of, kind, pace)
        except NotInTime as late:
            left_out.append({"kind": kind, "needed_s": late.needed_s, "left_s": given.left_s})
            continue
        except (RunStopped, KeyboardInterrupt):
            return made, left_out, True
        made.append((result, f"{_TEXTS[kind](result)}\nResult: {of.file(kind)}"))
    return made, left_out, False


def _make(of: _Of, kind: str, say: "Pace") -> dict[str, Any]:
    """Make an audit and write its result."""
    from dpvision.audit import black_box, white_box
    from dpvision.audit.black_box import forget
    from dpvision.audit.results import KEEP, write_result

    keep = None if of.run is None else of.run / KEEP
    if kind == "white-box":
        result = white_box(of.config, say, of.plan)
    else:
        result = black_box(of.config, of.plan, of.canaries, data=of.data, say=say, keep=keep)
    if _is_main():
        write_result(of.file(kind), kind, of.plan, result)
        if kind == "black-box" and keep is not None:
            forget(keep)
    return result


def _made_before(of: _Of, kind: str) -> tuple[dict[str, Any], str] | None:
    """Return the result of an audit that is there already, with its text; None if it is to be
    made.
    """
    from dpvision.audit.results import made_before

    if of.run is None or of.plan is None or of.again or of.data is not None:
        return None
    settings = {"canaries": of.canaries, "ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    found = made_before(of.run, of.file(kind), kind, of.plan, settings)
    if found is None:
        return None
    try:
        text = _TEXTS[kind](found)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"audit: {of.file(kind)} cannot be read ({error!r}); expected a file of `dpvision "
            "audit`. Remove it, and audit again."
        ) from None
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return found, f"{text}\nMade before, not again: {of.file(kind)} (--again makes another)"


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
    return "\n".join(
        [
            f"Black-box audit of {result['recipe']}: {bound['canaries']:,} canaries, "
            f"{bound['inside']:,} of them in the data; epsilon {up(bound['epsilon'])} at delta "
            f"{up_delta(bound['delta'])}",
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
            "Passed. A weak attack proves nothing: the plan's figures are proven, not these. So "
            f"many canaries show no epsilon above {up(bound['epsilon_low_at_most'])}, whatever "
            "the mechanism." + (_BLIND if result.get("model") == "mae" else "")
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
