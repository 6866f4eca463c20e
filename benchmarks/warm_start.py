"""What a warm start on procedural images is worth: probes on real photographs, against controls at
equal counts.

    python benchmarks/warm_start.py --cifar DIR [--sources A,B] [--seeds N] [--sheets N] [--steps N]
    [--batch N] [--target T] [--probe N]
                                    [--quick] [--json FILE]

A small masked autoencoder (the network of vip.micro) is trained without privacy on N images of one
source for the same number of steps, under bfloat16 autocast, then its frozen encoder is probed
(ridge on the mean token and on quadrants) on CIFAR-10: --probe images to fit, 10,000 to test. DIR
holds train.parquet and test.parquet. Sources: textures (our generator), dead_leaves (discs of
power-law radii, one colour each), noise (1/f noise in correlated colours), cifar (the training
photographs themselves, which no private run may use so); "random" is the untrained network. All
sources see the same crops, flips, masks, batches and learning rates of a seed.
"""

import argparse
import io
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from common import row, write_result
from PIL import Image
from torch import Tensor

from dpvision.config import MAEConfig
from dpvision.encoders.pooled import pooled_network
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.models import mae, make_model
from dpvision.recipes import vip
from dpvision.synthetic.textures import textures

SIZE = 32
STORED = 40
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
MICRO = vip.micro().model
assert isinstance(MICRO, MAEConfig)


def cifar(folder: str, split: str) -> tuple[Tensor, np.ndarray]:
    table = pq.read_table(f"{folder}/{split}.parquet")
    images = [
        np.asarray(Image.open(io.BytesIO(r["bytes"])).convert("RGB"))
        for r in table["image"].to_pylist()
    ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), table[
        "label"
    ].to_numpy()


def dead_leaves(num: int, seed: int) -> Tensor:
    """Discs over each other, density of radii r^-3, one uniform colour each."""
    rng = np.random.Generator(np.random.PCG64(seed))
    y, x = np.mgrid[0:STORED, 0:STORED].astype(np.float32)
    out = np.zeros((num, STORED, STORED, 3), dtype=np.uint8)
    for image in out:
        image[:] = rng.integers(0, 256, 3)
        for _ in range(120):
            radius = min(2 / math.sqrt(1 - rng.random()), STORED)
            cx, cy = rng.uniform(-4, STORED + 4, 2)
            image[(x - cx) ** 2 + (y - cy) ** 2 < radius**2] = rng.integers(0, 256, 3)
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def noise(num: int, seed: int) -> Tensor:
    """Amplitude 1/f, three planes mixed so that lightness has most of the variance."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(STORED, 1 / STORED)
    amplitude = (frequency[:, None].square() + frequency.square()).sqrt().clamp(min=1) ** -1
    amplitude[0, 0] = 0
    parts = []
    for start in range(0, num, 1000):
        white = torch.randn(min(1000, num - start), 3, STORED, STORED, generator=generator)
        planes = torch.fft.ifft2(torch.fft.fft2(white) * amplitude).real
        planes = planes / planes.std(dim=(2, 3), keepdim=True)
        mix = torch.tensor([[0.19, 0.04, 0.02], [0.19, 0.04, -0.02], [0.19, -0.08, 0.0]])
        parts.append(
            (torch.einsum("cd,ndhw->nchw", mix, planes) + 0.47).clamp(0, 1).mul(255).round().byte()
        )
    return torch.cat(parts)


def make_images(source: str, num: int, seed: int, folder: str) -> Tensor:
    if source == "textures":
        number = torch.arange(num) + seed * 10_000_000
        return textures(number, STORED, instance_N=number)
    if source == "cifar":
        x = cifar(folder, "train")[0][
            torch.randperm(50_000, generator=torch.Generator().manual_seed(seed))[:num]
        ]
        return (
            torch.nn.functional.interpolate(x.float(), STORED, mode="bicubic", antialias=True)
            .clamp(0, 255)
            .round()
            .byte()
        )
    return {"dead_leaves": dead_leaves, "noise": noise}[source](num, seed)


def normalised(x: Tensor) -> Tensor:
    return (x.float() / 255 - MEAN[:, None, None]) / STD[:, None, None]


def train(
    pictures: Tensor, steps: int, batch: int, seed: int, target: str, rate: float = 1e-3
) -> mae.MAE:
    """AdamW (0.9, 0.95), weight decay 0.05, a tenth of warm-up and a cosine, random places and
    mirrors.
    """
    model = make_model(replace(MICRO, target=target), seed)
    assert isinstance(model, mae.MAE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(pictures), (batch,), generator=generator)
        top, left = torch.randint(STORED - SIZE + 1, (2,), generator=generator).tolist()
        x = normalised(pictures[rows][:, :, top : top + SIZE, left : left + SIZE])
        mirrored = torch.rand(batch, generator=generator) < 0.5
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
        order = torch.randint(1 << 62, (batch, model.num_patches), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(
                (step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mae.losses(model, x, order).mean()
        loss.backward()
        optimizer.step()
    return model


@torch.inference_mode()
def features(model: mae.MAE, x: Tensor) -> dict[str, np.ndarray]:
    encoder = pooled_network(model.encoder).eval()
    parts = [encoder.poolings(normalised(piece)) for piece in x.split(500)]
    return {name: torch.cat([p[name] for p in parts]).numpy() for name in parts[0]}


def accuracy(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> float:
    return float((fit_ridge(train_x, train_y).predict(test_x) == test_y).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", required=True)
    parser.add_argument("--sources", default="random,textures,dead_leaves,noise")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sheets", type=int, default=12_000)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--target", default=MICRO.target, help="what the model predicts; default: as vip.micro"
    )
    parser.add_argument("--probe", type=int, default=20_000, help="training images of the probe")
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps = 1, 20
    (train_x, train_y), (test_x, test_y) = cifar(args.cifar, "train"), cifar(args.cifar, "test")
    train_x, train_y = train_x[: args.probe], train_y[: args.probe]
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(args.seeds):
        for source in args.sources.split(","):
            start = time.monotonic()
            if source == "random":
                model = make_model(MICRO, seed)
            else:
                model = train(
                    make_images(source, args.pictures, seed, args.cifar),
                    args.steps,
                    args.batch,
                    seed,
                    args.target,
                )
            took = time.monotonic() - start
            fit, test = features(model, train_x), features(model, test_x)
            for pooling in fit:
                found.setdefault((source, pooling), []).append(
                    100 * accuracy(fit[pooling], train_y, test[pooling], test_y)
                )
            now = {pooling: f"{found[source, pooling][-1]:.1f}" for pooling in fit}
            print(
                f"seed {seed} {source}: {now} after {took:.0f} s of images and training", flush=True
            )
    rows = [
        row(source, pooling, "ridge_accuracy_percent", values)
        for (source, pooling), values in found.items()
    ]
    write_result(args.json, "warm_start", rows, packages=("torch", "numpy", "scikit-learn"))


if __name__ == "__main__":
    main()
