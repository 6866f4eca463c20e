"""``dpvision plan``: what can this data set afford?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from dpvision.cli.output import FLAT, emit, pairs, parse, shown, table
from dpvision.cli.typed import optional
from dpvision.config import PrivacyConfig
from dpvision.config.resolve import resolve_privacy, with_steps
from dpvision.config.unit import Unit
from dpvision.errors import ConfigError
from dpvision.files import write_file
from dpvision.privacy.printed import count, up, up_delta
from dpvision.recipes import get_recipe

if TYPE_CHECKING:
    from dpvision.plan.cost import Cost
    from dpvision.plan.question import Advice, EncoderAtHand, Question


_SETTINGS = optional(
    PrivacyConfig,
    "dataset_size",
    "expected_batch_size",
    "steps",
    "noise_multiplier",
    "target_epsilon",
    "target_unit_epsilon",
    "delta",
    "sampling",
    "max_batch_size",
    "max_records_per_unit",
    "num_units",
    "sampling_unit",
)
"""Those of the settings that are given replace the recipe's."""


@dataclass(frozen=True)
class _Question:
    """The fields of ``plan.question.Question``, all optional: a recipe's cost takes some."""

    images: int | None = None
    """Ask for a recommendation: the declared number of images; needs --epsilon."""
    people: int | None = None
    """Of how many people the images are; epsilon is then for a person."""
    labels: int | None = None
    """Number of classes, if the images have labels."""
    captions: bool = False
    """The images have captions."""
    epsilon: float | None = None
    """The epsilon that may be spent."""
    public_encoder: str | None = None
    """An encoder of public images that is at hand, as `dpvision adapt --encoder` takes it."""
    gpus: int | None = None
    """Number of GPUs (left out: none; with --device: 1). With a recipe: predict step time, hours
    and memory.
    """
    device: str | None = None
    """Their name: A100, H100, H200, V100, L4, ...; or cpu: one core with a recipe, no GPU without.
    """
    hours: float | None = None
    """Hours that may be used; the answer says if they do not suffice."""


@dataclass(frozen=True)
class PlanArgs(_Question):
    """What a data set can afford, before any compute is spent.

    Give the noise and read epsilon, or give --target-epsilon and read the noise. With the name of a
    recipe, what is left out comes from it. `plan` computes anything; "refused" says whether
    training with it would be. With --images and --epsilon it recommends what to do with them, and
    why (docs/plan.md).

      dpvision plan --dataset-size 50000 --expected-batch-size 5000 --steps 300 --target-epsilon 8
      dpvision plan vip.base
      dpvision plan vip.micro --target-epsilon 2
      dpvision plan vip.base --page plan.html
      dpvision plan dpcap.base --simulate 32
      dpvision plan vip.base --gpus 8 --device h200
      dpvision plan --images 20000 --people 4000 --labels 10 --epsilon 3
      dpvision plan vip.base_2m --num-units 500000 --max-records-per-unit 5
      dpvision plan --images 5000000 --captions --epsilon 8 --gpus 8 --device H100
      dpvision plan --claims
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    """Name of a recipe to start from."""
    simulate: Annotated[float | None, tyro.conf.arg(metavar="K")] = None
    """Plan a simulation of these settings with a K-th of the batch and of the noise (TAN); it
    guarantees nothing.
    """
    page: Path | None = None
    """Write a page with sliders and figures to this .html file, in about twenty seconds
    (docs/plan.md).
    """
    csv: Path | None = None
    """Write the tables behind these figures to this folder, a .csv file each."""
    claims: bool = False
    """Recompute every privacy claim of the papers instead, which takes half a minute
    (docs/claims.md).
    """
    json: bool = False
    """Print JSON."""
    settings: Annotated[PrivacyConfig, FLAT] = _SETTINGS
    """The privacy settings."""
    num_parameters: int | None = None
    """Trained parameters, for the signal figures."""


def _given(args: Any, part: type) -> dict[str, Any]:
    """Return the options of a part of the arguments that were given."""
    values = {f.name: getattr(args, f.name) for f in fields(part) if f.name != "settings"}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    plan(parse(PlanArgs, "plan", argv))


def plan(args: PlanArgs) -> None:
    """Print what the settings or the question amount to."""
    settings, asked = _given(args.settings, PrivacyConfig), _given(args, _Question)
    given = _given(args, PlanArgs) | settings
    if args.claims:
        if others := [name for name in given if name not in ("claims", "json")]:
            raise ConfigError(
                f"plan: --claims with {', '.join(others)}; expected it alone, or with --json. "
                "Drop the others."
            )
        _claims(args.json)
        return
    priced = (
        args.recipe is not None
        and (args.gpus is not None or args.device is not None)
        and asked.keys() <= {"gpus", "device", "hours"}
    )
    if asked and not priced:
        _advise(asked, [name for name in given if name not in asked and name != "json"], args.json)
        return
    if args.page is not None and (
        args.page.suffix != ".html"
        or args.page.is_dir()
        or not args.page.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"plan: page={str(args.page)!r}; expected a file whose name ends in .html, in a "
            "folder that exists. Rename it."
        )
    if args.csv is not None and args.csv.exists() and not args.csv.is_dir():
        raise ConfigError(
            f"plan: csv={str(args.csv)!r}; expected a folder, which is made if it does not "
            "exist. Choose another name."
        )
    from dpvision.privacy.planner import what_if

    num_parameters = args.num_parameters
    if args.recipe is not None and num_parameters is None:
        from dpvision.plan.parameters import count_parameters

        num_parameters = (
            count_parameters(get_recipe(args.recipe).model) or None
        )  # a head's depend on its encoder
    config = _config(args.recipe, settings)
    if args.simulate is not None:
        if args.page is not None or args.csv is not None:
            raise ConfigError(
                "plan: --simulate with --page or --csv; expected one of them: a simulation has "
                "no epsilon to plot. Drop one."
            )
        config, result, text = _simulation(args.recipe, config, args.simulate, settings)
    else:
        of_head = args.recipe is not None and get_recipe(args.recipe).model.kind == "head"
        result = what_if(config, num_parameters=num_parameters, of_head=of_head)
        text = _text(result)
    if priced:
        from dpvision.plan.cost import step_cost

        cost = step_cost(
            replace(get_recipe(args.recipe or ""), privacy=config),
            1 if args.gpus is None else args.gpus,
            args.device,
        )
        result, text = result | {"cost": asdict(cost)}, f"{text}\n{_cost_text(cost, args.hours)}"
    if args.page is not None or args.csv is not None:
        tables, said = _write_tables(args, config, result)
        result, text = result | {"tables": tables}, f"{text}\n{said}"
    emit(result, args.json, text)


def _advise(asked: dict[str, Any], settings: list[str], json: bool) -> None:
    if settings:
        raise ConfigError(
            f"plan: --{next(iter(asked))} with {', '.join(settings)}; expected a question or "
            "settings. Drop one kind."
        )
    missing = [f"--{name}" for name in ("images", "epsilon") if name not in asked]
    if missing:
        raise ConfigError(
            f"plan: without {' and '.join(missing)}; expected both in a question. E.g. --images "
            "20000 --labels 10 --epsilon 3."
        )
    from dpvision.plan.advice import advise
    from dpvision.plan.device_table import find_device
    from dpvision.plan.question import Question

    if "device" in asked and find_device(asked["device"]).name != "cpu":
        asked = {"gpus": 1} | asked
    question = Question(**asked)
    at_hand = None if question.public_encoder is None else _at_hand(question.public_encoder)
    found = advise(question, get_recipe, at_hand)
    result = {"question": asdict(question) | {"delta": question.delta}, "advice": asdict(found)}
    emit(result, json, _advice_text(question, found))


_SIZES = (96, 224)
"""Image sizes in pixels of which ``plan`` compares the time, for encoders that accept any."""


def _at_hand(spec: str) -> "EncoderAtHand | None":
    """Open a public encoder and measure its time per image; None for a folder that is not here.

    Raises: as ``open_encoder``.
    """
    from dpvision.encoders.feature_file import seconds_per_image
    from dpvision.encoders.feature_precision import in_precision, precision_for
    from dpvision.encoders.open import open_encoder
    from dpvision.plan.question import EncoderAtHand

    kind, colon, name = spec.partition(":")
    if not colon and not Path(spec).exists():
        return None
    if kind == "timm" and "@" not in name:
        from dpvision.encoders.third_party import check_name
        from dpvision.models.timm_cache import find_timm_weights

        check_name(kind, name)
        if find_timm_weights(name)[0] is None:
            return EncoderAtHand(spec, {}, missing=True)
    opened = open_encoder(spec)
    encoder = in_precision(opened, precision_for(opened, None, "auto", "cpu"))
    sizes = [encoder.image_size]
    if kind in ("timm", "torchvision") and encoder.family == "convnet":
        sizes += [size for size in _SIZES if size != encoder.image_size]
    seconds = {}
    for size in sizes:
        seconds[size] = seconds_per_image(replace(encoder, image_size=size))
    declaration = None
    if any(entry["visibility"] == "undeclared" for entry in encoder.lineage):
        what, _, file = encoder.name.partition("@")
        parts = (what, encoder.licence or "licence not stated", file or "a file")
        declaration = "; ".join(part.replace(";", ",") for part in parts)
    return EncoderAtHand(encoder.name, seconds, declaration, missing=encoder.weights == "random")


def _claims(json: bool) -> None:
    from dpvision.privacy.claims import CLAIMS, recompute_all

    found = []
    with Console(stderr=True).status("recomputing") as status:
        for row in recompute_all():
            found.append(row)
            status.update(f"recomputing: {len(found)} of {len(CLAIMS)}")
    columns = ("claim", "claimed", "Renyi (Mironov)", "Renyi (Balle)", "PLD, stated", "holds")
    verdicts = {True: "yes", False: "NO", None: ""}
    rows = [
        (
            r.claim.name,
            r.claim.claimed_epsilon or "",
            up(r.epsilon_rdp_mironov, 2),
            up(r.epsilon_rdp, 2),
            up(r.epsilon, 2),
            verdicts[r.holds],
        )
        for r in found
    ]
    text = table("epsilon of the papers' settings", columns, rows)
    text += (
        "\n"
        "Settings: docs/claims.md. A claim holds where the figure by privacy loss distributions "
        "is at most the claimed one."
    )
    emit(
        {"claims": [asdict(r) | {"holds": r.holds, "as_published": r.as_published} for r in found]},
        json,
        text,
    )


_BUDGETS = ("noise_multiplier", "target_epsilon", "target_unit_epsilon")


def _config(recipe: str | None, changes: dict[str, Any]) -> PrivacyConfig:
    if recipe is not None:
        return resolve_privacy(with_steps(get_recipe(recipe)).privacy, changes)
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("dataset_size", "expected_batch_size", "steps")
        if name not in changes
    ]
    if not any(name in changes for name in _BUDGETS):
        missing.append("--noise-multiplier or --target-epsilon")
    if missing:
        raise ConfigError(
            f"plan: without {', '.join(missing)}; expected these options, or a recipe: dpvision "
            "plan vip.base. See dpvision plan --help."
        )
    return PrivacyConfig(**changes)


_OF_UNIT = ("dataset_size", "num_units", "max_records_per_unit", "sampling_unit")
"""Figures of ``what_if`` that are the fields of a Unit."""


def _text(r: dict[str, Any]) -> str:
    if r["epsilon"] is None:
        return f"NO PRIVACY GUARANTEE (guarantee={r['guarantee']!r})\n" + pairs(
            {"sample-gradients": r["sample_gradients"]}
        )
    unit, tpr = Unit(*(r[name] for name in _OF_UNIT)), r["attack_tpr"]
    head = f"epsilon {up(r['epsilon'])}"
    if r["unit_epsilon"] is not None:
        if unit.draws_people:
            beside = f" ({count(unit.max_records, 'image')} in a step)"
        elif unit.max_records > 1:
            beside = f" ({unit.images}), {head} for a single image,"
        else:
            beside = f" ({unit.taking_part})"
        head = f"epsilon {up(r['unit_epsilon'])} for a person{beside}"
    image = ", of an image" if unit.is_person and not unit.draws_people else ""
    lines = [
        f"{head} at delta {up_delta(r['delta'])} after {r['steps']:,} steps",
        pairs(
            {
                f"epsilon (RDP, as the papers){image}": up(r["epsilon_rdp"]),
                f"epsilon without sampling{image}": up(r["epsilon_unamplified"]),
                "best attack": f"{up(100 * tpr['0.01'], 1)}% true positives at 1% false ones, "
                f"{up(100 * tpr['0.001'], 1)}% at 0.1%",
                "people x delta" if unit.is_person else "N x delta": up_delta(r["n_times_delta"]),
                "noise multiplier": r["noise_multiplier"],
                "sampling": r["sampling"],
                "sample rate": r["sample_rate"],
                "expected batch size": r["expected_batch_size"],
                "sample-gradients": r["sample_gradients"],
                "noise / batch": r["noise_batch_ratio"],
            }
        ),
    ]
    if r["signal"]:
        lines += [
            "signal (a heuristic: docs/privacy.md)",
            pairs({name.replace("_", " "): value for name, value in r["signal"].items()}),
        ]
    if r["draws"]:
        lines.append(_draws_table(r["draws"]))
    if r["advice"]:
        lines.append(r["advice"])
    if r["refused"]:
        lines.append(f"Training with this plan would be refused: {r['refused']}")
    return "\n".join(lines)


def _advice_text(q: "Question", a: "Advice") -> str:
    drawn = a.draws is not None
    whose = "a person" if q.unit.is_person else "an image"
    whose += f" ({q.images_of_a_person} images at most)" if q.unit.is_person and not drawn else ""
    hours = None if a.hours is None else f"{a.hours:.2g} ({a.hours_how})"
    lines = [
        f"Recommended: {a.way}.",
        f"  {a.why}",
        pairs(
            {
                "guarantee": f"epsilon {up(q.epsilon)} at delta {up_delta(q.delta)} for {whose}",
                "score": a.score,
                "hours": hours,
            }
        ),
        "Commands (STORE: from `dpvision data import`)",
        *(f"  {command}" for command in a.commands),
        *([_draws_table(a.draws)] if a.draws else []),
        "Evidence",
        *(f"  {line}" for line in a.evidence),
        "What would change it",
        pairs(a.more),
        *(f"Note: {warning}." for warning in a.warnings),
        "Rules and their limits: docs/plan.md.",
    ]
    return "\n".join(lines)


def _draws_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of ``planner.compare_draws`` as text."""
    columns = ("drawn", "images a step", "noise multiplier", "noise / batch")
    return table(
        "at this epsilon for a person, and as many steps",
        columns,
        [tuple(row.values()) for row in rows],
    )


def _cost_text(cost: "Cost", allowed_hours: float | None) -> str:
    """Return the prediction as text, with a note where memory or hours do not suffice.

    Args:
        allowed_hours: hours that may be used, if they were declared.
    """
    from dpvision.plan.device_table import DEVICES

    memory = DEVICES[cost.device].memory_bytes
    parts = (
        ("compute", cost.compute_s),
        ("loading", cost.load_s),
        ("all-reduce", cost.all_reduce_s),
        ("noise", cost.noise_s),
    )
    shown = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts if seconds > 0)
    cores = max(1, cost.records_per_s * DEVICES["cpu"].record_s)
    lines = [
        f"cost on {cost.gpus} x {cost.device} ({cost.how})",
        pairs(
            {
                "hours": cost.hours,
                "a step": f"{cost.step_s:.3g} s: {shown}",
                "memory of a rank": f"{cost.memory_gb:.3g} GB, "
                f"{cost.physical_batch_size} images at once",
                "images to load": f"{cost.records_per_s:,.0f} a second and device, "
                f"{cores:,.0f} cores at the measured speed for 32 px",
            }
        ),
    ]
    if memory is not None and cost.memory_gb * 1e9 > memory:
        lines.append(
            f"Note: {memory / 1e9:.0f} GB do not hold that. Lower "
            "--hardware.physical-batch-size, which changes no result."
        )
    if allowed_hours is not None and cost.hours > allowed_hours:
        lines.append(
            f"Note: {cost.hours:.3g} hours are needed and {allowed_hours:g} are there. Use more "
            "devices or fewer steps."
        )
    return "\n".join(lines)


def _simulation(
    recipe: str | None, full: PrivacyConfig, factor: float, typed: dict[str, Any]
) -> tuple[PrivacyConfig, dict[str, Any], str]:
    """Return the simulation's settings, what follows from them ready for JSON, and the text.

    Args:
        typed: privacy settings of the command line, for the command to paste.

    Raises:
        ConfigError: as ``simulated``.
    """
    from dpvision.privacy.plan import draft_plan
    from dpvision.privacy.planner import NO_GUARANTEE, images_per_step, simulated, what_if

    small, plan = simulated(full, factor), draft_plan(full)
    found = what_if(small)
    found["simulates"] = {
        "factor": factor,
        "expected_batch_size": plan.expected_batch_size,
        "noise_multiplier": plan.noise.multiplier,
        "steps": plan.steps,
        "epsilon": plan.stated_epsilon,
        "delta": plan.delta,
    }
    assert plan.stated_epsilon is not None, "a private plan has an epsilon"
    text = [
        f"{NO_GUARANTEE} of a run at epsilon {up(plan.stated_epsilon)}, delta "
        f"{up_delta(plan.delta)}",
        pairs(
            {
                "expected batch size": f"{shown(small.expected_batch_size)} in place of "
                f"{shown(plan.expected_batch_size)}",
                "noise multiplier": f"{shown(small.noise_multiplier)} in place of "
                f"{shown(plan.noise.multiplier)}",
                "noise / batch, in both": plan.noise.multiplier / plan.expected_batch_size,
                "steps, in both": plan.steps,
                "sample-gradients": f"{shown(found['sample_gradients'])} in place of "
                f"{shown(plan.steps * images_per_step(plan))}",
            }
        ),
        "It predicts the full run's losses; learning rate and schedule stay as they are. On a "
        "private store its weights, losses and",
        "scores are confidential, and choosing settings by them is a selection that no "
        "guarantee covers.",
    ]
    if recipe is not None:
        settings = "".join(
            f" --privacy.{name.replace('_', '-')} {value}" for name, value in typed.items()
        )
        text.append(f"  dpvision train {recipe} --simulate {factor:g} --data STORE{settings}")
    return small, found, "\n".join(text)


def _write_tables(
    args: PlanArgs, config: PrivacyConfig, facts: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Write the page and the tables, and return the tables ready for JSON, and what was written.

    Args:
        facts: from ``planner.what_if``.

    Raises:
        ConfigError: the plan has no guarantee, or no tables.
        CheckpointError: a file cannot be written.
    """
    from dpvision.plan.tables import all_tables
    from dpvision.privacy.plan import draft_plan

    plan, written = draft_plan(config), []
    with Console(stderr=True).status("computing tables"):
        tables = all_tables(plan)
    if args.csv is not None:
        args.csv.mkdir(parents=True, exist_ok=True)
        for table in tables.values():
            write_file(args.csv / f"{table.name}.csv", table.to_csv())
        written.append(f"{len(tables)} tables in {args.csv}")
    if args.page is not None:
        from dpvision.report.plan_page import make_plan_page

        written.append(str(make_plan_page(args.page, args.recipe, plan, facts, tables)))
    shown = {
        table.name: {"columns": table.columns, "rows": table.rows} for table in tables.values()
    }
    return shown, f"Written: {', '.join(written)}"
