"""Deja-vu memorisation of captioners and of the encoders of captioners, classifiers and masked
autoencoders, without privacy and at epsilon 8 and 1, on procedural scenes.

    python benchmarks/memorisation.py --work DIR [--quick] [--models NAMES] [--json FILE]
    python benchmarks/memorisation.py --page FILE [FILE ...]

The first form makes two disjoint halves of scenes and trains each model on each half, from a public
warm start (runs that are in DIR are gone on with; half an hour of a core, --quick: three minutes).
Rows say how often the models name the colour of the largest object where it is hidden: "own" is the
model that was trained on the image, "other" the one that was not, "memorisation" their difference
(low, value, high), "limit" the most that the plan allows. A row's case is a model and a test, its
variant epsilon. The second form writes the table of docs/audits.md and the figure from results.

The scenes are public, so that their scores may be shown. Runs with a guarantee draw, clip and
charge as on a private store.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, Work, row, write_result
from matplotlib.figure import Figure
from run_folders import trained
from torch import Tensor

from dpvision.audit.memorisation import (
    Guesses,
    Half,
    candidate_guesses,
    memorisation,
    neighbour_guesses,
)
from dpvision.config import PAD_ID, DataConfig
from dpvision.config.resolve import resolve
from dpvision.data.transform import normalise_tensor, resized
from dpvision.encoders.trained import run_encoder
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.eval.captions.scene_choices import _with_articles
from dpvision.privacy.accountant import attack_tpr
from dpvision.privacy.plan import make_plan
from dpvision.recipes import get_recipe
from dpvision.synthetic.scene_layout import COLOURS
from dpvision.synthetic.scenes import Scene, make_scene

PAGE, FIGURE = ROOT / "docs" / "audits.md", ROOT / "docs" / "images" / "memorisation.png"
BEGIN = "<!-- memorisation: written by benchmarks/memorisation.py -->"
END = "<!-- end of memorisation -->"
PACKAGES = ("torch", "numpy", "scipy", "dp-accounting")
SIDE, HALF = 32, 500
START, PUBLIC = range(2_000_000, 2_005_000), range(1_000_000, 1_003_000)
"""Scenes of the public warm start, and those among which an encoder's neighbours are."""
TOPS = (1.0, 0.2)
EPSILONS = ("none", "8", "1")
MODELS = {
    "captioner": "dpcap.micro",
    "classifier": "vip.micro_finetune",
    "autoencoder": "vip.micro",
}
OF_MODEL = {
    "captioner": "--data.tokenizer stores/words.json",
    "classifier": "--model.encoder.patch-size 8 --model.encoder.width 64 "
    "--model.encoder.no-qkv-bias --model.encoder.no-train-cls",
    "autoencoder": "--model.encoder.patch-size 8 --model.encoder.width 64 "
    "--model.encoder.no-qkv-bias --model.encoder.no-train-cls",
}
"""All have the encoder of dpcap.micro."""
CROPS = "--data.crop-scale 0.2 1.0"  # the papers'
NON_PRIVATE = (
    "--privacy.guarantee none --privacy.target-epsilon None --privacy.max-grad-norm None "
    "--optim.schedule linear --optim.learning-rate 2e-3 "
    "--optim.weight-decay 0 --optim.warmup-steps 20"
)
STEPS = {"captioner": 300, "classifier": 400, "autoencoder": 1200}
PRIVATE = {"privacy.expected_batch_size": 250, "privacy.steps": 25, "optim.warmup_steps": 2}
WARM = (
    "--data.tokenizer stores/words.json --init-from None --privacy.expected-batch-size 100 "
    "--optim.schedule linear --optim.learning-rate 2e-3 --optim.warmup-steps 50 --privacy.steps "
)
LEAST_CORNER = 13
"""Side in px of the smallest corner crop, 0.4 of the image's: training has no smaller crops."""


@dataclass(frozen=True)
class Hidden:
    """A scene, and what is left of its image without the largest object; uint8 (SIDE, SIDE, 3)."""

    scene: Scene
    image: np.ndarray
    """The whole image, but for the box of the object, which has the mean colour. The object's
    shadow, which has no colour, may be outside.
    """
    corner: np.ndarray | None
    """The largest square in a corner that is free of the box, resized; None if it is small."""


def mean_colour() -> np.ndarray:
    return np.round(255 * np.array(DataConfig().mean)).astype(np.uint8)


def hidden(number: int) -> Hidden:
    scene = make_scene(number, SIDE)
    main = scene.main
    reach = 1.12 * main.radius + 1 / SIDE  # of the renderer, and a pixel
    left, top = (max(0, int((v - reach) * SIDE)) for v in (main.x, main.y))
    right, bottom = (min(SIDE, int((v + reach) * SIDE) + 1) for v in (main.x, main.y))
    image = scene.image.copy()
    image[top:bottom, left:right] = mean_colour()
    gaps = {"left": left, "top": top, "right": SIDE - right, "bottom": SIDE - bottom}
    where = max(gaps, key=lambda name: gaps[name])
    s = gaps[where]
    x, y = (SIDE - s if where == "right" else 0), (SIDE - s if where == "bottom" else 0)
    corner = resized(scene.image, (x, y, x + s, y + s), SIDE) if s >= LEAST_CORNER else None
    return Hidden(scene, image, corner)


def colours(scenes: list[Hidden]) -> np.ndarray:
    return np.array([h.scene.attributes["colour"] for h in scenes])


def tensor(images: list[np.ndarray]) -> Tensor:
    pixels_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return normalise_tensor(pixels_BCHW, DataConfig().mean, DataConfig().std)


Test = tuple[Callable[[Hidden], bool], Callable[[Path, list[Hidden]], Guesses]]
"""Which scenes it is of; and what the model of a run says of them."""


def encoder_tests(public: list[Hidden]) -> dict[str, Test]:
    """The label of the nearest public images."""

    @torch.inference_mode()
    def features(run: Path, images: list[Any]) -> np.ndarray:
        encoder = run_encoder(run)
        return torch.cat([encoder(x) for x in tensor(images).split(500)]).numpy()

    @cache
    def known(run: Path) -> np.ndarray:
        return features(run, [h.scene.image for h in public])

    def near(run: Path, images: list[Any]) -> Guesses:
        return neighbour_guesses(features(run, images), known(run), colours(public))

    return {
        "corner crop": (
            lambda h: h.corner is not None,
            lambda run, scenes: near(run, [h.corner for h in scenes]),
        ),
        "object hidden": (
            lambda h: True,
            lambda run, scenes: near(run, [h.image for h in scenes]),
        ),
        "whole image": (
            lambda h: True,
            lambda run, scenes: near(run, [h.scene.image for h in scenes]),
        ),
    }


def captioner_tests(any_run: Path) -> dict[str, Test]:
    """The colour with which a captioner finds the scene's caption the most likely."""
    words = open_captioner(any_run)
    blank = np.broadcast_to(mean_colour(), (SIDE, SIDE, 3))

    def fits(h: Hidden) -> bool:
        return len(words.words(h.scene.caption)) + words.special <= words.num_tokens

    def likeliest(run: Path, scenes: list[Hidden], images: list[np.ndarray]) -> Guesses:
        captioner = open_captioner(run)
        token_NCL = torch.from_numpy(np.stack([candidates(captioner, h.scene) for h in scenes]))
        loss_NC = captioner.losses(captioner.look(tensor(images)), token_NCL)
        count_NC = (token_NCL != PAD_ID).sum(-1) - 1  # tokens that are predicted
        return candidate_guesses((-loss_NC * count_NC.clamp(min=1)).double().numpy())

    return {
        "object hidden": (fits, lambda run, s: likeliest(run, s, [h.image for h in s])),
        "caption alone": (fits, lambda run, s: likeliest(run, s, [blank for _ in s])),
        "whole image": (fits, lambda run, s: likeliest(run, s, [h.scene.image for h in s])),
    }


def candidates(captioner: OpenCaptioner, scene: Scene) -> np.ndarray:
    """Return the tokens of a scene's caption with each colour for the largest object, int64 (C, L);
    padding where another object of its shape has the colour, since a caption names objects by both.
    """
    main, rows = scene.main, []
    others = {(obj.colour, obj.shape) for obj in scene.objects if obj is not main}
    for colour in COLOURS:
        named = re.sub(rf"\b{main.colour} {main.shape}\b", f"{colour} {main.shape}", scene.caption)
        made = captioner.encode(_with_articles(named))
        rows.append(np.full_like(made, PAD_ID) if (colour, main.shape) in others else made)
    return np.stack(rows)


def run_of(work: Path, model: str, epsilon: str, half: str, num: int, quick: bool) -> Path:
    """Return the complete run of a model on a half, from the warm start."""
    if epsilon == "none":
        steps, batch = 30 if quick else STEPS[model], min(100, num)
        asked = f"{NON_PRIVATE} --privacy.steps {steps} --privacy.expected-batch-size {batch}"
    else:
        asked = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in private(epsilon, num).items())
    asked = f"{OF_MODEL[model]} {asked} --init-from runs/start"
    return train(work, f"{model}-{epsilon}-{half}", MODELS[model], half, num, asked)


def private(epsilon: str, num: int) -> dict[str, Any]:
    batch = min(num, PRIVATE["privacy.expected_batch_size"])
    made = {**PRIVATE, "privacy.target_epsilon": float(epsilon), "privacy.dataset_size": num}
    return {**made, "privacy.expected_batch_size": batch}


def warm_start(work: Path, num: int, quick: bool) -> Path:
    asked = f"{WARM} {60 if quick else 500}"
    return train(work, "start", "dpcap.micro_non_private", "start", num, asked)


def train(work: Path, name: str, recipe: str, store: str, num: int, asked: str) -> Path:
    line = [recipe, "--data", f"stores/{store}", *CROPS.split(), *asked.split()]
    return trained(work / "runs" / name, [*line, "--privacy.dataset-size", str(num)], cwd=work)


def make_stores(work: Path, numbers: dict[str, range]) -> None:
    """Make the stores that are not there, and the tokenizer."""

    def data(made: Path, *asked: str) -> None:
        if not made.exists():
            subprocess.run([sys.executable, "-m", "dpvision", "data", *asked], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip

    for name, of in numbers.items():
        store = work / "stores" / name
        data(store, "scenes", str(store), "--num", str(len(of)), "--first", str(of.start),
             "--size-px", str(SIDE), "--label", "colour", "--public")  # fmt: skip
    words = work / "stores" / "words.json"
    data(words, "tokenizer", str(words), "--scenes", "20000", "--vocab-size", "440")


def rows_of(
    case: str,
    epsilon: str,
    test: Test,
    runs: dict[str, Path],
    halves: dict[str, list[Hidden]],
    limit: Callable[[float], float],
) -> list[dict[str, Any]]:
    """Return the figures of a test as rows."""
    of, guesses = test
    made, rows = [], []
    for (half, scenes), other in zip(halves.items(), reversed(halves), strict=True):
        kept = [h for h in scenes if of(h)]
        made.append(Half(guesses(runs[half], kept), guesses(runs[other], kept), colours(kept)))
    for top in TOPS:
        found = memorisation(made, top=top)
        name = case if top == 1 else f"{case}, top {top:.0%}"
        rows += [
            row(name, epsilon, "memorisation", [found.low, found.value, found.high]),
            row(name, epsilon, "own", [found.own]),
            row(name, epsilon, "other", [found.other]),
            row(name, epsilon, "images", [float(found.n)]),
        ]
        if top == 1:
            rows.append(row(name, epsilon, "limit", [limit(found.other)]))
    return rows


def limit_of(model: str, epsilon: str, num: int) -> Callable[[float], float]:
    """Return the most memorisation that the plan allows, by the other model's accuracy.

    A model that is right at this rate without the image is right with it at most at the
    true-positive rate of the best attack with this false-positive rate: on average over trainings,
    and as if the halves were one data set with the image and without it.
    """
    if epsilon == "none":
        return lambda other: 1 - other
    plan = make_plan(resolve(get_recipe(MODELS[model]), private(epsilon, num)).privacy)
    event = plan.event(plan.steps)
    return lambda other: attack_tpr(event, other) - other


def measured(work: Path, models: list[str], quick: bool) -> list[dict[str, Any]]:
    """Return all rows; those of a model at an epsilon are kept in the work folder."""
    num = 60 if quick else HALF
    of = {"a": range(num), "b": range(num, 2 * num)}
    start = range(START.start, START.start + 200) if quick else START
    make_stores(work, {**of, "start": start})
    warm_start(work, len(start), quick)
    halves = {half: [hidden(i) for i in numbers] for half, numbers in of.items()}
    public = [hidden(i) for i in PUBLIC[: 200 if quick else None]]

    def of_models(model: str, epsilon: str) -> list[dict[str, Any]]:
        runs = {half: run_of(work, model, epsilon, half, num, quick) for half in halves}
        tests = {f"{model}, encoder": encoder_tests(public)}
        if model == "captioner":
            tests["captioner"] = captioner_tests(runs["a"])
        limit = limit_of(model, epsilon, num)
        return [
            made
            for what, named in tests.items()
            for name, test in named.items()
            for made in rows_of(f"{what}: {name}", epsilon, test, runs, halves, limit)
        ]

    kept = Work(work, work).kept
    return [
        made
        for model in models
        for epsilon in EPSILONS
        for made in kept(f"{model}-{epsilon}", partial(of_models, model, epsilon))
    ]


SHOWN = {
    "captioner: object hidden": "captioner\nobject hidden, caption's colour",
    "classifier, encoder: object hidden": "classifier's encoder\nobject hidden, nearest images",
    "classifier, encoder: corner crop": "classifier's encoder\ncorner crop, nearest images",
    "autoencoder, encoder: object hidden": "autoencoder's encoder\nobject hidden, nearest images",
}
"""Panels of the figure."""


Found = dict[str, dict[str, dict[str, dict[str, Any]]]]


def found_in(results: list[Path]) -> Found:
    """Return the rows of results by case, epsilon and metric."""
    found: Found = {}
    for r in (r for path in results for r in json.loads(path.read_text())["rows"]):
        found.setdefault(r["case"], {}).setdefault(r["variant"], {})[r["metric"]] = r
    return found


def table(found: Found) -> str:
    lines = ["| test | epsilon | own | other | memorisation | top 20% | images | limit |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case, by_epsilon in found.items():
        if ", top" in case:
            continue
        for epsilon, f in by_epsilon.items():
            top = found[f"{case}, top {TOPS[1]:.0%}"][epsilon]
            gaps = [f"{m['value']:z.2f} ({m['low']:z.2f} to {m['high']:z.2f})"
                    for m in (f["memorisation"], top["memorisation"])]  # fmt: skip
            lines.append(
                f"| {case} | {epsilon} | {f['own']['value']:.2f} | {f['other']['value']:.2f} | "
                f"{gaps[0]} | {gaps[1]} | {f['images']['value']:.0f} | {f['limit']['value']:.2f} |"
            )
    return "\n".join(lines)


def plot(found: Found, out: Path) -> None:
    """Draw memorisation against epsilon with its interval, a panel per test."""
    shown = {case: title for case, title in SHOWN.items() if case in found}
    figure = Figure(figsize=(3.1 * len(shown) + 0.6, 3.3), layout="constrained", dpi=110)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (case, title) in zip(panels, shown.items(), strict=True):
        places = [EPSILONS.index(e) for e in found[case]]
        for shift, top, colour in ((-0.08, 1.0, "#1f5fa8"), (0.08, TOPS[1], "#c2571a")):
            name = case if top == 1 else f"{case}, top {top:.0%}"
            gaps = [f["memorisation"] for f in found[name].values()]
            value, low, high = (np.array([g[k] for g in gaps]) for k in ("value", "low", "high"))
            axes.errorbar([p + shift for p in places], value, [value - low, high - value],
                          fmt="o", color=colour, capsize=3,
                          label="all images" if top == 1 else "most confident 20%")  # fmt: skip
        axes.axhline(0, color="#777777", linewidth=0.8)
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("epsilon")
        axes.set_xticks(range(len(EPSILONS)), ["infinite", *EPSILONS[1:]])
        axes.set_xlim(-0.5, len(EPSILONS) - 0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("memorisation\n(accuracy, own - other)")
    panels[0].legend(frameon=False, fontsize=8.5)
    figure.savefig(out)


def write_page(results: list[Path]) -> None:
    """Write the figure, and the table into docs/audits.md."""
    found = found_in(results)
    plot(found, FIGURE)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, nargs="+")
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
    elif args.work is None:
        parser.error("expected --work DIR, or --page FILE")
    else:
        rows = measured(args.work.resolve(), args.models.split(","), args.quick)
        write_result(args.json, "memorisation", rows, packages=PACKAGES)
        above = above_limit(rows)
        sys.exit(f"Memorisation above the plan's limit: {above}" if above else 0)


def above_limit(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the tests and epsilons whose interval lies above what the plan allows."""
    found = {(r["case"], r["variant"], r["metric"]): r for r in rows}
    return [
        (case, epsilon)
        for (case, epsilon, metric), r in found.items()
        if metric == "limit" and not found[case, epsilon, "memorisation"]["low"] <= r["value"]
    ]


if __name__ == "__main__":
    main()
