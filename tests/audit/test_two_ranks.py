"""Two processes under torchrun (gloo) are audited together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpvision.config import RunConfig, to_dict

SCRIPT = """
import json, os
from pathlib import Path
from dpvision.audit import acceptance, white_box
from dpvision.config import RunConfig, from_dict

acceptance._STEPS = 15
config = from_dict(RunConfig, json.loads(Path("config.json").read_text()))
result = white_box(config, lambda *_: None)
Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
"""


@pytest.mark.slow
def test_two_ranks_are_accepted_and_find_the_same(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *ranks, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2))
    assert first == second
    assert first["passed"] and first["ranks"] == 2
