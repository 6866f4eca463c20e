"""Tests on the strict device and on fake CUDA tensors, each in a process of its own.

Torch keeps a device that was registered, and fake tensors fail where other tests have touched CUDA.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cases",
    [["cases_strict_device.py", "cases_crossings.py"], ["cases_fake_cuda.py"]],
    ids=["strict", "fake"],
)
def test_cases_pass_in_a_process_of_their_own(cases: list[str], marked: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked]
    argv = [sys.executable, "-m", "pytest", *options, *(str(HERE / name) for name in cases)]
    apart = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(argv, cwd=HERE.parents[1], env=apart, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
