"""pyproject.toml and the pinned versions resolve on every Python that the package admits."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_NO_NETWORK = r"error sending request|dns error|connect|timed? ?out|network"


def _resolve(python: str, *inputs: str) -> dict[str, str]:
    """Package -> version, from wheels alone, by the resolver of `make setup`.

    Skips where uv is not installed or no package index is in reach.
    """
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip(f"no {uv.name} beside {sys.executable}; run the tests from `make setup`")
    command = [str(uv), "pip", "compile", "--quiet", "--no-build", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, "--python-version", python, *inputs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode and re.search(_NO_NETWORK, done.stderr, flags=re.I):
        pytest.skip(f"no package index: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, flags=re.M))


def test_the_oldest_python_tried_is_the_oldest_that_is_admitted() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_all_requirements_resolve_from_wheels(python: str) -> None:
    found = _resolve(python, "pyproject.toml", "--all-extras")
    names = {re.split(r"[<>=\[ ]", line)[0].lower() for line in PROJECT["dependencies"]}
    assert names <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_fit_the_requirements_and_leave_none_open(python: str) -> None:
    """numpy 2.5 and scipy 1.18 need Python 3.12: the lock has a line for each side."""
    found = _resolve(python, "pyproject.toml", "requirements.lock", "--extra", "dev")
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), flags=re.M)
    assert set(found.items()) <= set(pins)
