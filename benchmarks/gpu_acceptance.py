"""Is the GPU path right, and how fast is it: every check and every figure, part by part, with the
bars beside them.

    python benchmarks/gpu_acceptance.py --out DIR [--minutes 12] [--device cuda|cpu] [--parts A,B]
    [--again] python benchmarks/gpu_acceptance.py --list

Correctness comes first (gpu_checks.py), then what has a bar, in order of importance, each part
within its own budget. Results are in DIR/gpu_acceptance.json after every row, messages in
DIR/log.txt; the table is printed last. A part that is cut off keeps its rows. Repeat the command to
go on: a part that is complete, from the same code and device, is not run again.

dpvision must be installed, not only found by a path: scripts/gpu_wheelhouse.sh makes the wheels for
a machine without a package index. With --device cpu everything runs at tiny sizes: that shows that
the script and the checks work, not how fast a GPU is.

Exit status: 0 if every check holds and every part is complete, 1 if a check or a part fails, 2 if
nothing could run, 75 if parts are left.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, LOG = "gpu_acceptance.json", "log.txt"
_INCOMPLETE = 75
_START_S = 240.0
"""A process that has not begun after this time will not."""
_LEAST = 0.4
"""A part is begun only if this share of its budget is left."""


@dataclass(frozen=True)
class Part:
    """A function of ``gpu_parts.py`` or ``gpu_checks.py`` that yields rows."""

    name: str
    what: str
    budget_s: float
    """Seconds that it plans with on a GPU; it is stopped after one and a half times as long."""


CHECKS = (
    Part("noise", "noise: known answers, the CPU's words and grid points, the law", 40),
    Part("totals", "totals over passes are float64", 15),
    Part("gradients", "one pass against vmap in float32, bfloat16, float16 and compiled", 110),
    Part("bits", "place and company of rows keep bits", 40),
    Part("contributions", "adversarial records stay within C", 50),
)
CLIPPING = (
    Part("clip_mae_base", "clipping: ViT-Base MAE, time and memory", 100),
    Part("clip_cap_base", "clipping: Base captioner, time and memory", 120),
)
LARGE = (
    Part("clip_mae_large", "clipping: ViT-Large MAE", 90),
    Part("clip_cap_large", "clipping: Large captioner", 100),
)
STEPS = (
    Part(
        "step_mae_base", "a whole step from JPEG files: load, clip, totals, noise, optimizer", 120
    ),
)
PARTS = (
    *CHECKS,
    *CLIPPING,
    Part("noise_speed", "normals a second, and the release of 99 M parameters", 40),
    *STEPS,
    Part("textures", "procedural textures a second", 50),
    Part("end_to_end", "train, stop, resume, adapt, report and verify as commands", 150),
    Part("batches", "largest physical batch at Base", 60),
    *LARGE,
    Part("features", "features of patches and scattering a second", 30),
)
BY_NAME = {part.name: part for part in PARTS}
CHECKED = {part.name for part in CHECKS} | {"end_to_end"}


@dataclass(frozen=True)
class Bar:
    """A bound on a figure: at most, or at least where ``least``."""

    figure: str
    bound: float
    least: bool = False


BARS = {
    "clip_mae_base": [Bar("one_pass/time_ratio", 1.10)],
    "clip_cap_base": [Bar("one_pass/time_ratio", 1.10)],
    "clip_mae_large": [Bar("one_pass/time_ratio", 1.06)],
    "clip_cap_large": [Bar("one_pass/time_ratio", 1.06)],
    "step_mae_base": [Bar("time_ratio", 1.12)],
    "batches": [
        Bar(f"{case}/physical_batch_ratio", 0.9, least=True) for case in ("mae_base", "cap_base")
    ],
    "noise_speed": [Bar("share of a step of 98,304 records", 0.02)],
    "textures": [Bar("224px/fused/images_per_s", 20_000, least=True)],
}
"""On an H100 in bfloat16; on a CPU no bar is held against a figure."""


def figures(name: str, found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The figures of a part that bars name, and those worth a line; empty if the part has no
    result.
    """
    rows = found.get(name, {}).get("rows", [])
    values = {(r["case"], r["variant"], r["metric"]): r["value"] for r in rows}
    if name in CHECKED:
        return {case: value for (case, _, metric), value in values.items() if metric == "value"}
    if name.startswith("clip_"):
        return _clipping_figures(
            {(variant, metric): value for (_, variant, metric), value in values.items()}
        )
    if name == "batches":
        return _batch_figures(values)
    if name.startswith("step_"):
        shown = ("time_ratio", "cpu_ratio", "fill", "records", "load_s", "clip_s", "step_s")
        ours = {
            m: v for (_, variant, m), v in values.items() if variant == "private" and m in shown
        }
        return ours | {
            f"non_private/{m}": v
            for (_, variant, m), v in values.items()
            if variant == "non_private" and m in ("load_s", "step_s")
        }
    metrics = {
        "noise_speed": ("million_per_s", "time_s"),
        "textures": ("images_per_s",),
        "features": ("ms_per_image",),
    }[name]
    made = {
        f"{case}/{variant}/{metric}": value
        for (case, variant, metric), value in values.items()
        if metric in metrics
    }
    if name == "noise_speed":
        release = [
            v
            for (case, v_, m), v in values.items()
            if case.startswith("privatize") and v_ in ("cuda", "threads_1") and m == "time_s"
        ]
        rates = _rates(found.get("clip_mae_base", {}).get("rows", []))
        if release and rates:
            made["share of a step of 98,304 records"] = release[0] / (
                release[0] + 98_304 / max(rates)
            )
    return made


def _rates(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Records a second of the one-pass variants."""
    return [
        r["value"]
        for r in rows
        if r["metric"] == "records_per_s" and r["variant"].startswith("one_pass")
    ]


def _clipping_figures(values: dict[tuple[str, str], float]) -> dict[str, float]:
    """The best one-pass variant against the best non-private one."""

    def best(kind: str, metric: str, pick: Callable[[Sequence[float]], float]) -> float:
        found = [
            v for (variant, m), v in values.items() if variant.startswith(kind) and m == metric
        ]
        return pick(found) if found else float("nan")

    made = {
        f"{kind}/time_ratio": best(kind, "time_ratio", min) for kind in ("one_pass", "opacus_ghost")
    }
    made["one_pass/memory_ratio"] = best("one_pass", "memory_ratio", min)
    made |= {
        f"{kind}/records_per_s": best(kind, "records_per_s", max)
        for kind in ("non_private", "one_pass")
    }
    return {name: value for name, value in made.items() if value == value}


def _batch_figures(values: dict[tuple[str, str, str], float]) -> dict[str, float]:
    made: dict[str, float] = {}
    for case in dict.fromkeys(case for case, _, _ in values):
        sizes = {
            variant: v
            for (c, variant, metric), v in values.items()
            if c == case and metric == "max_physical_batch"
        }
        made |= {f"{case}/{variant}": size for variant, size in sizes.items()}
        ours, plain = (
            [v for variant, v in sizes.items() if variant.startswith(kind)]
            for kind in ("one_pass", "non_private")
        )
        if ours and plain:
            made[f"{case}/physical_batch_ratio"] = max(ours) / max(plain)
    return made


def table(found: dict[str, dict[str, Any]], device: str) -> tuple[str, bool]:
    """The lines to read, and whether every check holds and no part failed."""
    lines, good = [], True
    for part in PARTS:
        result = found.get(part.name)
        if result is None:
            lines.append(f"{part.name:<16} -")
            continue
        status = result["status"]
        if status != "complete":
            good = good and not status.startswith("failed")
            lines.append(
                f"{part.name:<16} {status.upper() if status.startswith('failed') else status}, "
                f"{len(result['rows'])} rows kept"
            )
        shown = figures(part.name, found)
        if part.name in CHECKED:
            bound = {r["case"]: r["value"] for r in result["rows"] if r["metric"] == "bound"}
            wrong = {
                claim: value
                for claim, value in shown.items()
                if not value <= bound.get(claim, float("nan"))
            }
            good = good and not wrong
            lines.append(
                f"{part.name:<16} {len(shown) - len(wrong)} of {len(shown)} checks hold{'':<26} "
                f"{result['seconds']:>6.0f} s"
            )
            lines += [
                f"{'':<16}   WRONG {claim}: {value:.4g}, at most "
                f"{bound.get(claim, float('nan')):.4g}"
                for claim, value in wrong.items()
            ]
            notes = [r for r in result["rows"] if r["metric"] == "note"]
            lines += [f"{'':<16}   {r['case']}: {r['value']:.4g}" for r in notes]
            continue
        bars = {bar.figure: bar for bar in BARS.get(part.name, [])}
        for figure, value in shown.items():
            verdict = _verdict(bars.pop(figure, None), value) if device == "cuda" else ""
            lines.append(f"{part.name:<16} {figure:<44} {value:>10.4g}  {verdict}".rstrip())
        lines += [
            f"{part.name:<16} {figure:<44} {'-':>10}  not measured"
            for figure in bars
            if device == "cuda"
        ]
    return "\n".join(lines), good


def _verdict(bar: Bar | None, value: float) -> str:
    if bar is None:
        return ""
    met = value >= bar.bound if bar.least else value <= bar.bound
    return f"{'ok' if met else 'MISSED'}, bar {bar.bound:g}"


class Worker:
    """A process that runs parts on request, so that torch and the GPU are started once; a new one
    follows a part that kills it.
    """

    def __init__(self, device: str, log: Path) -> None:
        self._log = open(log, "a")
        # Commands of a part run in other folders.
        paths = [
            os.path.abspath(path)
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path
        ]
        environment = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "gpu_parts.py"), device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        first = self._events.get(timeout=_START_S)
        if "environment" not in first:
            self.stop()
            _refuse(
                f"--device={device}: {first.get('failed', first)}; see {log}. Use --device cpu "
                "to try the script at tiny sizes."
            )
        self.environment: dict[str, Any] = first["environment"]
        """Device, versions, commit and date."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(
            {"failed": f"the process ended with status {self._process.wait()}", "dead": True}
        )

    def run(
        self, part: Part, limit_s: float, keep: Callable[[dict[str, Any]], None]
    ) -> tuple[str, bool]:
        """Run a part and pass on its rows.

        Returns:
            "complete", "stopped after N s" or "failed: reason", and whether the process is still of
            use.
        """
        end, stdin = time.monotonic() + limit_s, self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(
                json.dumps({"part": part.name, "budget_s": min(part.budget_s, limit_s)}) + "\n"
            )
            stdin.flush()
        while True:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return f"stopped after {limit_s:.0f} s", False
            if "row" in event:
                keep(event["row"])
            elif "failed" in event:
                return f"failed: {event['failed']}; see {LOG}", "dead" not in event
            else:
                return "complete", True

    def stop(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._log.close()


def code() -> str:
    """Digest of the installed package and of the benchmarks; results of other code are not taken
    for this one's.

    Raises:
        SystemExit: dpvision is not installed, or the installed sources are not those of this
            checkout.
    """
    spec = importlib.util.find_spec("dpvision")
    try:
        importlib.metadata.version("dpvision")
    except importlib.metadata.PackageNotFoundError:
        where = "is found by its path alone" if spec else "is not there"
        _refuse(
            f"dpvision {where}; expected an installed package. Run scripts/gpu_wheelhouse.sh and "
            "install its wheels, or pip install -e ."
        )
    assert spec is not None and spec.origin is not None
    installed, checkout = Path(spec.origin).parent, HERE.parent / "src" / "dpvision"
    ours = _digest(installed)
    if checkout.is_dir() and _digest(checkout) != ours:
        _refuse(
            f"dpvision in {installed} has other sources than {checkout}; expected the same. Run "
            "scripts/gpu_wheelhouse.sh again."
        )
    return ours[:8] + _digest(HERE)[:8]


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def requirements() -> tuple[list[str], list[str]]:
    """What dpvision requires and is missing here, and what is there in a version that it does not
    admit.
    """
    from packaging.requirements import Requirement

    missing, others = [], []
    for text in importlib.metadata.requires("dpvision") or []:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            try:
                version = importlib.metadata.version(asked.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(asked.name)
                continue
            if not asked.specifier.contains(version, prereleases=True):
                others.append(f"{asked.name} {version}, {asked.specifier} is asked for")
    return missing, others


def _refuse(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the results; kept between calls")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=12.0, help="time of this call")
    parser.add_argument(
        "--parts", help="some of the parts, separated by commas; default: all, in order"
    )
    parser.add_argument("--again", action="store_true", help="run complete parts too")
    parser.add_argument(
        "--list", action="store_true", help="print the parts with their budgets and exit"
    )
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{part.name:<16} {part.budget_s:>4.0f} s  {part.what}" for part in PARTS))
        return
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    asked = list(BY_NAME) if args.parts is None else args.parts.split(",")
    unknown = [name for name in asked if name not in BY_NAME]
    if unknown:
        _refuse(f"--parts: {unknown[0]!r}; expected some of {', '.join(BY_NAME)}. See --list.")
    if args.out is None or not 0 < args.minutes <= 24 * 60:
        _refuse(
            "--out is missing; expected a folder."
            if args.out is None
            else f"--minutes: {args.minutes}; expected more than 0. Use 12."
        )
    end = time.monotonic() + 60 * args.minutes
    digest = code()
    missing, others = requirements()
    if missing:
        _refuse(
            f"missing: {', '.join(missing)}; expected what dpvision requires. Carry their wheels "
            "(scripts/gpu_wheelhouse.sh)."
        )
    if (
        args.device == "cuda"
        and subprocess.run(
            [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
        ).returncode
    ):
        _refuse(
            "--device=cuda: torch finds no GPU; expected one. Use --device cpu to try the "
            "script at tiny sizes."
        )
    for line in others:
        print(f"note: {line}", file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    found, left = _run_parts(args, asked, digest, end)
    shown, good = table(found, args.device)
    print(shown)
    if left:
        print(f"left: {', '.join(left)}. Repeat the command.")
    return 1 if not good else _INCOMPLETE if left else 0


def _run_parts(
    args: argparse.Namespace, asked: list[str], digest: str, end: float
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    path, worker, left = args.out / RESULTS, None, []
    found: dict[str, dict[str, Any]] = {}
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier["code"] == digest and earlier["device"] == args.device:
            found = {result["part"]: result for result in earlier["parts"]}

    def write() -> None:
        kept = {
            "benchmark": "gpu_acceptance",
            "code": digest,
            "device": args.device,
            "parts": list(found.values()),
        }
        path.with_suffix(".new").write_text(json.dumps(kept, indent=1) + "\n")
        path.with_suffix(".new").replace(path)

    try:
        for part in (part for part in PARTS if part.name in asked):
            before = found.get(part.name)
            if before is not None and before["status"] == "complete" and not args.again:
                continue
            remaining = end - time.monotonic()
            if remaining < (_LEAST * part.budget_s if args.device == "cuda" else 1):
                left.append(part.name)
                continue
            print(f"{part.name}: {part.what} ...", file=sys.stderr, flush=True)
            worker = worker or Worker(args.device, args.out / LOG)
            started, rows = time.monotonic(), []  # type: float, list[dict[str, Any]]

            def keep(
                row: dict[str, Any],
                part: Part = part,
                rows: list[dict[str, Any]] = rows,
                before: Any = before,
            ) -> None:
                rows.append(row)
                if before is None or len(rows) >= len(before["rows"]):
                    found[part.name] = {
                        "part": part.name,
                        "status": "cut off",
                        "seconds": 0.0,
                        "rows": rows,
                    }
                    write()

            limit_s = (
                min(1.5 * part.budget_s, remaining) if args.device == "cuda" else remaining
            )  # budgets are a GPU's
            status, useful = worker.run(part, limit_s, keep)
            seconds = time.monotonic() - started
            if status == "complete" or before is None or len(rows) >= len(before["rows"]):
                found[part.name] = {
                    "part": part.name,
                    "status": status,
                    "seconds": seconds,
                    **worker.environment,
                    "rows": rows,
                }
                write()
            print(f"{part.name}: {status}, {seconds:.0f} s", file=sys.stderr, flush=True)
            if status.startswith("stopped"):
                left.append(part.name)
            if not useful:
                worker.stop()
                worker = None
    finally:
        if worker is not None:
            worker.stop()
    return found, left


if __name__ == "__main__":
    main()
