"""A private head on timm weights from a file, exported to three formats: timm, onnxruntime and
plain PyTorch give the predictions of ``dpvision predict``.
"""

import csv
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import onnxruntime
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dpvision

os.chdir(Path(__file__).parent)


def run(words):
    subprocess.run([sys.executable, "-m", "dpvision", *words.split()], check=True)


run("data scenes stores/mine --num 400 --size-px 32 --label colour --workers 1")
run("data scenes stores/test --num 50 --size-px 32 --label colour --public --first 400 --workers 1")
# Stands for weights that were downloaded on another machine.
save_file(timm.create_model("test_vit").state_dict(), "stores/weights.safetensors")
run(
    "adapt --data stores/mine --encoder timm:test_vit@stores/weights.safetensors --name first"
    " --public-weights test_vit;Apache-2.0;made-here --head many_steps --model.no-unit"
    " --model.centre none --num-classes 10 --dataset-size 400 --epsilon 3"
)
run("predict runs/first stores/test --csv runs/first/predicted.csv")
for to in ("timm", "onnx", "safetensors"):
    run(f"export runs/first runs/{to} --to {to}")

_, *rows = csv.reader(Path("runs/first/predicted.csv").open(newline=""))
ours = torch.tensor([[float(cell) for cell in row[-10:]] for row in rows])
store = dpvision.open_store("stores/test")
images = [Image.open(io.BytesIO(store.read(i))) for i in range(len(ours))]
model = timm.create_model("local-dir:runs/timm", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
x_BCHW = torch.stack([transform(image) for image in images])
plain = runpy.run_path("runs/safetensors/modelling.py")["load"]("runs/safetensors")
found = {
    "timm": model(x_BCHW).softmax(1),
    "onnx": torch.tensor(
        onnxruntime.InferenceSession("runs/onnx/model.onnx").run(
            ["probabilities"], {"images": x_BCHW.numpy()}
        )[0]
    ),
    "safetensors": plain.probabilities(torch.stack([*map(plain.preprocess, images)])),
}
for to, probability_BK in found.items():
    print(
        f"{to}: {(probability_BK.argmax(1) == ours.argmax(1)).sum()} of {len(ours)} predictions "
        f"equal, largest difference {(probability_BK - ours).abs().max():.1e}"
    )
