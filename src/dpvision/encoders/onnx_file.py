"""Frozen encoders in ONNX files, run by onnxruntime on the CPU.

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

import contextlib
import hashlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.hub_folder import image_settings
from dpvision.encoders.pooled import PooledNetwork
from dpvision.encoders.weights_file import lineage_of_run_around
from dpvision.errors import CheckpointError, ConfigError
from dpvision.runs.lineage import undeclared_weights, without_lineage
from dpvision.weights import METADATA, recorded_lineage

_MOST_BYTES = (2 << 30) - 1
"""Protobuf's limit for one model."""
_MARGIN_BYTES = 4 << 30
"""Memory that a trial may take on top of the weights: a graph can ask for any amount, however
small its file.
"""
_DEFAULT_SIZE = 224
_REMEDY = "Copy it again, with the files of its weights in the same folder."


def onnx_encoder(
    spec: str, image_size: int | None = None, device: str | torch.device = "cpu"
) -> Encoder:
    """Open a value of an ONNX graph as a frozen encoder, which cannot be fine-tuned.

    The graph's input is float32 images (B, 3, H, W). The value is a vector (B, D), tokens (B, L, D)
    or a map (B, D, H, W). The side of the images is the graph's; where it is open, that of the
    file's metadata (``hub_folder.image_settings``), else ``image_size``, else 224. Mean and
    standard deviation are the metadata's, else ImageNet's.

    Args:
        spec: NODE@FILE, where NODE names an output of the graph or a value inside it.

    Raises:
        ConfigError: onnxruntime is not installed; there is no such value, or it is none of these;
            or the input is another.
        CheckpointError: the file, or a file of its weights, is missing, damaged, outside its
            folder, or too large.
    """
    node, _, file = spec.partition("@")
    if not node or not file:
        raise ConfigError(
            f"encoder: onnx:{spec}; expected onnx:NODE@FILE, where NODE is the name of an output "
            "or of a value inside the graph. Netron shows the names."
        )
    path, shown = Path(file), f"onnx:{node}@{Path(file).name}"
    model, session = _open(path, node)
    about = {entry.key: entry.value for entry in model.metadata_props}
    stated = image_settings(about, str(path))
    name, one_by_one, side = _input(session, str(path))
    side = side or stated.get("image_size") or image_size or _DEFAULT_SIZE
    stated["image_size"] = side
    pool = PooledNetwork(nn.Identity(), nn.Module.__call__, prefix=None)

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        x = x_BCHW.float().cpu().numpy()
        parts = np.split(x, len(x)) if one_by_one else [x]
        made = np.concatenate([session.run([node], {name: part})[0] for part in parts])
        found = torch.from_numpy(made).to(x_BCHW.device).float()
        return {"value": found} if found.ndim == 2 else pool.poolings(found)

    def arrays() -> dict[str, Tensor]:
        digest = np.frombuffer(hashlib.sha256(model.SerializeToString()).digest(), np.uint8)
        return {"graph": torch.from_numpy(digest.copy())} | _weights(model)

    try:
        with _bounded(model.ByteSize()):
            widths = {len(value) for value in poolings(torch.zeros(2, 3, side, side)).values()}
        if widths != {2}:
            raise ValueError(f"{widths} rows for 2 images")
    except Exception as error:  # onnxruntime's errors have many types
        raise ConfigError(
            f"encoder: {shown}: image_size={side} ({_short(error)}); expected one vector, its "
            "tokens or a map for each image. Choose another NODE or size."
        ) from None
    carried = about.get(METADATA)
    lineage = [] if carried is None else recorded_lineage(carried, _weights(model), path)
    lineage += lineage_of_run_around(path) or []
    made = Encoder(
        name=shown,
        image_size=side,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        poolings=poolings,
        family="fixed",
        lineage=tuple(
            lineage or [without_lineage(undeclared_weights(shown, about.get("license")), about)]
        ),
        licence=about.get("license"),
        arrays=arrays,
    )
    return replace(made, **stated)


def _open(path: Path, node: str) -> tuple[Any, Any]:
    """Return the model of a file with ``node`` as its only output, and a session that runs it."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        raise ConfigError(
            "encoder: onnxruntime is not installed; expected it for onnx:NODE@FILE. pip install "
            "'dpvision[onnx]'"
        ) from None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("more than 2 GiB")
        model = onnx.load(path)  # refuses weights outside the folder, or beyond their file's end
    except Exception as error:  # protobuf's and onnx's errors have many types
        raise CheckpointError(
            f"encoder: {path} ({_short(error)}); expected an ONNX file. {_REMEDY}"
        ) from None
    graph = model.graph
    outputs = {output.name: output for output in graph.output}
    inside = {name for part in graph.node for name in part.output if name}
    if node not in outputs and node not in inside:
        raise ConfigError(
            f"encoder: {path} has no value {node!r}; expected an output ({', '.join(outputs)}) or "
            f"one of the {len(inside)} values inside. Netron shows their names."
        )
    chosen = outputs.get(node, onnx.ValueInfoProto(name=node))
    del graph.output[:]
    graph.output.append(chosen)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    try:
        if model.ByteSize() > _MOST_BYTES:
            raise ValueError("more than 2 GiB with its weights")
        with _bounded(model.ByteSize()):
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
    except Exception as error:
        raise CheckpointError(
            f"encoder: {path} does not run ({_short(error)}); expected a graph that onnxruntime "
            f"accepts. {_REMEDY}"
        ) from None
    return model, session


@contextlib.contextmanager
def _bounded(num_bytes: int) -> Iterator[None]:
    """Limit the memory that this process takes in the block, by the size of a model: a constant of
    many gigabytes is an error of onnxruntime then, not the end of the process or of others.

    Where the system has no /proc (macOS), there is no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    # onnxruntime copies weights, and packs them again for its kernels
    most = pages * resource.getpagesize() + 8 * num_bytes + _MARGIN_BYTES
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _input(session: Any, where: str) -> tuple[str, bool, int | None]:
    """Return the name of the graph's input, whether it takes one image at a time, and its side."""
    inputs = session.get_inputs()
    got = "; ".join(f"{one.name}: {one.type} {one.shape}" for one in inputs)
    shape = inputs[0].shape if len(inputs) == 1 and len(inputs[0].shape) == 4 else (0, 0, 0, 0)
    batch, channels, height, width = shape
    sides = {side for side in (height, width) if isinstance(side, int)}
    images = channels == 3 or not isinstance(channels, int)
    if (
        not images
        or inputs[0].type != "tensor(float)"
        or len(sides) > 1
        or (isinstance(batch, int) and batch != 1)
    ):
        raise ConfigError(
            f"encoder: {where} has the input {got}; expected one of float32 images, (B, 3, H, W) "
            "with B open or 1 and H = W. Export the image encoder alone, with a dynamic batch."
        )
    return inputs[0].name, batch == 1, next(iter(sides), None)


def _weights(model: Any) -> dict[str, Tensor]:
    from onnx import numpy_helper

    found = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    kept = {name: value for name, value in found.items() if value.dtype.kind in "fiub"}
    return {name: torch.from_numpy(np.array(value)) for name, value in kept.items()}


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
