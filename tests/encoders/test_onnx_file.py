"""ONNX files as encoders. The oracle is the torch model that was exported, or arithmetic."""

import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpvision.config import IMAGENET_MEAN
from dpvision.encoders.identity import check_alone, check_places, check_same, describe
from dpvision.encoders.open import open_encoder
from dpvision.errors import CheckpointError, ConfigError
from dpvision.weights import contents, lineage_record

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SIZE = 16


class Convnet(nn.Module):
    """Two convolutions, a map in between, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 12, 3, stride=2), nn.Conv2d(12, 20, 3)

    def map(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x_BCHW).relu())

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.map(x_BCHW).relu().mean((2, 3))


def _write(model: nn.Module, path: Path, **metadata: str) -> Path:
    """Write a model's graph by hand, so that the tests need no exporter."""
    weights = [numpy_helper.from_array(t.numpy(), n) for n, t in model.state_dict().items()]
    nodes = [
        helper.make_node("Conv", ["x", "first.weight", "first.bias"], ["a"], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second.weight", "second.bias"], ["map"]),
        helper.make_node("Relu", ["map"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["vector"], axes=[2, 3], keepdims=0),
    ]
    return _save(nodes, "vector", ["b", 20], path, weights=weights, **metadata)


def _save(nodes, output, shape, path, *, weights=(), inputs=None, **metadata) -> Path:
    inputs = ["b", 3, SIZE, SIZE] if inputs is None else inputs
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
        list(weights),
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)
    helper.set_model_props(made, {f"dpvision.{key}": text for key, text in metadata.items()})
    onnx.save(made, path)
    return path


def _images(num: int = 5) -> torch.Tensor:
    return torch.randn(num, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def test_an_output_and_a_value_inside_are_those_of_the_exported_model(tmp_path):
    model = Convnet().eval()
    file = _write(model, tmp_path / "m.onnx")
    vector, inner = (open_encoder(f"onnx:{node}@{file}") for node in ("vector", "map"))
    x_BCHW = _images()
    with torch.no_grad():
        assert torch.allclose(vector(x_BCHW), model(x_BCHW), atol=1e-5)
        found, map_BDHW = inner.poolings(x_BCHW), model.map(x_BCHW)
    assert torch.allclose(found["mean"], map_BDHW.mean((2, 3)), atol=1e-5)
    assert list(found) == ["mean", "2x2"] and vector.image_size == SIZE
    assert (vector.mean, vector.family, vector.backbone) == (IMAGENET_MEAN, "fixed", None)
    assert [entry["visibility"] for entry in vector.lineage] == ["undeclared"]
    assert check_alone(vector) == ("value", 20) and check_alone(inner) == ("mean", 20)
    check_places(inner, "mean", 16)


def test_tokens_are_pooled_without_a_class_token(tmp_path):
    shape = numpy_helper.from_array(torch.tensor([0, 3, 256]).numpy(), "shape")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["tokens"], perm=[0, 2, 1]),
    ]
    file = _save(nodes, "tokens", ["b", 256, 3], tmp_path / "t.onnx", weights=[shape])
    x_BCHW = _images()
    assert torch.allclose(
        open_encoder(f"onnx:tokens@{file}")(x_BCHW), x_BCHW.mean((2, 3)), atol=1e-6
    )


def test_a_graph_that_takes_the_mean_of_the_batch_is_refused(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["d"]),
        helper.make_node("ReduceMean", ["d"], ["v"], axes=[3], keepdims=0),
        helper.make_node("Flatten", ["v"], ["z"]),
    ]
    encoder = open_encoder(f"onnx:z@{_save(nodes, 'z', ['b', 48], tmp_path / 'm.onnx')}")
    with pytest.raises(ConfigError, match="depend on the other images of a batch"):
        check_alone(encoder)


def test_a_graph_for_one_image_is_run_image_by_image(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=1),
        helper.make_node("Flatten", ["m"], ["z"]),
    ]
    file = _save(nodes, "z", [1, 3], tmp_path / "m.onnx", inputs=[1, 3, SIZE, SIZE])
    x_BCHW = _images()
    assert torch.allclose(open_encoder(f"onnx:z@{file}")(x_BCHW), x_BCHW.mean((2, 3)), atol=1e-6)


def test_a_graph_given_as_weights_gets_the_name_that_opens_it(tmp_path):
    file = _write(Convnet(), tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match=r"Open it as onnx:NODE@.*m\.onnx"):
        open_encoder(f"timm:test_vit@{file}")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no limit without /proc")
@pytest.mark.parametrize("shown", [True, False], ids=["constant", "shape of the input"])
def test_a_graph_that_asks_for_many_gigabytes_is_refused(tmp_path, shown):
    """A few hundred bytes of file, 6 GB of zeros, which the machine may well have."""
    side = 1_500_000_000 // 3
    sides = numpy_helper.from_array(torch.tensor([3, side] if shown else [side, 1]).numpy(), "n")
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["big"])
        if shown
        else helper.make_node("Expand", ["x0", "n"], ["big"]),
        helper.make_node("ReduceMean", ["big"], ["zero"], axes=[0, 1], keepdims=0),
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Add", ["m", "zero"], ["z"]),
    ]
    if not shown:  # one row of three numbers of the input, repeated
        starts, ends, axes = (
            numpy_helper.from_array(torch.tensor(v).numpy(), n)
            for n, v in (("s", [0, 0, 0]), ("e", [1, 1, 1]), ("a", [0, 2, 3]))
        )
        nodes = [
            helper.make_node("Slice", ["x", "s", "e", "a"], ["x4"]),
            helper.make_node("Flatten", ["x4"], ["x0"]),
            *nodes,
        ]
        weights = [sides, starts, ends, axes]
    else:
        weights = [sides]
    file = _save(nodes, "z", ["b", 3], tmp_path / "bomb.onnx", weights=weights)
    assert file.stat().st_size < 1000
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises((CheckpointError, ConfigError), match=r"(?i)alloc"):
        open_encoder(f"onnx:z@{file}")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_size_and_normalisation_are_those_of_the_files_metadata(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=1),
        helper.make_node("Flatten", ["m"], ["z"]),
    ]
    stated = {"mean": "[0.1, 0.2, 0.3]", "std": "[0.5, 0.5, 0.25]", "image_size": "32"}
    made = {"inputs": ["b", 3, "h", "w"]}
    encoder = open_encoder(
        f"onnx:z@{_save(nodes, 'z', ['b', 3], tmp_path / 'a.onnx', **made, **stated)}"
    )
    assert (encoder.image_size, encoder.mean, encoder.std) == (
        32,
        (0.1, 0.2, 0.3),
        (0.5, 0.5, 0.25),
    )
    bare = _save(nodes, "z", ["b", 3], tmp_path / "b.onnx", **made)
    assert open_encoder(f"onnx:z@{bare}").image_size == 224
    assert open_encoder(f"onnx:z@{bare}", image_size=48).image_size == 48


def test_lineage_comes_back_and_the_weights_are_recognised(tmp_path):
    entry = {
        "store_id": "s",
        "visibility": "private",
        "licence": None,
        "run_id": "r",
        "guarantee": None,
    }
    model = Convnet()
    file = _write(model, tmp_path / "m.onnx", lineage=lineage_record(model.state_dict(), [entry]))
    encoder = open_encoder(f"onnx:vector@{file}")
    assert list(encoder.lineage) == [entry] and encoder.confidential
    assert set(contents(model.state_dict().values())) <= set(contents(encoder.tensors()))
    other = lineage_record({"w": torch.ones(3)}, [entry])
    for text, words in ((other, "not that of its tensors"), ("x", "cannot be read")):
        file = _write(model, tmp_path / "bad.onnx", lineage=text)
        with pytest.raises(CheckpointError, match=words):
            open_encoder(f"onnx:vector@{file}")


def test_another_graph_or_other_weights_are_another_encoder(tmp_path):
    model = Convnet()
    encoder = open_encoder(f"onnx:vector@{_write(model, tmp_path / 'm.onnx')}")
    about = describe(encoder, "value", 20)
    check_same(encoder, about, "run")
    model.second.bias.data[3] += 1e-6
    other = open_encoder(f"onnx:vector@{_write(model, tmp_path / 'm.onnx')}")
    with pytest.raises(CheckpointError, match="other weights"):
        check_same(other, about, "run")


def test_weights_outside_the_folder_missing_or_cut_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    made = onnx.load(_write(Convnet(), folder / "m.onnx"))
    onnx.save(
        made, folder / "e.onnx", save_as_external_data=True, location="e.bin", size_threshold=0
    )
    x_BCHW, whole = _images(), open_encoder(f"onnx:vector@{folder / 'm.onnx'}")
    assert torch.equal(open_encoder(f"onnx:vector@{folder / 'e.onnx'}")(x_BCHW), whole(x_BCHW))
    (tmp_path / "e.bin").write_bytes((folder / "e.bin").read_bytes())
    outside = onnx.load(folder / "e.onnx", load_external_data=False)
    for tensor in outside.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../e.bin" if entry.key == "location" else entry.value
    (folder / "out.onnx").write_bytes(outside.SerializeToString())
    (folder / "cut.onnx").write_bytes((folder / "m.onnx").read_bytes()[:-40])
    (folder / "text.onnx").write_text("not a graph")
    for name in ("out", "cut", "text", "missing"):
        with pytest.raises(CheckpointError, match="Copy it again"):
            open_encoder(f"onnx:vector@{folder / name}.onnx")
    (folder / "e.bin").write_bytes((folder / "e.bin").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="Copy it again"):
        open_encoder(f"onnx:vector@{folder / 'e.onnx'}")


def test_a_file_beyond_protobufs_limit_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "huge.onnx").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match="more than 2 GiB"):
        open_encoder(f"onnx:vector@{tmp_path / 'huge.onnx'}")


def test_what_is_no_encoder_is_refused_with_the_remedy(tmp_path):
    file = _write(Convnet(), tmp_path / "m.onnx")
    for spec in ("vector", "@x", f"vector@{''}"):
        with pytest.raises(ConfigError, match="expected onnx:NODE@FILE"):
            open_encoder(f"onnx:{spec}")
    with pytest.raises(ConfigError, match=r"no value 'vektor'; expected an output \(vector\)"):
        open_encoder(f"onnx:vektor@{file}")
    flat = [helper.make_node("ReduceMean", ["x"], ["z"], axes=[0, 2, 3], keepdims=0)]
    with pytest.raises(ConfigError, match="one vector, its tokens or a map"):
        open_encoder(f"onnx:z@{_save(flat, 'z', [3], tmp_path / 'flat.onnx')}")
    same = [helper.make_node("Identity", ["x"], ["z"])]
    for shape in (["b", 1, SIZE, SIZE], [4, 3, SIZE, SIZE], ["b", 3, SIZE, 20], ["b", 3]):
        path = _save(same, "z", shape, tmp_path / "input.onnx", inputs=shape)
        with pytest.raises(ConfigError, match="expected one of float32 images"):
            open_encoder(f"onnx:z@{path}")
    with pytest.raises(ConfigError, match="--ema"):
        open_encoder(f"onnx:vector@{file}", ema=True)


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    file = _write(Convnet(), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'dpvision\[onnx\]'"):
        open_encoder(f"onnx:vector@{file}")
