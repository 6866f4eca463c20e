"""Images a second of private training: whole model, last layer and what lies between, the paper's
Table 8 on this machine.

    python benchmarks/transfer_speed.py [--quick] [--models A,B] [--tuned A,B] [--image-size PX]
    [--records N] [--seconds S] [--device D]
                                        [--json FILE]

One physical batch of random images through ``dp.clip.clipped_sum``, over and over for S seconds
after one round that is not timed. The paper's models have the names of their recipes (vit_b16,
r50x4, ...), others those of timm. A row's metric is "pictures_per_s"; "ratio" is that of a way to
whole-model training, as in the paper's column "Speed Up". --quick: small stand-ins for a
transformer and a BiT network at 64 px. The encoder's weights are random: they cost the same. Noise
and optimizer are left out: at the paper's batches they are one pass over the weights for a million
images.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import row, write_result

from dpvision.config import ClassifierConfig, TimmConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.models import make_model
from dpvision.recipes import transfer
from dpvision.train.objectives import classification_losses

QUICK = {
    "vit": TimmConfig(
        name="vit_tiny_patch16_224", image_size=64, options=("patch_size=8", "depth=4")
    ),
    "bit": TimmConfig(
        name="resnetv2_50x1_bit", image_size=64, options=("channels=[128,128,256,256]",)
    ),
}
WAYS = ("whole", "last_blocks", "lora", "film", "biases", "head")


def find_encoder(name: str, image_size: int, *, quick: bool) -> TimmConfig:
    """The encoder of a name on the command line."""
    if quick:
        return QUICK[name]
    return (
        transfer.encoder(name, image_size)
        if name in transfer.ENCODERS
        else TimmConfig(name=name, image_size=image_size)
    )


def make_batch(size: int, records: int, num_classes: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    number_B = torch.arange(1, records + 1)
    x = torch.randn(records, 1, 3, size, size, generator=generator)
    made = Batch(number_B, torch.ones(records, dtype=torch.bool), x, label_B=number_B % num_classes)
    return Batch._make(None if value is None else value.to(device) for value in made)


def measure(
    cfg: ClassifierConfig, records: int, seconds: float, device: torch.device
) -> list[float]:
    """Images a second of each round."""
    model, key = make_model(cfg, 0).to(device), StepKey(0, 0)
    batch = make_batch(cfg.encoder.image_size, records, cfg.num_classes, device)
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < 2 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        clipped_sum(classification_losses, model, batch, key, max_grad_norm=1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(records / (time.perf_counter() - begin))
        if len(found) == 1:
            start = time.perf_counter()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--models", help="names between commas; default: vit_b16,r50x4, with --quick the stand-ins"
    )
    parser.add_argument("--tuned", default=",".join(WAYS))
    parser.add_argument("--image-size", type=int, default=384)
    parser.add_argument("--records", type=int, help="of a physical batch; default 8")
    parser.add_argument("--seconds", type=float, help="for each row; default 60, with --quick 2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    seconds = args.seconds or (2.0 if args.quick else 60.0)
    for name in (args.models or ("vit,bit" if args.quick else "vit_b16,r50x4")).split(","):
        base = ClassifierConfig(
            encoder=find_encoder(name, args.image_size, quick=args.quick),
            num_classes=1000,
            pooling="own",
            loss="sigmoid",
            head_bias=-10.0,
        )
        whole: float | None = None
        for way in args.tuned.split(","):
            if way == "lora" and name in ("bit", "r50x4", "r152x4"):
                continue  # no linear maps in its blocks
            rates = measure(replace(base, tuned=way), args.records or 8, seconds, device)
            rows.append(row(name, way, "pictures_per_s", rates))
            if way == "whole":
                whole = rows[-1]["value"]
            elif whole is not None:
                rows.append(row(name, way, "ratio", [rate / whole for rate in rates]))
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    write_result(args.json, "transfer_speed", rows, packages=["torch", "timm"], device=shown)


if __name__ == "__main__":
    main()
