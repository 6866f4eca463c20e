"""Time and memory of one Poisson draw; the goal is 1.3 million of 233 million in 0.3 s and 100 MB
beyond the batch.

    python benchmarks/draws.py [--quick] [--json FILE]

"time_s" is one draw; "extra_memory_mb" is the peak of what the draw allocates, less the array of
indices that it returns. The variant "mask_per_record" (a coin for each record, what most libraries
do) stands beside it for comparison.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import row, write_result

from dpvision.privacy.sampling import derive_rng, draw_poisson
from dpvision.privacy.stream import Key, Stream

CASES = {
    "dpcap 1.3M of 233M": (233_804_767, 1_310_720),
    "vip 98k of 233M": (233_804_767, 98_304),
    "cifar 4k of 50k": (50_000, 4_096),
}


def draw_by_mask(num_records: int, sample_rate: float, rng: Stream) -> np.ndarray:
    return np.flatnonzero(
        np.random.default_rng().random(num_records) < sample_rate
    )  # not even of a secret stream


def measure(
    draw: Callable[[int, float, Stream], np.ndarray], num_records: int, rate: float, rounds: int
) -> tuple[list, list]:
    times, memory = [], []
    for step in range(rounds):
        rng = derive_rng(Key.for_tests(bytes(32)), step)
        start = time.perf_counter()
        draw(num_records, rate, rng)
        times.append(time.perf_counter() - start)
        tracemalloc.start()  # in a draw of its own: tracing would slow the timed one
        index = draw(num_records, rate, rng)
        memory.append((tracemalloc.get_traced_memory()[1] - index.nbytes) / 1e6)
        tracemalloc.stop()
    return times, memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, without the slow variant")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    variants = {"geometric_gaps": (draw_poisson, 2 if args.quick else 11)}
    if not args.quick:
        variants["mask_per_record"] = (draw_by_mask, 3)
    rows = []
    for case, (num_records, batch) in CASES.items():
        for variant, (draw, rounds) in variants.items():
            times, memory = measure(draw, num_records, batch / num_records, rounds)
            rows += [
                row(case, variant, "time_s", times),
                row(case, variant, "extra_memory_mb", memory),
            ]
    write_result(args.json, "draws", rows, packages=["numpy"])


if __name__ == "__main__":
    main()
