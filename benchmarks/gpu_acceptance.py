"""Is the GPU path right, and how fast is it: every check and every figure, part by part, with the bars beside them.

    python benchmarks/gpu_acceptance.py --work DIR [--device cuda|cpu] [--parts A,B] [--budget-s 560] [--again] [--json FILE]
    python benchmarks/gpu_acceptance.py --list

Each part runs in a process of its own, for less than eight minutes, and leaves DIR/PART.json. Repeat the command until it says that all
parts are there: a part that is there, from the same code and device, is not run again, and none is begun that may outlast --budget-s.
On a CPU everything runs at small sizes: what it then shows is that the script and the checks work, not how fast a GPU is.

Correctness comes first (gpu_checks.py); then clipping, the noise's share, textures, features. The table at the end is what to read: a
figure, its bar, and "ok" or "MISSED". Exit status: 0 if every check holds and every part is there, 1 if one fails, 75 if parts are left.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LONGEST_S = 470.0
_INCOMPLETE = 75

CHECKS = ("gradients", "contributions", "noise", "totals", "end_to_end")
CLIPPING = {"clip_mae_base": "mae_base", "clip_cap_base": "cap_base", "clip_mae_large": "mae_large", "clip_cap_large": "cap_large"}


@dataclass(frozen=True)
class Bar:
    """A bound on a figure: at most, or at least where ``least``."""

    figure: str
    bound: float
    least: bool = False


@dataclass(frozen=True)
class Part:
    """A process that leaves a JSON file."""

    name: str
    what: str
    command: Callable[[str, Path], list[str]]
    """Device and path of the JSON file to the command's words after the interpreter."""


def _check(name: str) -> Part:
    return Part(
        name, f"correctness: {name.replace('_', ' ')}", lambda device, out: ["gpu_checks.py", name, "--device", device, "--json", str(out)]
    )


def _clip(name: str, case: str) -> Part:
    def command(device: str, out: Path) -> list[str]:
        words = ["clipping.py", "--cases", case, "--device", device, "--json", str(out)]
        if device == "cuda":
            return [*words, "--budget-s", "330"]
        return [*words, "--batch", "2", "--rounds", "1", "--threads", "1", "--variants", "non_private_eager,one_pass_eager"]

    return Part(name, f"clipping: {case}, time, memory and the largest physical batch", command)


def _noise(device: str, out: Path) -> list[str]:
    return ["noise.py", "--device", device, "--json", str(out), *([] if device == "cuda" else ["--quick", "--rounds", "1"])]


def _textures(device: str, out: Path) -> list[str]:
    return [
        "textures.py",
        "--device",
        device,
        "--json",
        str(out),
        *(["--sizes", "32,224"] if device == "cuda" else ["--quick", "--processes", "1"]),
    ]


def _features(device: str, out: Path) -> list[str]:
    small = [] if device == "cuda" else ["--images", "4", "--rounds", "1", "--sizes", "32"]
    return ["patch_speed.py", "--device", device, "--json", str(out), *small]


PARTS = (
    *(_check(name) for name in CHECKS),
    *(_clip(name, case) for name, case in CLIPPING.items()),
    Part("noise_speed", "normals a second, and the release of 99 M parameters", _noise),
    Part("textures", "procedural textures a second", _textures),
    Part("features", "features of patches and scattering a second", _features),
)

BARS = {
    "clip_mae_base": [Bar("one_pass/time_ratio", 1.10), Bar("one_pass/max_physical_batch_ratio", 0.9, least=True)],
    "clip_cap_base": [Bar("one_pass/time_ratio", 1.10), Bar("one_pass/max_physical_batch_ratio", 0.9, least=True)],
    "clip_mae_large": [Bar("one_pass/time_ratio", 1.06), Bar("one_pass/max_physical_batch_ratio", 0.9, least=True)],
    "clip_cap_large": [
        Bar("one_pass/time_ratio", 1.06),
        Bar("one_pass/max_physical_batch_ratio", 0.9, least=True),
        Bar("vmap/time_over_one_pass", 4.7, least=True),
    ],
    "noise_speed": [Bar("noise's share of a step of 98,304 records", 0.02)],
    "textures": [Bar("224px/fused/images_per_s", 20_000, least=True)],
}
"""On an H200 in bfloat16; on a CPU no bar is held against a figure."""


def figures(name: str, found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The figures of a part that bars name, and those worth a line; empty where the part is not there."""
    result = found.get(name)
    if result is None:
        return {}
    values = {(r["case"], r["variant"], r["metric"]): r["value"] for r in result["rows"]}
    if name in CHECKS:
        return {f"{case}": value for (case, _, metric), value in values.items() if metric == "value"}
    if name in CLIPPING:
        return _clipping_figures({(variant, metric): value for (_, variant, metric), value in values.items()})
    shown = {"noise_speed": ("million_per_s", "time_s"), "textures": ("images_per_s",), "features": ("ms_per_image",)}[name]
    made = {f"{case}/{variant}/{metric}": value for (case, variant, metric), value in values.items() if metric in shown}
    release = next(
        (v for (case, variant, _), v in values.items() if case.startswith("privatize") and variant in ("cuda", "threads_1")), None
    )
    steps = [v for r in [found.get("clip_mae_base")] if r for v in _rate(r)]
    if name == "noise_speed" and release is not None and steps:
        made["noise's share of a step of 98,304 records"] = release / (release + 98_304 / steps[0])
    return made


def _rate(result: dict[str, Any]) -> list[float]:
    """Records a second of the fastest one-pass variant."""
    rates = [r["value"] for r in result["rows"] if r["metric"] == "records_per_s" and r["variant"].startswith("one_pass")]
    return [max(rates)] if rates else []


def _clipping_figures(values: dict[tuple[str, str], float]) -> dict[str, float]:
    """The best one-pass variant against the best non-private one."""

    def best(kind: str, metric: str, pick: Callable[[Sequence[float]], float]) -> float:
        found = [v for (variant, m), v in values.items() if variant.startswith(kind) and m == metric]
        return pick(found) if found else float("nan")

    time = best("one_pass", "time_ratio", min)
    made = {"one_pass/time_ratio": time, "vmap/time_over_one_pass": best("vmap", "time_ratio", min) / time}
    made["one_pass/records_per_s"] = best("one_pass", "records_per_s", max)
    batches = [best(kind, "max_physical_batch", max) for kind in ("one_pass", "non_private")]
    made["one_pass/max_physical_batch_ratio"] = batches[0] / batches[1]
    made["opacus_ghost/time_ratio"] = best("opacus_ghost", "time_ratio", min)
    return {name: value for name, value in made.items() if value == value}


def table(found: dict[str, dict[str, Any]], device: str) -> tuple[str, bool]:
    """The lines to read, and whether every check holds."""
    lines, good = [], True
    for part in PARTS:
        result = found.get(part.name)
        if result is None:
            lines.append(f"{part.name:<16} -")
            continue
        if result.get("failed"):
            good = False
            lines.append(f"{part.name:<16} FAILED: {result['failed']}")
            continue
        shown, bars = figures(part.name, found), {bar.figure: bar for bar in BARS.get(part.name, [])}
        if part.name in CHECKS:
            bound = {r["case"]: r["value"] for r in result["rows"] if r["metric"] == "bound"}
            wrong = {claim: value for claim, value in shown.items() if not value <= bound[claim]}
            good = good and not wrong
            lines.append(f"{part.name:<16} {len(shown) - len(wrong)} of {len(shown)} checks hold")
            lines += [f"{'':<16}   WRONG {claim}: {value:.4g}, at most {bound[claim]:.4g}" for claim, value in wrong.items()]
            continue
        for figure, value in shown.items():
            verdict = _verdict(bars.pop(figure, None), value) if device == "cuda" else ""
            lines.append(f"{part.name:<16} {figure:<44} {value:>10.4g}  {verdict}")
        lines += [f"{part.name:<16} {figure:<44} {'-':>10}  not measured" for figure in bars if device == "cuda"]
    return "\n".join(lines), good


def _verdict(bar: Bar | None, value: float) -> str:
    if bar is None:
        return ""
    met = value >= bar.bound if bar.least else value <= bar.bound
    return f"{'ok' if met else 'MISSED'}, bar {bar.bound:g}"


def run_part(part: Part, device: str, work: Path, limit_s: float) -> dict[str, Any]:
    """Run a part and return its result, which is also in its file; a failure is a result too."""
    out = work / f"{part.name}.part.json"
    out.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    script, *words = part.command(device, out)
    started, failed = time.monotonic(), None
    with open(work / f"{part.name}.log", "w") as log:
        try:
            status = subprocess.run(
                [sys.executable, str(HERE / script), *words], env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
            failed = f"exit status {status}; see {part.name}.log" if status else None
        except subprocess.TimeoutExpired:
            failed = f"not done after {limit_s:.0f} s; see {part.name}.log"
    result = json.loads(out.read_text()) if out.exists() else {"rows": []}
    if failed and not (part.name in CHECKS and result["rows"]):  # checks that do not hold are rows, and are shown one by one
        result["failed"] = failed
    result |= {"part": part.name, "asked_device": device, "code": code(), "seconds": time.monotonic() - started}
    out.write_text(json.dumps(result, indent=1))
    out.replace(work / f"{part.name}.json")
    return result


def code() -> str:
    """A digest of the package and of the benchmarks: results of other code are not taken for this one's."""
    import hashlib

    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*(HERE.parent / "src").rglob("*.py"), *HERE.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(part: Part, device: str, work: Path) -> dict[str, Any] | None:
    """A part's result from this code and device that did not fail, if it is there."""
    path = work / f"{part.name}.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    return result if result["code"] == code() and result["asked_device"] == device and not result.get("failed") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of the parts' results; kept between calls")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", help="some of the parts, with commas; default: all, in order")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds of this call; a part gets what is left, at most 470")
    parser.add_argument("--again", action="store_true", help="run parts that are there too")
    parser.add_argument("--list", action="store_true", help="the parts, and nothing else")
    parser.add_argument("--json", type=Path, help="all results in one file")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{part.name:<16} {part.what}" for part in PARTS))
        return
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    known = [part.name for part in PARTS]
    asked = known if args.parts is None else args.parts.split(",")
    unknown = [name for name in asked if name not in known]
    if unknown or args.work is None:
        problem = f"--parts: {unknown[0]!r}; expected some of {', '.join(known)}" if unknown else "--work is missing; expected a folder"
        print(f"{problem}. See --list.", file=sys.stderr)
        return 2
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("--device=cuda: torch finds no GPU; expected one. Use --device cpu to try the script at small sizes.", file=sys.stderr)
            return 2
    args.work.mkdir(parents=True, exist_ok=True)
    end, found, left = time.monotonic() + args.budget_s, {}, []
    for part in PARTS:
        result = None if args.again and part.name in asked else kept(part, args.device, args.work)
        if result is None and part.name in asked:
            remaining = end - time.monotonic()
            if remaining < min(60.0, args.budget_s / 2):
                left.append(part.name)
                continue
            print(f"{part.name}: {part.what} ...", file=sys.stderr, flush=True)
            result = run_part(part, args.device, args.work, min(LONGEST_S, remaining))
            print(
                f"{part.name}: {result['seconds']:.0f} s{', ' + result['failed'] if result.get('failed') else ''}",
                file=sys.stderr,
                flush=True,
            )
        if result is not None:
            found[part.name] = result
    if args.json:
        args.json.write_text(json.dumps({"benchmark": "gpu_acceptance", "parts": list(found.values())}, indent=1) + "\n")
    shown, good = table(found, args.device)
    print(shown)
    if left:
        print(f"left: {', '.join(left)}. Repeat the command.")
    return 1 if not good else _INCOMPLETE if left else 0


if __name__ == "__main__":
    main()
