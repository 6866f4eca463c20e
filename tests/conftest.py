"""One thread per process: pytest-xdist runs several, and two pools of threads on two cores stand in each other's way."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
