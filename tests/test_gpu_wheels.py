"""The check of the wheels for a machine without a package index: what is missing, unfit or too new
there is found.
"""

import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_wheels  # noqa: E402


def wheel(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = (), source: str = "x = 1\n"
) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {text}" for text in requires),
        ]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{name}/__init__.py", source)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": gpu_wheels.Version("2.11.0"), "pillow": None}
    monkeypatch.setattr(gpu_wheels, "machine", lambda: there)


def test_a_complete_folder_passes(tmp_path: Path) -> None:
    wheel(
        tmp_path,
        "dpvision",
        "0.1.0",
        (
            "torch>=2.11",
            "pillow>=12",
            "tyro>=1",
            'opacus>=1.6; extra == "bench"',
            'tomli; python_version < "3.11"',
        ),
    )
    wheel(tmp_path, "tyro", "1.0.17", source="type A = int\n")
    assert gpu_wheels.check(tmp_path, "3.12") == []


@pytest.mark.parametrize(
    ("requires", "source", "said"),
    [
        (("ftfy",), "", "dpvision requires ftfy: not there"),
        (("torch>=2.12",), "", "dpvision requires torch>=2.12: version 2.11.0 is there"),
        (("tyro<1",), "", "dpvision requires tyro<1: version 1.0.17 is there"),
        ((), "try:\n    pass\nexcept KeyError, ValueError:\n    pass\n", "dpvision/__init__.py:3"),
    ],
)
def test_what_would_fail_there_is_named(
    requires: tuple[str, ...], source: str, said: str, tmp_path: Path
) -> None:
    """The last source is Python 3.14's."""
    wheel(tmp_path, "dpvision", "0.1.0", requires, source)
    wheel(tmp_path, "tyro", "1.0.17")
    found = gpu_wheels.check(tmp_path, "3.12")
    assert len(found) == 1 and said in found[0]


def test_a_requirement_of_what_is_carried_counts_too(tmp_path: Path) -> None:
    wheel(tmp_path, "dpvision", "0.1.0", ("tyro",))
    wheel(tmp_path, "tyro", "1.0.17", ("docstring-parser>=0.16",))
    assert gpu_wheels.check(tmp_path, "3.12") == ["tyro requires docstring-parser>=0.16: not there"]


def test_the_real_machines_list_and_the_lock_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    there, pins = gpu_wheels.machine(), gpu_wheels.locked("3.12")
    assert (
        str(there["torch"]) == "2.11.0" and there["pillow"] is None and "dp-accounting" not in there
    )
    assert pins["numpy"] > gpu_wheels.locked("3.11")["numpy"] and "dp-accounting" in pins
    assert "torch==2.11.0" in gpu_wheels.on_machine("3.12") and "numpy" in gpu_wheels.on_machine(
        "3.11"
    )
