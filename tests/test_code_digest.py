"""``code_sha256`` is the same for one version's code wherever it lies, and another for any other
code.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dpvision.code_digest import CONSTANTS, TEXTS, code_digest
from dpvision.runs.run import code_versions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpvision"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(PACKAGE, tmp_path / "elsewhere", ignore=lambda *_: ["__pycache__"])


def test_the_run_has_the_digest_of_the_code_that_ran() -> None:
    import dpvision

    assert code_versions()["code_sha256"] == code_digest(Path(dpvision.__file__).parent)


def test_it_does_not_depend_on_place_line_ends_times_modes_and_compiled_files(copy: Path) -> None:
    for path in sorted(copy.rglob("*")):
        if path.suffix in TEXTS:
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
            path.chmod(0o755)
            os.utime(path, (1, 1))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__/dp.cpython-312.pyc").write_bytes(b"x")
    (copy / ".DS_Store").write_bytes(b"x")
    assert code_digest(copy) == code_digest(PACKAGE)


@pytest.mark.parametrize("kind", [*TEXTS, *CONSTANTS])
def test_any_change_of_a_file_its_name_or_their_number_is_another_digest(
    kind: str, copy: Path
) -> None:
    whole = code_digest(copy)
    first = min(path for path in copy.rglob(f"*{kind}") if path.is_file())
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert code_digest(copy) != whole
    first.write_bytes(content)
    moved = first.rename(first.with_name(f"x{first.name}"))
    assert code_digest(copy) != whole
    moved.rename(first)
    (copy / f"more{kind}").write_bytes(b"")
    assert code_digest(copy) != whole
    (copy / f"more{kind}").unlink()
    assert code_digest(copy) == whole


def test_two_files_are_not_taken_for_one(tmp_path: Path) -> None:
    """Names and contents were joined without a border between files."""
    for name, files in (("a", {"a.py": "1\n", "b.py": "2\n"}), ("b", {"a.py": "1\nb.py\x002\n"})):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    assert code_digest(tmp_path / "a") != code_digest(tmp_path / "b")


def test_the_command_of_the_security_page_gives_it() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    (command,) = [line.strip() for line in page.splitlines() if "xargs sha256sum" in line]
    done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == code_digest(PACKAGE)


def test_the_script_names_the_digests_of_revisions() -> None:
    script = [sys.executable, str(ROOT / "scripts/code_digest.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{code_digest(PACKAGE)} working tree\n"
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    changed = subprocess.run(
        ["git", "status", "--porcelain", "src", "docs/statement.schema.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    done = subprocess.run(
        [*script, "HEAD", "nowhere"], capture_output=True, text=True, check=False, env=environment
    )
    if not changed.stdout:
        assert done.stdout == f"{code_digest(PACKAGE)} HEAD\n"
    assert done.returncode == 1 and "expected a tag or commit" in done.stderr


@pytest.mark.slow
def test_a_wheel_and_an_sdist_have_the_digest_of_the_checkout(tmp_path: Path) -> None:
    """With every file of the checkout's package: one that a wheel lacks would be missed at run
    time.
    """
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", symlinks=True)
    shutil.copytree(ROOT / "docs", source / "docs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        "import setuptools.build_meta as b; "
        "print(b.build_sdist('built')); print(b.build_wheel('built'))"
    )
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (source / "built").glob("*.whl")
    (sdist,) = (source / "built").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "wheel")
    with tarfile.open(sdist) as files:
        files.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert code_digest(tmp_path / "wheel" / "dpvision") == code_digest(PACKAGE)
    assert code_digest(unpacked / "src" / "dpvision") == code_digest(PACKAGE)
