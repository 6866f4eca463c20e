"""CPU seconds from the start of Python to the first prediction, by what they are spent on.

    python benchmarks/load_time.py [--repeats 5] [--json FILE]

Heads that ``dpvision adapt`` fits to 200 scenes, without privacy: on the default features, on a
random model of timm and on a random one of transformers. Each is loaded in a new process, which
imports, in this order: torch; torch's compiler (``torch._dynamo``), if the library of the model
imports it; that library's class; then dpvision loads the head and predicts an image.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import timm
import torch
import transformers
from common import row, write_result
from PIL import Image
from safetensors.torch import save_file

PARTS = ("import torch", "import torch._dynamo", "import the library", "dpvision")
LOAD = """
import json, sys, time
parts, mark = [], time.process_time()
for line in [*sys.argv[1:], "None"]:
    before = mark
    exec(line)
    mark = time.process_time()
    parts.append(mark - before)
import dpvision
classifier = dpvision.load_classifier("runs/head")
x_BCHW = torch.from_numpy(classifier.preprocess("photo.png"))[None]
assert classifier.probabilities(x_BCHW).isfinite().all()
parts[-1] = time.process_time() - before
print(json.dumps(parts))
"""
LIBRARY = {
    "default features": ("None", "None"),
    "timm": ("import torch._dynamo", "import timm"),
    "transformers": ("import torch._dynamo", "import transformers; transformers.ViTModel"),
}


def _dpvision(folder: Path, line: str, *more: str) -> None:
    argv = [sys.executable, "-m", "dpvision", *line.split(), *more]
    subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def encoder(name: str, folder: Path) -> list[str]:
    """Write a random encoder of a library, and return the options that name it."""
    torch.manual_seed(0)
    declared = ["--public-weights", "random; CC0; this script"]
    if name == "timm":
        save_file(timm.create_model("test_vit").state_dict(), folder / "vit.safetensors")
        return ["--encoder", f"timm:test_vit@{folder / 'vit.safetensors'}", *declared]
    if name == "transformers":
        size = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
        config = transformers.ViTConfig(**size, num_attention_heads=4, image_size=64, patch_size=16)
        transformers.ViTModel(config).save_pretrained(folder / "vit")
        transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(
            folder / "vit"
        )
        return ["--encoder", f"hf:{folder / 'vit'}", *declared]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for name, imports in LIBRARY.items():
        with tempfile.TemporaryDirectory() as written:
            folder = Path(written)
            _dpvision(folder, "data scenes all --num 200 --size-px 64 --workers 1 --public")
            Image.new("RGB", (64, 64), "grey").save(folder / "photo.png")
            line = "adapt --data all --num-classes 8 --dataset-size 200 --privacy.guarantee none"
            _dpvision(folder, f"{line} --name head", *encoder(name, folder))
            argv = [sys.executable, "-c", LOAD, "import torch", *imports]
            found = [
                json.loads(subprocess.check_output(argv, cwd=folder, text=True))
                for _ in range(args.repeats)
            ]
        rows += [
            row(name, part, "CPU seconds", [one[i] for one in found])
            for i, part in enumerate(PARTS)
        ]
        beyond = [sum(one) - one[0] for one in found]
        rows.append(row(name, "beyond torch", "CPU seconds", beyond))
        rows.append(row(name, "beyond torch and library", "CPU seconds", [one[3] for one in found]))
    write_result(args.json, "load_time", rows, packages=("torch", "timm", "transformers"))


if __name__ == "__main__":
    main()
