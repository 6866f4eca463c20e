"""Does private fine-tuning of a public encoder beat a private head on its frozen features? Test
accuracy by the command line, at equal epsilon.

    python benchmarks/fine_tuning.py --train STORE --test STORE --encoder timm:NAME@FILE
    --public-weights 'NAME; LICENCE; SOURCE' --records N --classes K --batch B --steps T --work DIR
    [--epsilons 1,8] [--ways head,film] [--image-size PX] [--json FILE]

``head`` is ``dpvision adapt --head auto``: full batches, no augmentation. The other ways are the
recipes transfer.micro_WAY with their own rates and crops, T Poisson batches of B expected records.
Values are percent right on the test store, with the score's interval, and CPU seconds of the
training command. A finished run in --work is not repeated.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import row, write_result

WAYS = {
    "micro_head": [],
    "last_block": [],
    "biases": [],
    "film": [],
    "lora": ["--model.lora-on", "both"],
}


def dpvision(*argv: str) -> Any:
    """Run a command and return its JSON."""
    command = [sys.executable, "-m", "dpvision", *argv, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def run_of(args: argparse.Namespace, way: str, epsilon: str) -> dict[str, Any]:
    """Accuracy and cost of one run."""
    name = f"{args.train.name}-{way}-{epsilon}-{args.image_size}"
    if (found := args.work / f"{name}.json").exists():
        return json.loads(found.read_text())
    argv = ["--data", str(args.train), "--encoder", args.encoder, "--epsilon", epsilon, "--quiet"]
    argv += ["--num-classes", str(args.classes), "--dataset-size", str(args.records)]
    argv += ["--public-weights", args.public_weights, "--runs", str(args.work), "--name", name]
    argv += ["--model.encoder.image-size", str(args.image_size)]
    if way == "head":
        argv += ["--head", "auto"]
    else:
        recipe = "transfer.micro_" + way.removeprefix("micro_")
        argv = [recipe, *argv, *WAYS[way], "--hardware.physical-batch-size", "16"]
        argv += ["--privacy.expected-batch-size", str(args.batch)]
        argv += ["--privacy.steps", str(args.steps)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = dpvision("adapt", *argv)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    score = dpvision("evaluate", str(args.work / name), "--test", str(args.test))["scores"][0]
    made = {"score": score, "epsilon": result["epsilon"], "cpu_s": spent}
    found.write_text(json.dumps(made))
    print(f"{name}: {100 * score['value']:.1f}", file=sys.stderr, flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("--train", "--test", "--work"):
        parser.add_argument(option, type=Path, required=True)
    for option in ("--encoder", "--public-weights"):
        parser.add_argument(option, required=True)
    for option in ("--records", "--classes", "--batch", "--steps"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--epsilons", default="1,8")
    parser.add_argument("--ways", default=",".join(["head", *WAYS]))
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for epsilon in args.epsilons.split(","):
        for way in args.ways.split(","):
            made, case = run_of(args, way, epsilon), f"{args.train.name}, epsilon {epsilon}"
            score = made["score"]
            interval = [100 * score[name] for name in ("low", "value", "high")]
            rows.append(row(case, way, "accuracy", interval))
            rows.append(row(case, way, "cpu_s", [made["cpu_s"]]))
    write_result(args.json, "fine_tuning", rows, packages=("torch", "timm"))


if __name__ == "__main__":
    main()
