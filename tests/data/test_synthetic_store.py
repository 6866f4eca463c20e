import io

import numpy as np
import pytest
from PIL import Image

from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.synthetic.scenes import LABELS, make_scene


def test_scenes_are_stored_without_loss_with_caption_and_label(tmp_path):
    store = write_scenes(tmp_path / "s", 12, 32, first=100)
    assert store.visibility == "public"
    assert store.label_names == list(LABELS)
    for i in range(12):
        scene, record = make_scene(100 + i, 32), store.record(i)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(record.image))), scene.image)
        assert record.captions == (scene.caption,)
        assert record.labels == (scene.label,)


def test_scenes_can_stand_in_for_a_private_set(tmp_path):
    assert write_scenes(tmp_path / "s", 2, public=False).visibility == "private"


def test_no_scenes_is_an_error(tmp_path):
    with pytest.raises(DataError, match="num=0"):
        write_scenes(tmp_path / "s", 0)


@pytest.mark.slow
def test_scenes_from_several_processes_are_the_same(tmp_path):
    one, two = (write_scenes(tmp_path / str(w), 150, 32, workers=w) for w in (1, 2))
    assert [one.read(i) for i in range(150)] == [two.read(i) for i in range(150)]
