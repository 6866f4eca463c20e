"""Does the memory of a private step depend on the logical batch? One step of a small captioner,
`dpvision train`, for growing batches.

    python benchmarks/batch_memory.py --work DIR --scenes STORE --tokenizer FILE [--batches A,B]
    [--physical N] [--json F]

Every batch is a process of its own; its peak is that of its resident memory, as the operating
system tells it, and holds Python, torch and the store's index, whose size goes with the records of
the store and is the same for all. "memory_ratio" is to the smallest batch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import row, write_result

from dpvision.data.open import open_store
from dpvision.data.tokenizer import CaptionTokenizer

_SMALL = [
    *(
        "--model.encoder.image-size",
        "16",
        "--model.encoder.patch-size",
        "8",
        "--model.encoder.depth",
        "1",
    ),
    *("--model.encoder.width", "32", "--model.encoder.num-heads", "2"),
    *(
        "--model.decoder.depth",
        "1",
        "--model.decoder.width",
        "32",
        "--model.decoder.num-heads",
        "2",
    ),
]


def one_step(batch: int, args: argparse.Namespace) -> tuple[float, float, int]:
    """Peak resident memory in MB, seconds, and sample-gradients of one private step."""
    root = args.work / f"memory-{batch}"
    shutil.rmtree(root, ignore_errors=True)
    records = open_store(args.scenes).num_records
    line = [
        "dpcap.micro",
        "--data",
        str(args.scenes),
        "--init-from",
        "None",
        "--data.tokenizer",
        str(args.tokenizer),
        *_SMALL,
    ]
    line += [
        "--model.vocab-size",
        str(CaptionTokenizer.load(args.tokenizer).vocab_size),
        "--privacy.dataset-size",
        str(records),
    ]
    line += [
        "--privacy.expected-batch-size",
        str(batch),
        "--privacy.steps",
        "1",
        "--privacy.target-epsilon",
        "None",
    ]
    line += [
        "--privacy.noise-multiplier",
        "1",
        "--optim.warmup-steps",
        "1",
        "--hardware.physical-batch-size",
        str(args.physical),
    ]
    line += [
        "--hardware.workers",
        "1",
        *args.set,
        "--runs",
        str(args.work),
        "--name",
        root.name,
        "--quiet",
        "--json",
    ]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "dpvision", "train", *line], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(
            f"batch {batch}: dpvision train ended with status {os.waitstatus_to_exitcode(status)}"
        )
    drawn = json.loads((root / "confidential" / "metrics.jsonl").read_text().splitlines()[0])[
        "batch_size"
    ]
    return usage.ru_maxrss * 1024 / 1e6, time.monotonic() - start, drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "scenes", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--batches", default="1000,10000,100000")
    parser.add_argument("--physical", type=int, default=250, help="records in one forward pass")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], help="further settings of every run"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    rows, smallest = [], None
    for batch in sorted(map(int, args.batches.split(","))):
        memory_mb, seconds, drawn = one_step(batch, args)
        smallest = smallest or memory_mb
        print(
            f"batch {batch:,}: {drawn:,} records drawn, {memory_mb:,.0f} MB, {seconds:.0f} s",
            flush=True,
        )
        measured = {
            "records": drawn,
            "memory_mb": memory_mb,
            "memory_ratio": memory_mb / smallest,
            "time_s": seconds,
        }
        rows += [
            row(f"batch {batch}", "one_pass_eager", name, [value])
            for name, value in measured.items()
        ]
    write_result(args.json, "batch_memory", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
