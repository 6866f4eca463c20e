"""Small recipes and their data, for runs on a device that is none."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from golden_losses import NUM_RECORDS, VOCABULARY

from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import train_tokenizer
from dpvision.synthetic.scenes import make_scene


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private store of 60 scenes, and a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    with patch("secrets.token_bytes", lambda count: b"k" * count):
        write_scenes(folder / "scenes", NUM_RECORDS, 24, public=False)
    train_tokenizer([make_scene(i, 16).caption for i in range(500)], VOCABULARY).save(
        folder / "tokenizer.json"
    )
    return folder / "scenes", folder / "tokenizer.json"
