"""Files of scores are read by pages and checks that measure nothing."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_reading_scores_imports_no_protocol() -> None:
    loaded = "*[name for name in sys.modules if name.startswith(('dpvision.eval.', 'sklearn'))]"
    code = f"import sys, dpvision.statement.statement, dpvision.statement.verify; print({loaded})"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(found) == {"dpvision.eval.score", "dpvision.eval.score_file"}
