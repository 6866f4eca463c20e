"""What ``import dpvision`` offers, and that it stays cheap."""

import subprocess
import sys

import dpvision


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    for name in dpvision.__all__:
        assert name in dir(dpvision) and callable(getattr(dpvision, name))


def test_import_and_plan_need_no_torch() -> None:
    code = "import sys, dpvision; dir(dpvision); dpvision.make_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert dpvision.__version__ == version("dpvision")
