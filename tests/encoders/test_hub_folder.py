"""What a folder says beside its weights."""

import json

import pytest

from dpvision.data.transform import LibraryResize
from dpvision.encoders.hub_folder import image_settings, licence_of
from dpvision.errors import CheckpointError


@pytest.mark.parametrize(
    ("readme", "config", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- vision\n---\n# Model", {}, "apache-2.0"),
        ("---\nlicense: 'mit' \n---\n", {}, "mit"),
        ("---\nlicense: other\nlicense_name: dinov3-license\n---\n", {}, "dinov3-license"),
        ("---\nlicense: other\n---\n", {}, "other"),
        ("# Model\nlicense: mit\n", {}, None),
        ("---\ntags: []\n---\nlicense: mit\n", {}, None),
        (None, {"license": "mit"}, "mit"),
        (None, {"pretrained_cfg": {"license": "cc-by-nc-4.0"}}, "cc-by-nc-4.0"),
        (None, {"license": 3}, None),
        (None, None, None),
    ],
)
def test_the_licence_is_the_one_that_the_folder_states(tmp_path, readme, config, licence):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert licence_of(tmp_path) == licence


def test_image_settings_are_read_from_the_keys_of_an_export():
    given = {
        "dpvision.mean": "[0.1, 0.2, 0.3]",
        "dpvision.std": "[0.5, 0.5, 0.5]",
        "dpvision.image_size": "[64, 64]",
        "dpvision.resize": "null",
        "dpvision.crop": '"centre"',
        "dpvision.own_sizes": "[32, 64]",
        "dpvision.library": '{"side": 72, "keep_aspect": true, "filter": "bilinear"}',
        "other": "{",
    }
    found = image_settings(given, "x")
    assert found == {
        "mean": (0.1, 0.2, 0.3),
        "std": (0.5, 0.5, 0.5),
        "image_size": 64,
        "own_sizes": (32, 64),
        "library": LibraryResize(72, True, "bilinear"),
    }, "without a resize, the crop is the centred square"
    found = image_settings(given | {"dpvision.resize": "80"}, "x")
    assert (found["resize"], found["crop"]) == (80, "centre")
    assert image_settings({}, "x") == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mean", "[0.1, 0.2]"),
        ("mean", "[0.1, 0.2, NaN]"),
        ("mean", "grey"),
        ("std", "[0.5, 0, 0.5]"),
        ("image_size", "[64, 32]"),
        ("image_size", "0"),
        ("image_size", "true"),
        ("image_size", "[]"),
        ("resize", "64.5"),
        ("crop", '"left"'),
        ("own_sizes", "[]"),
        ("own_sizes", "[64, 32]"),
        ("own_sizes", "[32, 48]"),
        ("own_sizes", "64"),
        ("library", "true"),
        ("library", '{"side": 72}'),
        ("library", '{"side": "72", "keep_aspect": true}'),
        ("library", '{"side": 72, "keep_aspect": 1}'),
        ("library", '{"side": 72, "keep_aspect": true, "filter": "fast"}'),
        ("library", '{"side": 63, "keep_aspect": true}'),
    ],
)
def test_other_image_settings_are_refused_by_name(name, text):
    with pytest.raises(CheckpointError, match=f"dpvision.{name}="):
        image_settings({"dpvision.image_size": "64", f"dpvision.{name}": text}, "x")
