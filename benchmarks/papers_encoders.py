"""The papers' probes, few-shot and private fine-tuning of the encoders of ``papers_trained`` and
``papers_captions``, by commands of the product.

ViP's encoders see the photographs of CIFAR-10, public images as if they were private. They are
probed there, and fine-tuned on EuroSAT at epsilon 8. DP-Cap's see scenes and are probed by the
colour of the largest object, 2,000 public scenes to fit and 2,000 to test. Test accuracy in
percent, one seed; few-shot: the mean over draws with its interval.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import papers_captions
from common import Work, row
from papers_trained import (
    CONTROLS,
    HARDWARE,
    Arm,
    budget,
    image_store,
    options,
    public_scenes,
    vip_run,
)
from run_folders import trained

from dpvision.data.open import open_store

Rows = list[dict[str, Any]]
PHOTOGRAPHS = Arm(records=0)
STARTS = {
    "random weights": None,
    "warm start": CONTROLS["warm start"],
    "private": PHOTOGRAPHS,
    "without privacy": Arm(records=0, train="plain"),
}
"""ViP's encoders; random weights are those of the network of the others."""
CAPTIONERS = ("warm start", "masked autoencoder", "captioner", "captioner, without privacy")
"""Encoders of ``papers_captions`` that are probed."""
FIT, TEST, NUM = 60_000_000, 70_000_000, 2_000
PROBES = {
    "probe": "--protocols linear_lars,few_shot_dpcap --shots 1 2 5 10 --lars.no-augment",
    "tune": "--protocols fine_tune --shots 10 30 --fine-tune.epochs 40 --fine-tune.warmup-epochs 4 "
    "--fine-tune.learning-rates 1e-3 --fine-tune.no-auto-augment --fine-tune.crop-scale 0.4 1",
}
EPSILON, TUNED_STEPS, TUNED_GRADIENTS = 8.0, 40, 20_000


def evaluated(*words: str) -> list[dict[str, Any]]:
    """Return the scores of a `dpvision evaluate` command."""
    line = [sys.executable, "-m", "dpvision", "evaluate", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"papers: {' '.join(words)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)["scores"]


def probed(work: Work, name: str, spec: str, train: Path, test: Path) -> Rows:
    """The rows of an encoder's probes, kept."""

    def scores(words: str) -> list[dict[str, Any]]:
        asked = ["--train", str(train), "--test", str(test), *words.split(), "--against", "none"]
        return evaluated(spec, *asked)

    return [
        row(name, variant(score["protocol"]), "percent", [100 * score["value"]])
        | {end: 100 * score[end] for end in ("low", "high")}
        for key, words in PROBES.items()
        for score in work.kept(f"{key}/{train.name}, {name}", partial(scores, words))
    ]


def variant(protocol: str) -> str:
    """Return what tells a protocol from the others: its title, and the pooling of a few-shot
    probe.
    """
    title, *_, last = protocol.split(", ")
    return f"{title}, {last}" if title.endswith("DP-Cap probe") else title


def photographs(work: Work) -> Rows:
    """ViP's Tables 1, 2, 6 and 7: encoders of photographs on CIFAR-10."""
    parts = [image_store(work, "cifar10", part) for part in ("train", "test")]
    return [r for name in STARTS for r in probed(work, name, _spec(work, name), *parts)]


def _spec(work: Work, name: str) -> str:
    arm = STARTS[name]
    return f"random:{vip_run(work, PHOTOGRAPHS)}" if arm is None else str(vip_run(work, arm))


def captions(work: Work) -> Rows:
    """DP-Cap's Tables 2, 5 and 10: a captioner's encoder beside a masked autoencoder's."""
    parts = [public_scenes(work, first, NUM) for first in (FIT, TEST)]
    runs = {
        name: papers_captions.captioner_run(papers_captions.STARTS[name], work)
        for name in CAPTIONERS
    }
    specs = {"random weights": f"random:{runs['captioner']}"} | {n: str(r) for n, r in runs.items()}
    return [r for name, spec in specs.items() for r in probed(work, name, spec, *parts)]


def fine_tuned(work: Work) -> Rows:
    """ViP's Table 5: the whole network fine-tuned privately on EuroSAT, from each start."""
    rows = []
    train, test = (image_store(work, "eurosat", part) for part in ("train", "test"))
    asked = {
        **HARDWARE,
        "hardware.physical_batch_size": 125,
        "privacy.dataset_size": open_store(train).num_records,
        "privacy.target_epsilon": EPSILON,
        **dict(PHOTOGRAPHS.network),
        **budget(TUNED_GRADIENTS, TUNED_STEPS),
    }
    for name, arm in STARTS.items():
        start = None if arm is None else vip_run(work, arm)
        line = ["transfer.micro", "--data", str(train), *options(asked | {"init_from": start})]
        if arm is None:
            line += ["--optim.pretrained-multiplier", "1"]
        root = work.folder / f"tuned-{name.replace(' ', '_')}"

        def scored() -> float:
            found = evaluated(str(trained(root, line)), "--test", str(test))  # noqa: B023
            return 100 * next(s["value"] for s in found if s["protocol"].startswith("own head,"))

        rows.append(row(name, "eurosat", "percent", [work.kept(f"tuned/{name}", scored)]))
    return rows


MINIATURES = {"vip_probes": photographs, "cap_probes": captions, "vip_tuned": fine_tuned}
