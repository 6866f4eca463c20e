"""Runs of the product that benchmarks compare: `dpvision train`, unless a complete run is there."""

import json
import subprocess
import sys
import time
from pathlib import Path

from dpvision.checkpoint import load_checkpoint, read_manifest
from dpvision.errors import CheckpointError


def trained(root: Path, line: list[str], cwd: Path | None = None) -> Path:
    """The run folder ``root``, made or gone on with by `dpvision train` and the arguments ``line``
    (recipe first, paths from ``cwd``) where it is not complete.

    Several processes may share runs, each with its own; says how long it took.
    """
    if not complete(root):
        line = [*line, "--runs", str(root.parent), "--name", root.name, "--quiet", "--json"]
        if any((base / "config.json").exists() for base in (root, root / "confidential")):
            line.append("--resume")
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "dpvision", "train", *line],
            capture_output=True,
            text=True,
            cwd=cwd,
        )
        if done.returncode:
            raise SystemExit(f"{root.name}: {done.stderr[-2000:]}")
        result = json.loads(done.stdout)
        print(
            f"{root.name}: {result['steps']} steps in {time.monotonic() - start:.0f} s, epsilon "
            f"{result['epsilon']}",
            flush=True,
        )
    return root


def complete(root: Path) -> bool:
    """Whether a run's newest checkpoint is that of its last planned step."""
    try:
        manifest = read_manifest(load_checkpoint(root).path)
    except CheckpointError:
        return False
    return manifest["ledger_steps"] == manifest["plan"]["steps"]
