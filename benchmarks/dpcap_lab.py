"""DP-Cap in miniature, on procedural scenes: what a private captioner learns to see and to say,
beside its controls at equal compute.

    python benchmarks/dpcap_lab.py --work DIR --scenes STORE --tokenizer FILE [--arms A,B] [--steps
    N] [--batch N] [--warm RUN]
                                   [--textures STORE] [--non-private-gradients N] [--set ARGUMENT
                                   ...] [--quick] [--json FILE]

Runs the product itself, `dpvision train` recipes in DIR, unless a complete run is there:

    random            the network of dpcap.micro as its seed initialises it
    warm              synthetic.dpcap_micro: the warm start on textures alone (--warm names a run
                      made elsewhere)
    private_eps8      dpcap.micro, its own steps and batch unless N say otherwise; also
                      private_eps2, private_eps1
    non_private       dpcap.micro_non_private, small batches
    vip_eps8          dpcap.micro_vip: DP-MAE at the same epsilon, batch and steps, from the same
                      warm encoder
    vip_textures      the same encoder, trained on for as many sample-gradients on textures
                      (--textures), without privacy: the control
    vip_non_private   the same on the scenes

--scenes holds private scenes (`dpvision data scenes STORE`); everything is measured on public ones
of other numbers:

    attribute probes  ridge on the frozen encoder's mean token and on quadrants, six attributes of
    the scene (4000 to fit, 2000 to test)
    zero-shot         colour and shape of a single object among all pairs, by the trie and by the
                      lowest loss
    composition       true sentence against one with swapped colours, objects, or relation (chance
                      50%)
    words             CIDEr-D of greedy captions against the scene's own sentence; share of the
                      named coloured shapes that are in the image, and share of the image's that are
                      named
"""

import argparse
import io
import json
import re
from pathlib import Path

import torch
from common import row, write_result
from PIL import Image
from runs import trained
from scene_probes import FIRST_FIT, FIRST_TEST, attribute_probes, pixels, scenes

from dpvision.checkpoint import load_checkpoint
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
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
from dpvision.models.generate import GenerateSettings, generate
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import ATTRIBUTES, Scene

SIZE = RECIPES["dpcap.micro"]().model.encoder.image_size
ARMS = ("random", "warm", "private_eps8", "non_private", "vip_eps8")
COLOURS, SHAPES = ATTRIBUTES["colour"], ATTRIBUTES["shape"]


def command(arm: str, args: argparse.Namespace) -> list[str]:
    """The `dpvision train` line of an arm."""
    common = ["--hardware.workers", "1", *args.set]
    if arm == "warm":
        return ["synthetic.dpcap_micro", *common]
    data = args.textures if arm == "vip_textures" else args.scenes
    store = ["--data", str(data), "--privacy.dataset-size", str(open_store(data).num_records)]
    store += ["--init-from", str(train("warm", args))]
    words = ["--data.tokenizer", str(args.tokenizer)]
    size = [] if args.batch is None else ["--privacy.expected-batch-size", str(args.batch)]
    if args.steps is not None:
        size += [
            "--privacy.steps",
            str(args.steps),
            "--optim.warmup-steps",
            str(max(1, args.steps // 20)),
        ]
    if arm == "non_private":
        batch = int(RECIPES["dpcap.micro_non_private"]().privacy.expected_batch_size)
        steps = max(1, args.non_private_gradients // batch)
        small = ["--privacy.steps", str(steps), "--optim.warmup-steps", str(max(1, steps // 10))]
        return ["dpcap.micro_non_private", *store, *words, *small, *common]
    if arm in ("vip_textures", "vip_non_private"):
        return ["dpcap.micro_vip", *store, *without_privacy(args), *common]
    kind, epsilon = arm.split("_eps")
    target = ["--privacy.target-epsilon", epsilon]
    if kind == "vip":
        return ["dpcap.micro_vip", *store, *size, *target, *common]
    return ["dpcap.micro", *store, *words, *size, *target, *common]


def without_privacy(args: argparse.Namespace) -> list[str]:
    """Options of dpcap.micro_vip: dpcap.micro_non_private's optimizer, for as many sample-gradients
    as the private arm takes.
    """
    private, plain = RECIPES["dpcap.micro_vip"]().privacy, RECIPES["dpcap.micro_non_private"]()
    batch = int(plain.privacy.expected_batch_size)
    steps = max(
        1, (args.steps or private.steps) * (args.batch or int(private.expected_batch_size)) // batch
    )
    options = {
        "privacy.guarantee": "none",
        "privacy.target-epsilon": None,
        "privacy.max-grad-norm": None,
        "privacy.expected-batch-size": batch,
        "privacy.steps": steps,
        "optim.warmup-steps": max(1, steps // 10),
        "optim.learning-rate": plain.optim.learning_rate,
        "optim.weight-decay": plain.optim.weight_decay,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def train(arm: str, args: argparse.Namespace) -> Path:
    """Run an arm unless it is there; returns its run folder."""
    if arm == "warm" and args.warm is not None:
        return args.warm
    return trained(args.work / arm, command(arm, args))


def single_objects(args: argparse.Namespace) -> Store:
    """Public store of scenes of one object, labelled with colour and shape."""
    folder = args.work / f"single-{args.num_test}"
    if folder.exists():
        return open_store(folder)
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]

    def samples() -> list[Sample]:
        found = []
        for scene in scenes(FIRST_TEST, 8 * args.num_test, SIZE):
            if len(scene.objects) == 1 and len(found) < args.num_test:
                file = io.BytesIO()
                Image.fromarray(scene.image).save(file, "PNG")
                label = pairs.index((scene.main.colour, scene.main.shape))
                found.append(Sample(f"single-{len(found)}", file.getvalue(), {"label": label}))
        return found

    names = [f"{colour} {shape}" for colour, shape in pairs]
    return import_samples(Source(iter(samples()), names), folder, public=True)


def said(ready: OpenCaptioner, test: list[Scene]) -> dict[str, float]:
    """Greedy captions of scenes against their own, and against what is in the image."""
    captions: list[str] = []
    with torch.inference_mode():
        for part in pixels(test).split(250):
            made = generate(ready.model, ready.model.encode(part), GenerateSettings())
            captions += [ready.tokenizer.decode(one[0].ids) for one in made]
    named = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})")
    right = total = seen = objects = 0
    for caption, scene in zip(captions, test, strict=True):
        told, there = (
            set(named.findall(caption)),
            {(obj.colour, obj.shape) for obj in scene.objects},
        )
        right, total, seen, objects = (
            right + len(told & there),
            total + len(told),
            seen + len(told & there),
            objects + len(there),
        )
    for caption, scene in list(zip(captions, test, strict=True))[:8]:
        print(f"    {scene.caption}\n      -> {caption}")
    return {
        "CIDEr-D, greedy": float(
            100 * cider_d(captions, [[scene.caption] for scene in test]).mean()
        ),
        "named coloured shapes that are there": 100 * right / max(1, total),
        "coloured shapes there that are named": 100 * seen / objects,
    }


def captioner_scores(ready: OpenCaptioner, args: argparse.Namespace) -> dict[str, float]:
    """Everything that needs words, in percent."""
    found = {}
    store = single_objects(args)
    labels = load_label_set("store", store)
    how = Asking(workers=1)
    for score in zero_shot_scores([ready], store, labels, ZeroShotSettings(prompt="a"), how):
        found[f"{score.protocol} (chance {100 * score.chance:.1f})"] = 100 * score.value
    test = scene_compositional(range(FIRST_TEST, FIRST_TEST + args.num_test), SIZE)
    for score in choice_scores(test, answer_choices(ready, test, how), ready.name, "public"):
        found[f"{score.protocol}"] = 100 * score.value
    return found | said(ready, scenes(FIRST_TEST, args.num_test, SIZE))


def measure(arm: str, args: argparse.Namespace) -> dict[str, float]:
    """All figures of an arm, kept in DIR."""
    kept = args.work / f"{arm}.scores.json"
    if not kept.exists():
        fit, test = scenes(FIRST_FIT, args.num_fit, SIZE), scenes(FIRST_TEST, args.num_test, SIZE)
        if arm == "random":
            config = RECIPES["dpcap.micro"]()
            model = make_model(config.model, config.seed)
        else:
            model, config = load_model(load_checkpoint(train(arm, args)))
        found = attribute_probes(pooled_network(model.encoder).eval(), fit, test)
        if config.model.kind == "captioner" and arm != "random":
            found |= captioner_scores(open_captioner(train(arm, args)), args)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "scenes", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument(
        "--batch", type=int, help="records of a private step; the recipe's if left out"
    )
    parser.add_argument("--steps", type=int, help="private steps; the recipe's if left out")
    parser.add_argument("--warm", type=Path, help="a warm start made elsewhere")
    parser.add_argument(
        "--textures",
        type=Path,
        help="public store of textures as files, for vip_textures: dpvision synth STORE --files",
    )
    parser.add_argument("--non-private-gradients", type=int, default=300_000)
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], help="further settings of every run"
    )
    parser.add_argument("--quick", action="store_true", help="few scenes to measure on")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.textures is None and "vip_textures" in args.arms:
        parser.error(
            "vip_textures needs --textures: make a store with `dpvision synth STORE --num "
            "200000 --size-px 40 --files`"
        )
    args.num_fit, args.num_test = (1000, 500) if args.quick else (4000, 2000)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for arm in args.arms.split(","):
        found = measure(arm, args)
        print(
            f"{arm}:\n" + "\n".join(f"  {name:64} {value:6.1f}" for name, value in found.items()),
            flush=True,
        )
        rows += [row(arm, name, "percent", [value]) for name, value in found.items()]
    write_result(
        args.json, "dpcap_lab", rows, packages=("torch", "numpy", "tokenizers", "dp-accounting")
    )


if __name__ == "__main__":
    main()
