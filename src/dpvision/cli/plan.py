"""``dpvision plan``: what can this data set afford?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from dpvision.cli.output import emit, pairs, parse, table
from dpvision.config import PrivacyConfig
from dpvision.config.head_presets import with_steps
from dpvision.config.resolve import resolve_privacy
from dpvision.config.unit import Unit
from dpvision.errors import ConfigError
from dpvision.privacy.printed import count, up, up_delta
from dpvision.recipes import get_recipe


@dataclass(frozen=True)
class PlanArgs:
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

    Args:
        recipe: Name of a recipe to start from.
        dataset_size: N, the declared public number of records.
        expected_batch_size: Mean size of a logical batch; the sample rate is this over N.
        steps: Number of logical steps.
        noise_multiplier: Noise standard deviation over the clip norm.
        target_epsilon: Find the smallest noise that keeps epsilon (PLD) at or below this.
        target_unit_epsilon: The same for a person with all their images; needs --num-units.
        delta: Left out: 1 / (2 N), or 1 / (2 M) where people are declared; at most 0.001.
        sampling: How a logical batch is drawn (left out: poisson).
        max_batch_size: Cap of a truncated Poisson batch.
        max_records_per_unit: Records of one person that take part, at most; above 1 it needs
            --num-units. Where people are drawn, those that take part in a step.
        num_units: M, the declared public number of people: epsilon is then given for the person,
            and delta judged by M.
        sampling_unit: Draw records, with a group bound for a person, or people, whose mean gradient
            is clipped (left out: record).
        num_parameters: Trained parameters, for the signal figures.
        images: Ask for a recommendation: the declared number of images; needs --epsilon.
        people: Of how many people the images are; epsilon is then for a person.
        labels: Number of classes, if the images have labels.
        captions: The images have captions.
        epsilon: The epsilon that may be spent.
        public_encoder: An encoder of public images that is at hand, as `dpvision adapt --encoder`
            takes it.
        gpus: Number of GPUs (left out: none; with --device: 1). With a recipe: predict step time,
            hours and memory.
        device: Their name: A100, H100, H200, V100, L4, ...; or cpu: one core with a recipe, no GPU
            without.
        hours: Hours that may be used; the answer says if they do not suffice.
        simulate: Plan a simulation of these settings with a K-th of the batch and of the noise
            (TAN); it guarantees nothing.
        page: Write a page with sliders and figures to this .html file, in about twenty seconds
            (docs/plan.md).
        csv: Write the tables behind these figures to this folder, a .csv file each.
        claims: Recompute every privacy claim of the papers instead, which takes half a minute
            (docs/claims.md).
        json: Print JSON.
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    dataset_size: int | None = None
    expected_batch_size: float | None = None
    steps: int | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_unit_epsilon: float | None = None
    delta: float | None = None
    sampling: Literal["poisson", "truncated_poisson", "full_batch"] | None = None
    max_batch_size: int | None = None
    max_records_per_unit: int | None = None
    num_units: int | None = None
    sampling_unit: Literal["record", "person"] | None = None
    num_parameters: int | None = None
    images: int | None = None
    people: int | None = None
    labels: int | None = None
    captions: bool = False
    epsilon: float | None = None
    public_encoder: str | None = None
    gpus: int | None = None
    device: str | None = None
    hours: float | None = None
    simulate: Annotated[float | None, tyro.conf.arg(metavar="K")] = None
    page: Path | None = None
    csv: Path | None = None
    claims: bool = False
    json: bool = False


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    plan(parse(PlanArgs, "plan", argv))


def plan(args: PlanArgs) -> None:
    """Print what the settings or the question amount to."""
    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and value is not False
    }
    if args.claims:
        if others := [name for name in given if name not in ("claims", "json")]:
            raise ConfigError(
                f"plan: --claims with {', '.join(others)}; expected it alone, or with --json. "
                "Drop the others."
            )
        _claims(args.json)
        return
    asked = {name: value for name, value in given.items() if name in _QUESTION}
    priced = (
        args.recipe is not None
        and (args.gpus is not None or args.device is not None)
        and asked.keys() <= {"gpus", "device", "hours"}
    )
    if asked and not priced:
        _advise(
            asked, {name: value for name, value in given.items() if name in _SETTINGS}, args.json
        )
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
    settings = {name: value for name, value in given.items() if name in _NAMES}
    config = _config(args.recipe, settings)
    if args.simulate is not None:
        if args.page is not None or args.csv is not None:
            raise ConfigError(
                "plan: --simulate with --page or --csv; expected one of them: a simulation has "
                "no epsilon to plot. Drop one."
            )
        from dpvision.cli.plan_simulation import simulation

        config, result, text = simulation(args.recipe, config, args.simulate, settings)
    else:
        result = what_if(config, num_parameters=num_parameters)
        text = _text(result)
    if priced:
        from dpvision.cli.plan_cost import cost_text
        from dpvision.plan.cost import step_cost

        cost = step_cost(
            replace(get_recipe(args.recipe or ""), privacy=config),
            1 if args.gpus is None else args.gpus,
            args.device,
        )
        result, text = result | {"cost": asdict(cost)}, f"{text}\n{cost_text(cost, args.hours)}"
    if args.page is not None or args.csv is not None:
        from dpvision.cli.plan_tables import write_tables

        tables, said = write_tables(args.page, args.csv, args.recipe, config, result)
        result, text = result | {"tables": tables}, f"{text}\n{said}"
    emit(result, args.json, text)


_QUESTION = (
    "images",
    "people",
    "labels",
    "captions",
    "epsilon",
    "public_encoder",
    "gpus",
    "device",
    "hours",
)


def _advise(asked: dict[str, Any], settings: dict[str, Any], json: bool) -> None:
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
    from dpvision.cli.plan_advice import answer
    from dpvision.plan.advice import Question
    from dpvision.plan.device_table import find_device

    if "device" in asked and find_device(asked["device"]).name != "cpu":
        asked = {"gpus": 1} | asked
    result, text = answer(Question(**asked))
    emit(result, json, text)


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
_NAMES = (
    "dataset_size",
    "expected_batch_size",
    "steps",
    "delta",
    "sampling",
    "max_batch_size",
    "max_records_per_unit",
    "num_units",
    "sampling_unit",
    *_BUDGETS,
)

_SETTINGS = (*_NAMES, "recipe", "num_parameters", "simulate", "page", "csv")


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
        lines.append("signal (a heuristic: docs/privacy.md)")
        lines.append(pairs({name.replace("_", " "): value for name, value in r["signal"].items()}))
    if r["draws"]:
        from dpvision.cli.plan_advice import draws_table

        lines.append(draws_table(r["draws"]))
    if r["advice"]:
        lines.append(r["advice"])
    if r["refused"]:
        lines.append(f"Training with this plan would be refused: {r['refused']}")
    return "\n".join(lines)
