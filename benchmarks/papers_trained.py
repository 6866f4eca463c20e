"""The rows of ViP and DP-Cap on procedural scenes of 32 px: private runs of the micro recipes
beside their controls, tested on public scenes of other numbers.

Runs are those of `dpvision train`, kept in the work folder and resumed. ViP's (``autoencoders``)
take 200,000 sample-gradients at epsilon 8 from a warm start of 100,000 on textures; DP-Cap's
(``captioners``) take their recipes' own steps. Scores: ridge probes of six attributes on the frozen
encoder, 4,000 scenes to fit and 2,000 to test, in percent. ViP's networks also have the masked
loss. Captioners also have zero-shot classification of single objects by colour and shape, the true
sentence against one with a swap (chance 50), CIDEr-D of greedy captions, and how many of the named
objects are there.
"""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Work, row
from PIL import Image
from run_folders import trained

from dpvision.checkpoint import load_checkpoint
from dpvision.config import DataConfig
from dpvision.config.resolve import resolve
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.sources import Sample, Source
from dpvision.data.store import Store
from dpvision.data.transform import normalise
from dpvision.encoders.pooled import PooledNetwork, pooled_network
from dpvision.encoders.trained import load_model
from dpvision.eval.captions.choice import answer_choices, choice_scores
from dpvision.eval.captions.cider import cider_d
from dpvision.eval.captions.label_sets import load_label_set
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.eval.captions.scene_choices import scene_compositional
from dpvision.eval.captions.settings import Asking
from dpvision.eval.captions.zero_shot import ZeroShotSettings, zero_shot_scores
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.models import make_model
from dpvision.models.generate import GenerateSettings, generate
from dpvision.models.mae import MAE, losses
from dpvision.recipes import RECIPES
from dpvision.runs.folder import run_base
from dpvision.synthetic.scenes import ATTRIBUTES, Scene, make_scene

SIZE_PX, NUM_FIT, NUM_TEST = 32, 4_000, 2_000
FIRST_FIT, FIRST_TEST = 10_000_000, 20_000_000
GRADIENTS, STEPS, WARM_GRADIENTS, WARM_BATCH = 200_000, 200, 100_000, 64
COLOURS, SHAPES = ATTRIBUTES["colour"], ATTRIBUTES["shape"]
Rows = list[dict[str, Any]]


def dpvision(*words: str) -> None:
    """Run a command of the product."""
    subprocess.run(
        [sys.executable, "-m", "dpvision", *words], check=True, stdout=subprocess.DEVNULL
    )


def scenes_store(work: Work, num: int) -> Path:
    """Return the private store of the first scenes, made unless it is there."""
    store = work.folder / f"scenes-{num}"
    if not store.exists():
        dpvision("data", "scenes", str(store), "--num", str(num), "--size-px", str(SIZE_PX))
    return store


def options(values: dict[str, Any]) -> list[str]:
    """Return settings by dotted name as words of a command line."""
    return [
        word
        for name, value in values.items()
        for word in (f"--{name.replace('_', '-')}", *map(str, np.atleast_1d(value)))
    ]


def budget(gradients: int, steps: int) -> dict[str, Any]:
    """Return the settings of so many sample-gradients in so many steps."""
    return {
        "privacy.expected_batch_size": round(gradients / steps),
        "privacy.steps": steps,
        "optim.warmup_steps": max(1, steps // 10),
    }


# What is measured


def scenes(first: int, num: int) -> list[Scene]:
    return [make_scene(i, SIZE_PX) for i in range(first, first + num)]


def pixels(made: list[Scene]) -> torch.Tensor:
    """Return normalised images, float32 (N, 3, S, S)."""
    x = np.empty((len(made), 3, SIZE_PX, SIZE_PX), dtype=np.float32)
    normalise(np.stack([scene.image for scene in made]), DataConfig().mean, DataConfig().std, x)
    return torch.from_numpy(x)


def attribute_probes(encoder: PooledNetwork) -> dict[str, float]:
    """Return the accuracy in percent of every attribute, and their mean, by pooling."""
    fit, test = scenes(FIRST_FIT, NUM_FIT), scenes(FIRST_TEST, NUM_TEST)
    with torch.inference_mode():
        fit_of, test_of = (
            [encoder.poolings(part) for part in pixels(made).split(500)] for made in (fit, test)
        )
    found = {}
    for pooling in fit_of[0]:
        fit_ND, test_MD = (
            torch.cat([part[pooling] for part in parts]).numpy() for parts in (fit_of, test_of)
        )
        for name in ATTRIBUTES:
            fit_N, test_M = (
                np.array([scene.attributes[name] for scene in made]) for made in (fit, test)
            )
            right = fit_ridge(fit_ND, fit_N).predict(test_MD) == test_M
            found[f"{name}, {pooling}"] = 100 * float(right.mean())
        values = [found[f"{name}, {pooling}"] for name in ATTRIBUTES]
        found[f"mean of attributes, {pooling}"] = float(np.mean(values))
    return found


def masked_loss(model: MAE) -> float:
    """Return the mean reconstruction loss of public scenes, under the same masks for every
    network.
    """
    order_NL = torch.randint(
        2**62, (NUM_TEST, model.num_patches), generator=torch.Generator().manual_seed(0)
    )
    parts = zip(pixels(scenes(FIRST_TEST, NUM_TEST)).split(250), order_NL.split(250), strict=True)
    with torch.inference_mode():
        return float(torch.cat([losses(model, x, order) for x, order in parts]).mean())


# ViP


@dataclass(frozen=True)
class Arm:
    """A private run of vip.micro."""

    network: tuple[tuple[str, Any], ...] = ()
    """Settings of the run and of its warm start."""
    own: tuple[tuple[str, Any], ...] = ()
    """Settings of the run alone."""
    records: int = 200_000
    warm: bool = True


def _encoder(depth: int, width: int, heads: int) -> tuple[tuple[str, Any], ...]:
    names = ("depth", "width", "num_heads")
    return tuple(
        (f"model.encoder.{n}", v) for n, v in zip(names, (depth, width, heads), strict=True)
    )


SIZES = {"2x64": _encoder(2, 64, 2), "4x128": _encoder(4, 128, 4)}
VIP_SIZES = {
    f"{size}, {start}": Arm(network, warm=start == "warm")
    for size, network in SIZES.items()
    for start in ("random", "warm")
}
VIP_RECORDS = {f"{num} records": Arm(records=num) for num in (10_000, 100_000, 1_000_000)}
VIP_BATCHES = {
    f"batch {batch}": Arm(own=tuple(budget(GRADIENTS, GRADIENTS // batch).items()))
    for batch in (125, 500, 2_000)
}
VIP_MASKING = {
    "default": Arm(),
    **{f"mask {ratio}": Arm((("model.mask_ratio", ratio),)) for ratio in (0.25, 0.5)},
    **{f"decoder {depth}": Arm((("model.decoder_depth", depth),)) for depth in (2, 4)},
}


def autoencoders(work: Work, arms: dict[str, Arm]) -> Rows:
    """Masked loss, probes and parameters of private runs, and of what they start from."""
    units = {"masked loss": "mean_square", "parameters": "count"}
    rows = []
    for name, arm in arms.items():
        for case, is_run in ((f"{name}, no training", False), (name, True)):
            found = work.kept(f"vip/{case}", partial(_autoencoder, work, arm, is_run))
            rows += [row(case, what, units.get(what, "percent"), [v]) for what, v in found.items()]
    return rows


def _autoencoder(work: Work, arm: Arm, is_run: bool) -> dict[str, float]:
    config = RECIPES["vip.micro"]()
    if is_run or arm.warm:
        model, _ = load_model(load_checkpoint(vip_run(work, arm, is_run)))
    else:
        model = make_model(resolve(config, dict(arm.network)).model, config.seed)
    assert isinstance(model, MAE)
    return {
        "masked loss": masked_loss(model),
        **attribute_probes(pooled_network(model.encoder).eval()),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def vip_run(work: Work, arm: Arm, is_run: bool) -> Path:
    """Return the run, or with ``is_run`` false its warm start; trained unless complete."""
    common = {"hardware.workers": 1, "hardware.physical_batch_size": 125, **dict(arm.network)}
    place = "-".join(str(value) for _, value in arm.network) or "micro"
    start = "None"
    if arm.warm:
        warm = options(common | budget(WARM_GRADIENTS, WARM_GRADIENTS // WARM_BATCH))
        start = str(trained(work.folder / f"vip-warm-{place}", ["synthetic.vip_micro", *warm]))
        if not is_run:
            return Path(start)
    asked = common | budget(GRADIENTS, STEPS) | dict(arm.own)
    asked |= {"privacy.dataset_size": arm.records}
    place = "-".join(str(value) for value in (*dict(arm.own).values(), arm.records, place))
    recipe = "vip.micro" if arm.warm else "vip.micro_random_start"
    line = [recipe, "--data", str(scenes_store(work, arm.records)), "--init-from", start]
    return trained(work.folder / f"{recipe}-{place}", [*line, *options(asked)])


# DP-Cap

RECORDS = 1_000_000


def tokenizer(work: Work) -> Path:
    """Return the tokenizer of the scenes' sentences, made unless it is there."""
    words = work.folder / "words.json"
    if not words.exists():
        dpvision("data", "tokenizer", str(words), "--scenes", "20000", "--vocab-size", "440")
    return words


def captioner_line(arm: str, work: Work, changed: dict[str, Any]) -> list[str]:
    """Return the words of `dpvision train` for an arm."""
    if arm == "warm":
        return ["synthetic.dpcap_micro", "--hardware.workers", "1"]
    kind, _, epsilon = arm.partition("_eps")
    recipes = {
        "private": "dpcap.micro",
        "random_start": "dpcap.micro_random_start",
        "vip": "dpcap.micro_vip",
    }
    recipe = recipes.get(kind, "dpcap.micro_vip")
    asked: dict[str, Any] = {"hardware.workers": 1, "privacy.dataset_size": RECORDS, **changed}
    data = scenes_store(work, RECORDS)
    if epsilon:
        asked["privacy.target_epsilon"] = epsilon
    elif kind == "non_private":
        recipe = "dpcap.micro_non_private"
    else:
        asked |= without_privacy()
    if kind == "vip_textures":
        data = work.folder / "textures"
        if not data.exists():
            dpvision("synth", str(data), "--num", "200000", "--size-px", "40", "--files")
        asked["privacy.dataset_size"] = open_store(data).num_records
    if kind != "random_start":
        asked["init_from"] = captioner_run("warm", work, {})
    if "vip" not in recipe:
        asked["data.tokenizer"] = tokenizer(work)
    return [recipe, "--data", str(data), *options(asked)]


def without_privacy() -> dict[str, Any]:
    """Return settings of dpcap.micro_vip: dpcap.micro_non_private's optimizer, for as many
    sample-gradients as the private arm takes.
    """
    private, plain = RECIPES["dpcap.micro_vip"]().privacy, RECIPES["dpcap.micro_non_private"]()
    batch = int(plain.privacy.expected_batch_size)
    steps = private.steps * int(private.expected_batch_size) // batch
    return {
        "privacy.guarantee": "none",
        "privacy.target_epsilon": None,
        "privacy.max_grad_norm": None,
        **budget(batch * steps, steps),
        "optim.learning_rate": plain.optim.learning_rate,
        "optim.weight_decay": plain.optim.weight_decay,
    }


def captioner_run(arm: str, work: Work, changed: dict[str, Any]) -> Path:
    """Return the run of an arm, trained unless complete."""
    name = "-".join(["cap", arm, *map(str, changed.values())])
    return trained(work.folder / name, captioner_line(arm, work, changed))


def captioners(work: Work, arms: Iterable[str], **changed: Any) -> Rows:
    """Every score of the arms."""
    rows = []
    for arm in arms:
        name = "-".join([arm, *map(str, changed.values())])
        found = work.kept(f"cap/{name}", partial(_captioner, work, arm, changed))
        rows += [row(arm, what, "percent", [value]) for what, value in found.items()]
    return rows


def _captioner(work: Work, arm: str, changed: dict[str, Any]) -> dict[str, float]:
    if arm == "random":
        config = RECIPES["dpcap.micro"]()
        return attribute_probes(
            pooled_network(make_model(config.model, config.seed).encoder).eval()
        )
    run = captioner_run(arm, work, changed)
    model, config = load_model(load_checkpoint(run))
    found = attribute_probes(pooled_network(model.encoder).eval())
    if config.model.kind == "captioner":
        found |= _words(open_captioner(run), work)
    return found


def _words(ready: OpenCaptioner, work: Work) -> dict[str, float]:
    """Everything that needs words, in percent."""
    found = {}
    how, store = Asking(workers=1), _single_objects(work)
    labels = load_label_set("store", store)
    for score in zero_shot_scores([ready], store, labels, ZeroShotSettings(prompt="a"), how):
        found[f"{score.protocol} (chance {100 * score.chance:.1f})"] = 100 * score.value
    test = scene_compositional(range(FIRST_TEST, FIRST_TEST + NUM_TEST), SIZE_PX)
    for score in choice_scores(test, answer_choices(ready, test, how), ready.name, "public"):
        found[score.protocol] = 100 * score.value
    return found | _said(ready)


def _single_objects(work: Work) -> Store:
    """Return the public store of scenes of one object, labelled with colour and shape."""
    folder = work.folder / f"single-{NUM_TEST}"
    if folder.exists():
        return open_store(folder)
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    single = (s for s in scenes(FIRST_TEST, 8 * NUM_TEST) if len(s.objects) == 1)
    samples = []
    for scene, n in zip(single, range(NUM_TEST), strict=False):
        file = io.BytesIO()
        Image.fromarray(scene.image).save(file, "PNG")
        label = pairs.index((scene.main.colour, scene.main.shape))
        samples.append(Sample(f"single-{n}", file.getvalue(), {"label": label}))
    names = [f"{colour} {shape}" for colour, shape in pairs]
    return import_samples(Source(iter(samples), names), folder, public=True)


def _said(ready: OpenCaptioner) -> dict[str, float]:
    """Greedy captions of scenes against their own, and against what is in the image."""
    test, captions = scenes(FIRST_TEST, NUM_TEST), []
    with torch.inference_mode():
        for part in pixels(test).split(250):
            made = generate(ready.model, ready.model.encode(part), GenerateSettings())
            captions += [ready.tokenizer.decode(one[0].ids) for one in made]
    named = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})")
    told = [set(named.findall(caption)) for caption in captions]
    there = [{(thing.colour, thing.shape) for thing in scene.objects} for scene in test]
    right = sum(len(one & other) for one, other in zip(told, there, strict=True))
    return {
        "CIDEr-D, greedy": float(100 * cider_d(captions, [[s.caption] for s in test]).mean()),
        "named coloured shapes that are there": 100 * right / max(1, sum(map(len, told))),
        "coloured shapes there that are named": 100 * right / sum(map(len, there)),
    }


BATCHES = (250, 500, 1_000)
NOISE_OF_BATCH, BATCH_STEPS = 1.34e-4, 60
"""Noise multiplier over batch of the simulated runs: that of 4,000 of 300,000 at epsilon 8."""


def batch_sizes(work: Work) -> Rows:
    """DP-Cap's Figure 3a: loss curves of simulated runs at one noise over batch, smoothed over a
    tenth of the steps; "apart" is the largest distance from the largest batch's after that.
    """
    curves, skipped = {}, BATCH_STEPS // 10
    for batch in BATCHES:
        asked = budget(batch * BATCH_STEPS, BATCH_STEPS) | {
            "privacy.guarantee": "simulated",
            "privacy.target_epsilon": None,
            "privacy.noise_multiplier": NOISE_OF_BATCH * batch,
        }
        base = run_base(captioner_run("private", work, asked))
        assert base is not None
        lines = next(base.rglob("metrics.jsonl")).read_text().splitlines()
        loss = np.array([json.loads(line)["loss"] for line in lines])
        curves[batch] = np.convolve(loss, np.ones(skipped) / skipped, mode="valid")
    largest = curves[BATCHES[-1]]
    return [
        row(f"batch {batch}", "dpcap.micro", name, [value])
        for batch, curve in curves.items()
        for name, value in (
            ("last_loss", float(curve[-1])),
            ("fallen", float(curve[0] - curve[-1])),
            ("apart", float(np.abs(curve - largest)[skipped:].max())),
        )
    ]


MINIATURES: dict[str, Callable[[Work], Rows]] = {
    "vip_sizes": partial(autoencoders, arms=VIP_SIZES),
    "vip_records": partial(autoencoders, arms=VIP_RECORDS),
    "vip_batches": partial(autoencoders, arms=VIP_BATCHES),
    "vip_masking": partial(autoencoders, arms=VIP_MASKING),
    "lab_long": partial(captioners, arms=("private_eps8",)),
    "lab_eps1": partial(captioners, arms=("private_eps1",)),
    "lab_eps2": partial(captioners, arms=("private_eps2",)),
    "lab_mae": partial(captioners, arms=("warm", "vip_textures", "vip_eps8", "vip_non_private")),
    "lab_random": partial(captioners, arms=("random_start_eps8",)),
    "batch_sizes": batch_sizes,
}
