"""One thread per process: pytest-xdist runs several, and two pools of threads on two cores stand in
each other's way.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "oracles"))

torch.set_num_threads(1)

_PASSED: set[Any] = set()


@pytest.fixture(scope="module")
def gates_once() -> Iterator[None]:
    """Runs of a module pass the gates (``train.gates``) once for each model and setting in this
    process, those of its fixtures too.

    For tests of something else than the gates, which take half of the time of a run of a few steps.
    The gates of another model, loss, weights, setting or of replaced checks are run.
    """
    from dpvision.train import gates, start

    def once(config: Any, model: torch.nn.Module, loss_fn: Any) -> None:
        weights = hashlib.sha256(repr(model).encode())
        for name, value in model.state_dict().items():
            weights.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            weights.update(value.contiguous().numpy().tobytes())
        grads = tuple(p.requires_grad for p in model.parameters())
        functions = gates.check_separable, gates.check_exact, gates.check_at_sizes, gates.make_model
        people = config.privacy.unit.draws_people
        settings = config.model, config.views, people, config.seed
        rows = config.hardware.physical_batch_size
        case = (repr(settings), rows, weights.digest(), grads, loss_fn, *functions)
        if case not in _PASSED:
            gates.check_gates(config, model, loss_fn)
            _PASSED.add(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "check_gates", once)
        yield
