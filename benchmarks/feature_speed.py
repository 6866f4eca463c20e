"""Features of frozen convnets on one core: images per second of CPU time (kernel included), before
and after weights are channels-last and freed memory is kept, in one process.

    python benchmarks/feature_speed.py [--encoders NAME,NAME] [--image-size PX] [--json FILE]

Encoders are timm's, with random weights; an image's work does not depend on them. ``bfloat16`` is
as ``dpvision adapt`` on CPUs with instructions for it; ``error`` is the largest difference of its
features from float32, relative to the largest feature. Memory settings cannot be undone, so
the variants run in the order of ``VARIANTS``.
"""

import argparse
import time
from pathlib import Path

import torch
from common import row, write_result

from dpvision.devices import keep_freed_memory
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_precision import in_precision
from dpvision.encoders.third_party import third_party_encoder

ENCODERS = "tf_efficientnet_lite0,resnet18,regnety_002,mobilenetv3_small_100"
ROWS, ROUNDS = 32, 5
VARIANTS = {
    "before": (torch.contiguous_format, False, False),
    "channels-last": (torch.channels_last, False, False),
    "memory kept": (torch.contiguous_format, True, False),
    "both": (torch.channels_last, True, False),
    "bfloat16": (torch.channels_last, True, True),
}


@torch.inference_mode()
def measured(encoder: Encoder, x_BCHW: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """Images per second of CPU time in each round, and the features."""
    rates, x_BD = [], encoder(x_BCHW)
    for _ in range(ROUNDS):
        start = time.process_time()
        x_BD = encoder(x_BCHW)
        rates.append(len(x_BCHW) / (time.process_time() - start))
    return rates, x_BD.float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoders", default=ENCODERS)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.image_size
    x_BCHW = torch.randn(ROWS, 3, size, size, generator=torch.Generator().manual_seed(0))
    names, rows, reference = args.encoders.split(","), [], {}
    encoders = {name: third_party_encoder("timm", name, image_size=size) for name in names}
    for variant, (layout, keeps, low) in VARIANTS.items():
        if keeps:
            keep_freed_memory()
        for name, encoder in encoders.items():
            assert encoder.network is not None
            encoder.network.to(memory_format=layout)
            rates, x_BD = measured(in_precision(encoder, "bfloat16" if low else "float32"), x_BCHW)
            case = f"{name}, {size} px"
            rows.append(row(case, variant, "images_per_cpu_s", rates))
            if low:
                off = (x_BD - reference[name]).abs().max() / reference[name].abs().max()
                rows.append(row(case, variant, "error", [float(off)]))
            reference.setdefault(name, x_BD)
    write_result(args.json, "feature_speed", rows, packages=("torch", "timm"))


if __name__ == "__main__":
    main()
