"""Collect the wheels that a machine without a package index lacks, and check that nothing is
missing there.

    python scripts/gpu_wheels.py collect FOLDER [--python 3.12]   download what dpvision's wheel in
                                                                  FOLDER needs and the machine lacks
    python scripts/gpu_wheels.py check FOLDER [--python 3.12]     every requirement is there or on
                                                                  the machine; sources fit that
                                                                  Python
    python scripts/gpu_wheels.py machine [--python 3.12]          what of dpvision's requirements
                                                                  the machine has, to install
                                                                  elsewhere

The machine's packages are in scripts/gpu_machine.txt; what it has is never carried. Versions are
those of requirements.lock. The wheels are for Linux on x86_64.
"""

import argparse
import email
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
EXTRA = ("opacus", "attrs")
"""Carried as well: Opacus, with which the acceptance compares, and attrs, of which dp-accounting
admits only versions older than 24.
"""
MOST_BYTES = 30 * 10**6
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def machine() -> dict[str, Version | None]:
    """The machine's packages; None where the version is not known."""
    found: dict[str, Version | None] = {}
    for line in (ROOT / "scripts" / "gpu_machine.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = Version(version) if version else None
    return found


def locked(python: str) -> dict[str, Version]:
    """Versions of requirements.lock for this Python."""
    found = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate(_environment(python)):
            (pin,) = asked.specifier
            found[canonicalize_name(asked.name)] = Version(pin.version)
    return found


def _environment(python: str) -> dict[str, str]:
    own = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "extra": "",
    }
    return {**default_environment(), "platform_system": "Linux", "os_name": "posix", **own}  # type: ignore[dict-item]


def requirements(wheel: Path, python: str) -> Iterator[Requirement]:
    """What a wheel requires, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        metadata = email.message_from_bytes(archive.read(name))
    for text in metadata.get_all("Requires-Dist") or []:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate(_environment(python)):
            yield asked


def wheels(folder: Path) -> dict[str, tuple[Version, Path]]:
    """The wheels of a folder by package.

    Raises:
        SystemExit: two versions of one package.
    """
    found: dict[str, tuple[Version, Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        if name in found:
            sys.exit(
                f"{folder}: {path.name} and {found[name][1].name}; expected one version of a "
                "package. Empty the folder."
            )
        found[name] = version, path
    return found


def collect(folder: Path, python: str) -> None:
    """Download, from dpvision's wheel on, every requirement that the machine does not have."""
    there, pins = machine(), locked(python)
    waiting = [path for _, path in wheels(folder).values()]
    for name in EXTRA:
        waiting.append(download(name, pins.get(name), folder, python))
    while waiting:
        for asked in requirements(waiting.pop(), python):
            name = canonicalize_name(asked.name)
            if name not in there and name not in wheels(folder):
                waiting.append(download(name, pins.get(name), folder, python))


def download(name: str, version: Version | None, folder: Path, python: str) -> Path:
    """Download a wheel for the machine's Python, of the locked version where there is one."""
    words = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        "--quiet",
        "--dest",
        str(folder),
    ]
    words += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    asked = name if version is None else f"{name}=={version}"
    if subprocess.run([sys.executable, "-m", "pip", "download", *words, asked]).returncode:
        sys.exit(
            f"{asked}: no wheel for Python {python} on Linux x86_64; expected one. See the "
            "message of pip above."
        )
    return wheels(folder)[canonicalize_name(name)][1]


def check(folder: Path, python: str) -> list[str]:
    """What is wrong with a folder of wheels for the machine: missing or unfit requirements, sources
    of a newer Python, too many bytes.
    """
    there, carried, wrong, unknown = machine(), wheels(folder), [], []
    if "dpvision" not in carried:
        wrong.append("dpvision: no wheel of it")
    for name, (_, path) in carried.items():
        if name in there and name not in EXTRA:
            wrong.append(f"{name}: carried, and on the machine")
        for asked in requirements(path, python):
            other = canonicalize_name(asked.name)
            if other not in there and other not in carried:
                wrong.append(f"{name} requires {asked}: not there")
                continue
            version = carried[other][0] if other in carried else there[other]
            if version is None:
                unknown.append(f"{other}{asked.specifier}")
            elif not asked.specifier.contains(version, prereleases=True):
                wrong.append(f"{name} requires {asked}: version {version} is there")
    wrong += newer_syntax(folder, python)
    size = sum(path.stat().st_size for _, path in carried.values())
    if size > MOST_BYTES:
        wrong.append(f"{size / 1e6:.1f} MB of wheels; expected at most {MOST_BYTES / 1e6:.0f}")
    for name, (version, path) in carried.items():
        print(f"  {name:<18} {version!s:<10} {path.stat().st_size / 1e6:>6.2f} MB")
    print(f"{len(carried)} wheels, {size / 1e6:.1f} MB, for Python {python}")
    print(
        "on the machine in versions that are not known here: "
        f"{', '.join(sorted(set(unknown))) or 'none'}"
    )
    return wrong


def newer_syntax(folder: Path, python: str) -> list[str]:
    """Sources of the wheels and of the benchmarks that need a newer Python, by ruff's parser."""
    target = "py" + python.replace(".", "")
    with tempfile.TemporaryDirectory() as unpacked:
        for _, path in wheels(folder).values():
            zipfile.ZipFile(path).extractall(unpacked)
        words = [
            "check",
            "--isolated",
            "--quiet",
            "--no-cache",
            "--target-version",
            target,
            "--select",
            "E9",
            "--output-format",
            "concise",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, unpacked, str(ROOT / "benchmarks")],
            capture_output=True,
            text=True,
        )
        lines = [
            line.replace(unpacked + "/", "") for line in (done.stdout + done.stderr).splitlines()
        ]
    return lines if done.returncode else []


def on_machine(python: str) -> list[str]:
    """Requirements of dpvision, and theirs, that the machine has: with its versions where these are
    known.
    """
    project = re.search(
        r"^dependencies = \[(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert project is not None
    names = [
        canonicalize_name(Requirement(text).name)
        for text in re.findall(r'"([^"]+)"', project.group(1))
    ]
    there, found = machine(), []
    for name in names:
        if name in there:
            # The machine's NumPy has no wheel for Python 3.11.
            free = there[name] is None or (name == "numpy" and Version(python) < Version("3.12"))
            found.append(name if free else f"{name}=={there[name]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["collect", "check", "machine"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python, as 3.12")
    args = parser.parse_args()
    if args.command == "machine":
        print("\n".join(on_machine(args.python)))
        return
    if args.folder is None or not args.folder.is_dir():
        sys.exit(
            f"{args.command}: {args.folder}; expected a folder with dpvision's wheel. Run "
            "scripts/gpu_wheelhouse.sh."
        )
    if args.command == "collect":
        collect(args.folder, args.python)
    wrong = check(args.folder, args.python)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
