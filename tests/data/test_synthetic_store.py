import io
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from dpvision.cli.data import SceneLabel
from dpvision.data.synthetic_store import write_scenes, write_textures
from dpvision.errors import DataError
from dpvision.synthetic.scenes import ATTRIBUTES, LABELS, make_scene


def test_scenes_are_stored_without_loss_with_caption_and_label(tmp_path):
    store = write_scenes(tmp_path / "s", 12, 32, first=100)
    assert store.visibility == "public"
    assert store.label_names == list(LABELS)
    for i in range(12):
        scene, record = make_scene(100 + i, 32), store.record(i)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(record.image))), scene.image)
        assert record.captions == (scene.caption,)
        assert record.labels == (scene.label,)


@pytest.mark.parametrize("label", ATTRIBUTES)
def test_the_label_is_the_attribute_that_was_asked_for_and_the_store_names_its_values(
    tmp_path, label
):
    store = write_scenes(tmp_path / "s", 12, 16, first=100, label=label)
    assert store.label_names == list(ATTRIBUTES[label])
    for i in range(12):
        scene, (k,) = make_scene(100 + i, 16), store.record(i).labels
        said = {
            "count": ["one", "two", "three", "four"][len(scene.objects) - 1],
            "light": scene.light,
            "background": scene.background,
        }
        assert ATTRIBUTES[label][k] == said.get(label) or ATTRIBUTES[label][k] == getattr(
            scene.main, label
        )


def test_several_labels_are_those_of_all_objects(tmp_path):
    store = write_scenes(tmp_path / "s", 12, 16, label="colour", multi_label=True)
    for i in range(12):
        assert {store.label_names[k] for k in store.record(i).labels} == {
            thing.colour for thing in make_scene(i).objects
        }


def test_the_command_line_offers_every_attribute():
    assert get_args(SceneLabel) == tuple(ATTRIBUTES)


def test_only_the_scenes_that_were_asked_for_are_kept(tmp_path):
    store = write_scenes(tmp_path / "s", 40, 16, keep=lambda scene: scene.main.colour == "red")
    red = [make_scene(i) for i in range(40) if make_scene(i).main.colour == "red"]
    assert [store.captions(row) for row in range(store.num_records)] == [
        (scene.caption,) for scene in red
    ]


def test_other_captions_can_be_said_of_scenes(tmp_path):
    store = write_scenes(tmp_path / "s", 3, 16, caption_of=lambda scene: f"a {scene.main.shape}")
    assert [store.captions(i) for i in range(3)] == [
        (f"a {make_scene(i).main.shape}",) for i in range(3)
    ]


def test_an_unknown_attribute_is_an_error(tmp_path):
    with pytest.raises(DataError, match="label='size'; expected one of shape, colour"):
        write_scenes(tmp_path / "s", 2, label="size")


def test_scenes_can_stand_in_for_a_private_set(tmp_path):
    assert write_scenes(tmp_path / "s", 2, public=False).visibility == "private"


def test_no_scenes_is_an_error(tmp_path):
    with pytest.raises(DataError, match="num=0"):
        write_scenes(tmp_path / "s", 0)


def test_scenes_from_several_processes_are_the_same(tmp_path):
    one, two = (write_scenes(tmp_path / str(w), 150, 32, workers=w) for w in (1, 2))
    assert [one.read(i) for i in range(150)] == [two.read(i) for i in range(150)]


@pytest.mark.parametrize("write", [write_scenes, write_textures])
def test_a_folder_that_exists_is_refused_before_anything_is_drawn(tmp_path, write, monkeypatch):
    def drawn(*args, **kwargs):
        yield from ()
        raise AssertionError("drawn")

    monkeypatch.setattr("dpvision.data.synthetic_store.ordered_map", drawn)
    with pytest.raises(AssertionError, match="drawn"):
        write(tmp_path / "new", 1000, 16, workers=2)
    with pytest.raises(DataError, match="exists; expected a new folder"):
        write(tmp_path, 1000, 16, workers=2)
