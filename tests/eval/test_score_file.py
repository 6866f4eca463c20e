"""Files of scores are read by pages and checks that measure nothing."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["dpvision.eval.score_file", "dpvision.report.statement", "dpvision.report.verify"])
def test_reading_scores_imports_no_protocol(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in sys.modules if name.startswith(('dpvision.eval.', 'sklearn'))])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == {"dpvision.eval.score", "dpvision.eval.score_file"}
