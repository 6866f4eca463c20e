"""What ``import dpvision`` offers, and that it stays cheap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dpvision


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    for name in dpvision.__all__:
        assert name in dir(dpvision) and callable(getattr(dpvision, name))


def test_import_and_plan_need_no_torch() -> None:
    code = (
        "import sys, dpvision; dir(dpvision); dpvision.make_plan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("given", "first", "policy"),
    [
        ({}, "", "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "", "ACTIVE"),
        ({"GOMP_SPINCOUNT": "500"}, "", None),
        ({"KMP_BLOCKTIME": "10"}, "", None),
        ({}, "sys.modules['torch'] = None", None),
    ],
    ids=["unset", "policy", "spin count", "block time", "torch is imported"],
)
def test_threads_wait_without_work_unless_the_user_chose(
    given: dict[str, str], first: str, policy: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | given
    code = (
        f"import os, sys; {first or 'pass'}; import dpvision; print({{name: os.environ.get(name) "
        f"for name in {WAITING}}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(dict.fromkeys(WAITING) | given | {"OMP_WAIT_POLICY": policy})


def test_bits_of_products_depend_on_operands_alone_unless_the_user_chose() -> None:
    names = ("MKL_DYNAMIC", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG")
    for given, expected in (
        ({}, ["FALSE", "AUTO", ":4096:8"]),
        ({"MKL_CBWR": "AVX2"}, ["FALSE", "AVX2", ":4096:8"]),
    ):
        environment = {
            name: value for name, value in os.environ.items() if name not in names
        } | given
        code = f"import os, dpvision; print([os.environ.get(name) for name in {names}])"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(expected)


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert dpvision.__version__ == version("dpvision")


TREE_SIZE = Path(__file__).parents[1] / "scripts/tree_size.py"


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (["--help"], 0, "SOURCE is a folder of Python files"),
        (["{empty}"], 2, "has no Python function; expected a package's folder"),
        (["{empty}/missing"], 2, "has no Python function; expected a package's folder"),
        (["{some}"], 0, "total"),
    ],
    ids=["help", "empty", "missing", "some"],
)
def test_tree_size_explains_itself_and_refuses_a_folder_without_code(
    given: list[str], status: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "some").mkdir()
    (tmp_path / "some/a.py").write_text("import os\n\n\ndef f(x):\n    return x\n")
    given = [word.format(empty=tmp_path / "empty", some=tmp_path / "some") for word in given]
    done = subprocess.run(
        [sys.executable, str(TREE_SIZE), *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
