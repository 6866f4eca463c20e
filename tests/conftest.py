"""One thread per process: pytest-xdist runs several, and two pools of threads on two cores stand in
each other's way.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).parent / "oracles"))

torch.set_num_threads(1)
