"""The rows of ViP on procedural scenes of 32 px: private masked autoencoders of the micro recipe
beside random weights, the warm start and a run without privacy, tested on public scenes of other
numbers.

Runs are those of `dpvision train`, kept in the work folder and resumed: 30,000 sample-gradients at
epsilon 8 from a warm start of 30,000 on 5,000 textures. Scores: the masked loss, and ridge probes
of six attributes on the frozen encoder, 4,000 scenes to fit and 2,000 to test, in percent.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import Work, row
from run_folders import trained

from dpvision.checkpoint import load_checkpoint
from dpvision.config import DataConfig
from dpvision.config.resolve import resolve
from dpvision.data.open import is_store, open_store
from dpvision.data.transform import normalise
from dpvision.encoders.pooled import PooledNetwork, pooled_network
from dpvision.encoders.trained import load_model
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.models import make_model
from dpvision.models.mae import MAE, losses
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import ATTRIBUTES, Scene, make_scene

SIZE_PX, NUM_FIT, NUM_TEST = 32, 4_000, 2_000
FIRST_FIT, FIRST_TEST = 10_000_000, 20_000_000
GRADIENTS, STEPS, WARM_GRADIENTS, WARM_BATCH, RECORDS = 30_000, 100, 30_000, 64, 50_000
Rows = list[dict[str, Any]]


def dpvision(*words: str) -> None:
    """Run a command of the product."""
    subprocess.run(
        [sys.executable, "-m", "dpvision", *words], check=True, stdout=subprocess.DEVNULL
    )


def store(work: Work, name: str, *line: str) -> Path:
    """Return a store that a command of the product makes, unless it is there; "STORE" in the line
    stands for its folder. An unfinished one is made again.
    """
    folder = work.folder / name
    if not is_store(folder):
        shutil.rmtree(folder, ignore_errors=True)
        dpvision(*(str(folder) if word == "STORE" else word for word in line))
    return folder


def scenes_store(work: Work, num: int) -> Path:
    """Return the private store of the first scenes."""
    line = ("data", "scenes", "STORE", "--num", str(num), "--size-px", str(SIZE_PX))
    return store(work, f"scenes-{num}", *line)


def public_scenes(work: Work, first: int, num: int) -> Path:
    """Return a public store of scenes labelled by colour."""
    line = ("data", "scenes", "STORE", "--num", str(num), "--size-px", str(SIZE_PX), "--public")
    more = ("--first", str(first), "--label", "colour")
    return store(work, f"public-{first}-{num}", *line, *more)


def textures(work: Work, num: int) -> Path:
    """Return the store of the first textures."""
    line = ("synth", "STORE", "--num", str(num), "--size-px", "40", "--files")
    return store(work, f"textures-{num}", *line)


def image_store(work: Work, name: str, part: str = "train") -> Path:
    """Return the public store of a part of an image set."""
    file = work.data / name / f"{part}.parquet"
    return store(work, f"{name}-{part}", "data", "import", str(file), "STORE", "--public")


def options(values: dict[str, Any]) -> list[str]:
    """Return settings by dotted name as words of a command line."""
    words = []
    for name, value in values.items():
        group, _, setting = name.replace("_", "-").rpartition(".")
        if value is False:
            words.append(f"--{group}.no-{setting}")
        else:
            words += [f"--{name.replace('_', '-')}", *map(str, np.atleast_1d(value))]
    return words


def budget(gradients: int, steps: int) -> dict[str, Any]:
    """Return the settings of so many sample-gradients in so many steps."""
    return {
        "privacy.expected_batch_size": round(gradients / steps),
        "privacy.steps": steps,
        "optim.warmup_steps": max(1, steps // 10),
    }


TEXTURES = 5_000
WARM = budget(WARM_GRADIENTS, WARM_GRADIENTS // WARM_BATCH) | {"privacy.dataset_size": TEXTURES}
"""Settings of the warm starts."""
HARDWARE = {"hardware.workers": 1, "hardware.precision": "bfloat16"}


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

Settings = tuple[tuple[str, Any], ...]


def _encoder(depth: int, width: int, heads: int) -> Settings:
    names = ("depth", "width", "num_heads")
    return tuple(
        (f"model.encoder.{n}", v) for n, v in zip(names, (depth, width, heads), strict=True)
    )


SIZES = {"2x64": _encoder(2, 64, 2), "4x128": _encoder(4, 128, 4)}


@dataclass(frozen=True)
class Arm:
    """A masked autoencoder: a private run of vip.micro, or a control."""

    network: Settings = SIZES["2x64"]
    """Settings of the run and of its warm start."""
    own: Settings = tuple(budget(GRADIENTS, STEPS).items())
    """Settings of the private run alone."""
    records: int = RECORDS
    """Number of private scenes; 0 for the photographs of CIFAR-10."""
    warm: bool = True
    train: Literal["private", "plain", "none"] = "private"
    """"none": what the private run starts from."""


LONG = tuple(budget(200_000, 200).items())
VIP_SIZES = {
    f"{size}, {start}{after}": replace(arm, network=network, warm=start == "warm")
    for size, network in SIZES.items()
    for start in ("random", "warm")
    for after, arm in ((", no training", Arm(train="none")), ("", Arm(own=LONG)))
}
CONTROLS = {
    "random weights": Arm(warm=False, train="none"),
    "warm start": Arm(train="none"),
    "without privacy": Arm(train="plain"),
}
VIP_RECORDS = CONTROLS | {f"{num} records": Arm(records=num) for num in (500, 5_000, RECORDS)}
VIP_BATCHES = CONTROLS | {
    f"batch {batch}": Arm(own=tuple(budget(GRADIENTS, GRADIENTS // batch).items()))
    for batch in (75, 300, 1_200)
}
MASKING = {
    f"mask {ratio}": Arm((*SIZES["2x64"], ("model.mask_ratio", ratio))) for ratio in (0.25, 0.5)
}
DECODERS = {
    f"decoder {depth}": Arm((*SIZES["2x64"], ("model.decoder_depth", depth))) for depth in (2, 4)
}


def autoencoders(work: Work, arms: dict[str, Arm]) -> Rows:
    """Masked loss, probes and parameters of autoencoders."""
    units = {"masked loss": "mean_square", "parameters": "count"}
    rows = []
    for case, arm in arms.items():
        found = work.kept(f"vip/{place_of(arm)}", partial(_autoencoder, work, arm))
        rows += [row(case, what, units.get(what, "percent"), [v]) for what, v in found.items()]
    return rows


def _autoencoder(work: Work, arm: Arm) -> dict[str, float]:
    if arm.warm or arm.train != "none":
        model, _ = load_model(load_checkpoint(vip_run(work, arm)))
    else:
        config = RECIPES["vip.micro"]()
        model = make_model(resolve(config, dict(arm.network)).model, config.seed)
    assert isinstance(model, MAE)
    return {
        "masked loss": masked_loss(model),
        **attribute_probes(pooled_network(model.encoder).eval()),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def place_of(arm: Arm) -> str:
    """Return the name of an arm's files in the work folder."""
    used = {"none": (), "plain": (arm.records,)}.get(
        arm.train, (arm.records, *dict(arm.own).values())
    )
    start = "warm" if arm.warm else "random"
    return "-".join(map(str, ("vip", start, arm.train, *used, *dict(arm.network).values())))


def vip_run(work: Work, arm: Arm) -> Path:
    """Return the run of an arm that has one, trained unless complete."""
    line, place = [f"vip.micro{'' if arm.warm else '_random_start'}"], work.folder / place_of(arm)
    asked = {**HARDWARE, "hardware.physical_batch_size": 125, **dict(arm.network)}
    if arm.train == "none":
        line = ["synthetic.vip_micro", "--data", str(textures(work, TEXTURES))]
        asked |= WARM
    else:
        start = vip_run(work, replace(arm, train="none")) if arm.warm else None
        data = scenes_store(work, arm.records) if arm.records else image_store(work, "cifar10")
        line += ["--data", str(data), "--init-from", str(start)]
        asked["privacy.dataset_size"] = open_store(data).num_records
        asked |= dict(arm.own) if arm.train == "private" else without_privacy("vip", GRADIENTS)
    return trained(place, [*line, *options(asked)])


def without_privacy(recipe: str, gradients: int) -> dict[str, Any]:
    """Return settings of RECIPE.micro without privacy: the optimizer of its micro_non_private, in
    so many sample-gradients of batches of 250.
    """
    plain = RECIPES[f"{recipe}.micro_non_private"]()
    return {
        "privacy.guarantee": "none",
        "privacy.target_epsilon": None,
        "privacy.max_grad_norm": None,
        **budget(gradients, gradients // 250),
        "optim.learning_rate": plain.optim.learning_rate,
        "optim.weight_decay": plain.optim.weight_decay,
    }


MINIATURES: dict[str, Callable[[Work], Rows]] = {
    "vip_sizes": partial(autoencoders, arms=VIP_SIZES),
    "vip_records": partial(autoencoders, arms=VIP_RECORDS),
    "vip_batches": partial(autoencoders, arms=VIP_BATCHES),
    "vip_masking": partial(autoencoders, arms={"default": Arm(), **MASKING}),
    "vip_decoders": partial(autoencoders, arms={"default": Arm(), **DECODERS}),
}
