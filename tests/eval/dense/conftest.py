"""Tests of detection and segmentation."""

import torch

torch.set_num_threads(1)  # the models are so small that threads would only wait for each other
