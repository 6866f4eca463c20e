"""The rows of DP-Cap on procedural scenes of 32 px: private captioners of the micro recipes beside
masked autoencoders, warm starts and runs without privacy, tested as in ``papers_trained``.

Arms of the recipe's length take its own steps on a million scenes; the others, which are compared
with one another, 40,000 sample-gradients on 50,000 scenes. Captioners also have the loss of the
test scenes' captions, zero-shot classification of single objects by colour and shape, the true
sentence against one with a swap (chance 50), CIDEr-D of greedy captions, and how many of the named
objects are there.
"""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import Work, row
from papers_trained import (
    FIRST_TEST,
    HARDWARE,
    NUM_TEST,
    RECORDS,
    SIZE_PX,
    TEXTURES,
    WARM,
    Rows,
    Settings,
    attribute_probes,
    budget,
    dpvision,
    options,
    pixels,
    public_scenes,
    scenes,
    scenes_store,
    textures,
    without_privacy,
)
from PIL import Image
from run_folders import trained

from dpvision.checkpoint import load_checkpoint
from dpvision.config.resolve import resolve
from dpvision.data.importer import import_samples
from dpvision.data.open import is_store, open_store
from dpvision.data.sources import Sample, Source
from dpvision.data.store import Store
from dpvision.encoders.pooled import pooled_network
from dpvision.encoders.trained import load_model
from dpvision.eval.captions.choice import answer_choices, choice_scores
from dpvision.eval.captions.cider import cider_d
from dpvision.eval.captions.label_sets import load_label_set
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.eval.captions.scene_choices import scene_compositional
from dpvision.eval.captions.settings import Asking
from dpvision.eval.captions.zero_shot import ZeroShotSettings, zero_shot_scores
from dpvision.models import make_model
from dpvision.models.captioner import caption_losses
from dpvision.models.generate import GenerateSettings, generate
from dpvision.recipes import RECIPES
from dpvision.runs.folder import run_base
from dpvision.synthetic.scenes import ATTRIBUTES

COLOURS, SHAPES = ATTRIBUTES["colour"], ATTRIBUTES["shape"]


def short(batch: int, records: int) -> Settings:
    """Return the settings of 200 steps."""
    return (*budget(200 * batch, 200).items(), ("privacy.dataset_size", records))


SHORT = short(200, RECORDS)
TUNED, FIRST_PUBLIC = 15_000, 50_000_000
"""Sample-gradients of fine-tuning a decoder, and the first of as many public scenes for it."""


@dataclass(frozen=True)
class Arm:
    """A captioner, or a masked autoencoder in its place."""

    own: Settings = SHORT
    """What the run has other than its recipe, and ``width`` is."""
    epsilon: float = 8.0
    train: Literal["private", "plain", "simulated", "none"] = "private"
    """"none": what the private run starts from."""
    warm: bool = True
    captions: bool = True
    textures: bool = False
    """On textures in place of scenes."""
    width: int = 64
    """Of encoder and decoder."""
    tuned: bool = False
    """The decoder alone is then fine-tuned without privacy on the captions of public scenes."""


FULL = Arm(own=())
MAE = replace(FULL, captions=False)
STARTS = {
    "random weights": Arm(warm=False, train="none"),
    "warm start": Arm(train="none"),
    "captioner": Arm(),
    "captioner, random start": Arm(warm=False),
    "captioner, without privacy": Arm(train="plain"),
    "masked autoencoder": Arm(captions=False),
    "masked autoencoder, without privacy": Arm(captions=False, train="plain"),
}
WIDTHS = {f"width {width}": Arm(width=width) for width in (32, 64, 128)}
BATCHES = {f"batch {batch}": Arm(own=short(batch, RECORDS)) for batch in (50, 100, 200)}
SHARES = {
    f"{num} records": Arm(own=short(200 * num // RECORDS, num)) for num in (500, 5_000, RECORDS)
}
"""A part of the records with the same part of the batch, as in the paper."""
DECODERS = {
    f"{case}, decoder tuned": replace(STARTS[case], tuned=True)
    for case in ("captioner", "captioner, without privacy")
}


def tokenizer(work: Work) -> Path:
    """Return the tokenizer of the scenes' sentences, made unless it is there."""
    words = work.folder / "words.json"
    if not words.exists():
        dpvision("data", "tokenizer", str(words), "--scenes", "20000", "--vocab-size", "440")
    return words


def place_of(arm: Arm) -> str:
    """Return the name of an arm's files in the work folder."""
    parts = ["cap" if arm.captions else "mae", "warm" if arm.warm else "random", arm.train]
    parts += [str(arm.width)] + ["textures"] * arm.textures + ["tuned"] * arm.tuned
    if arm.train == "none":
        return "-".join([*parts, "short" if arm.own else "full"])
    return "-".join([*parts, f"{arm.epsilon:g}", *(str(value) for _, value in arm.own)])


def captioner_run(arm: Arm, work: Work) -> Path:
    """Return the run of an arm that has one, trained unless complete."""
    widths = ("model.encoder.width", "model.decoder.width")[: 2 if arm.captions else 1]
    asked: dict[str, Any] = HARDWARE | dict.fromkeys(widths, arm.width)
    place = work.folder / place_of(arm)
    if arm.train == "none":
        given = ["--data", str(textures(work, TEXTURES))] if arm.own else []
        asked |= WARM if arm.own else {}
        return trained(place, ["synthetic.dpcap_micro", *given, *options(asked)])
    recipe = "dpcap.micro" if arm.captions else "dpcap.micro_vip"
    if arm.captions:
        asked["data.tokenizer"] = tokenizer(work)
    if arm.tuned:
        data = public_scenes(work, FIRST_PUBLIC, TUNED)
        asked |= {"privacy.dataset_size": TUNED, "model.train_encoder": False}
        asked |= without_privacy("dpcap", TUNED)
        asked["init_from"] = captioner_run(replace(arm, tuned=False), work)
        return trained(place, [recipe, "--data", str(data), *options(asked)])
    asked |= dict(arm.own)
    privacy = resolve(RECIPES[recipe](), dict(arm.own)).privacy
    data = scenes_store(work, privacy.dataset_size)
    if arm.textures:
        data = textures(work, 200_000)
        asked["privacy.dataset_size"] = open_store(data).num_records
    if arm.train == "private":
        asked["privacy.target_epsilon"] = arm.epsilon
    elif arm.train == "plain":
        assert privacy.steps is not None and privacy.expected_batch_size is not None
        gradients = int(privacy.steps * privacy.expected_batch_size)
        asked |= without_privacy("dpcap", gradients)
    start = replace(arm, train="none", captions=True, textures=False)
    asked["init_from"] = captioner_run(start, work) if arm.warm else None
    return trained(place, [recipe, "--data", str(data), *options(asked)])


def captioners(work: Work, arms: dict[str, Arm]) -> Rows:
    """Every score of the arms."""
    units = {"caption loss": "nats"}
    rows = []
    for case, arm in arms.items():
        found = work.kept(f"cap/{place_of(arm)}", partial(_captioner, work, arm))
        rows += [row(case, what, units.get(what, "percent"), [v]) for what, v in found.items()]
    return rows


def _captioner(work: Work, arm: Arm) -> dict[str, float]:
    if arm.train == "none" and not arm.warm:
        config = resolve(RECIPES["dpcap.micro"](), {"model.encoder.width": arm.width})
        made = make_model(config.model, config.seed)
        return attribute_probes(pooled_network(made.encoder).eval())
    run = captioner_run(arm, work)
    model, config = load_model(load_checkpoint(run))
    found = attribute_probes(pooled_network(model.encoder).eval())
    if config.model.kind == "captioner":
        found |= _words(open_captioner(run), work)
    return found


def _words(ready: OpenCaptioner, work: Work) -> dict[str, float]:
    """Everything that needs words, in percent."""
    found = {"caption loss": _caption_loss(ready)}
    how, store = Asking(workers=1), _single_objects(work)
    labels = load_label_set("store", store)
    for score in zero_shot_scores([ready], store, labels, ZeroShotSettings(prompt="a"), how):
        found[f"{score.protocol} (chance {100 * score.chance:.1f})"] = 100 * score.value
    test = scene_compositional(range(FIRST_TEST, FIRST_TEST + NUM_TEST), SIZE_PX)
    for score in choice_scores(test, answer_choices(ready, test, how), ready.name, "public"):
        found[score.protocol] = 100 * score.value
    return found | _said(ready)


def _caption_loss(ready: OpenCaptioner) -> float:
    """Mean cross-entropy of the test scenes' captions."""
    test, num_tokens = scenes(FIRST_TEST, NUM_TEST), ready.model.cfg.num_tokens
    ids = [ready.tokenizer.encode(scene.caption, num_tokens) for scene in test]
    token_NL = torch.from_numpy(np.stack(ids)).long()
    parts = zip(pixels(test).split(250), token_NL.split(250), strict=True)
    model = ready.model
    with torch.inference_mode():
        found = [caption_losses(model, model.encode(x), token_BL) for x, token_BL in parts]
    return float(torch.cat(found).mean())


def _single_objects(work: Work) -> Store:
    """Return the public store of scenes of one object, labelled with colour and shape."""
    folder = work.folder / f"single-{NUM_TEST}"
    if is_store(folder):
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


SIMULATED = (250, 500, 1_000)
NOISE_OF_BATCH, BATCH_STEPS = 1.34e-4, 60
"""Noise multiplier over batch of the simulated runs: that of 4,000 of 300,000 at epsilon 8."""


def batch_sizes(work: Work) -> Rows:
    """DP-Cap's Figure 3a: loss curves of simulated runs at one noise over batch, smoothed over a
    tenth of the steps; "apart" is the largest distance from the largest batch's after that.
    """
    curves, skipped = {}, BATCH_STEPS // 10
    for batch in SIMULATED:
        asked = budget(batch * BATCH_STEPS, BATCH_STEPS) | {
            "privacy.guarantee": "simulated",
            "privacy.target_epsilon": None,
            "privacy.noise_multiplier": NOISE_OF_BATCH * batch,
        }
        base = run_base(captioner_run(Arm(own=tuple(asked.items()), train="simulated"), work))
        assert base is not None
        lines = next(base.rglob("metrics.jsonl")).read_text().splitlines()
        loss = np.array([json.loads(line)["loss"] for line in lines])
        curves[batch] = np.convolve(loss, np.ones(skipped) / skipped, mode="valid")
    largest = curves[SIMULATED[-1]]
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
    "lab_long": partial(captioners, arms={"private_eps8": FULL}),
    "lab_eps1": partial(captioners, arms={"private_eps1": replace(FULL, epsilon=1.0)}),
    "lab_eps2": partial(captioners, arms={"private_eps2": replace(FULL, epsilon=2.0)}),
    "lab_mae": partial(
        captioners,
        arms={
            "warm": replace(FULL, train="none"),
            "vip_textures": replace(MAE, train="plain", textures=True),
            "vip_eps8": MAE,
            "vip_non_private": replace(MAE, train="plain"),
        },
    ),
    "cap_starts": partial(captioners, arms=STARTS),
    "cap_widths": partial(captioners, arms=WIDTHS),
    "cap_batches": partial(captioners, arms=BATCHES),
    "cap_records": partial(captioners, arms=SHARES),
    "cap_decoders": partial(captioners, arms=DECODERS),
    "batch_sizes": batch_sizes,
}
