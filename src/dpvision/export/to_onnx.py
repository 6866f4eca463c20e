"""ONNX files with a dynamic batch, run by onnxruntime before they are handed out.

A captioner is two files: encoder.onnx makes the keys and values of the image, decoder.onnx is one
step: from a token and the keys and values so far to the logits of the next token.

Legend: B images, D width, K classes, C channels, H height, W width, L tokens so far, S encoder
tokens, N decoder blocks, A heads, E head width, V vocabulary.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim

from dpvision.config import DataConfig
from dpvision.data.transform import ENLARGEMENT, LibraryData, kept_share
from dpvision.encoders.classifier import ImageClassifier
from dpvision.errors import ConfigError
from dpvision.export.product import Product, captions_to_check, refused
from dpvision.models.captioner import Cache, Captioner
from dpvision.models.cross_decoder import KeysValues
from dpvision.weights import METADATA, lineage_record

LOADS = """import numpy, onnxruntime

{pixels}
session = onnxruntime.InferenceSession("model.onnx")
"""
USES = {
    "encoder": """(feature_BD,) = session.run(None, {"images": x_BCHW})""",
    "classifier": """logit_BK, probability_BK = session.run(None, {"images": x_BCHW})""",
}
_SQUARE = """left, top = {corner}
image = image.resize(({side}, {side}), 3, box=(left, top, w - left, h - top))  # 3: bicubic
"""
_LIBRARY = """w, h = {size}
left, top = (w - {side}) // 2, (h - {side}) // 2
image = image.resize((w, h), {filter}).crop((left, top, left + {side}, top + {side}))
"""
_OWN_SIZE = """side = max((s for s in {sizes} if s <= {most} * min(w, h)), default={least})
"""
_CANVAS = """margin = 0, {canvas} - side
x_HWC = numpy.pad(x_HWC, (margin, margin, (0, 0)), constant_values=numpy.nan)
"""
CAPTION = """import numpy, onnxruntime, tokenizers

{pixels}
encoder = onnxruntime.InferenceSession("encoder.onnx")
decoder = onnxruntime.InferenceSession("decoder.onnx")
(memory,) = encoder.run(None, {"images": x_BCHW})
past, token = numpy.zeros_like(memory[..., :0, :]), numpy.ones(len(x_BCHW), dtype=numpy.int64)
said = []
for _ in range(NUM_TOKENS - 2):
    logit_BV, past = decoder.run(None, {"token": token, "memory": memory, "past": past})
    logit_BV[:, [0, 1, 2] if not said else [0, 1]] = -numpy.inf  # padding, begin; end at first
    token = logit_BV.argmax(1)
    said.append(token)
ids = [row[: row.index(2) if 2 in row else None] for row in numpy.stack(said, 1).tolist()]
texts = [tokenizers.Tokenizer.from_file("tokenizer.json").decode(row) for row in ids]
"""


class _Classified(nn.Module):
    def __init__(self, classifier: ImageClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        logit_BK = self.classifier(x_BCHW)
        return logit_BK, self.classifier.calibrated(logit_BK)


class _Remember(nn.Module):
    def __init__(self, captioner: Captioner) -> None:
        super().__init__()
        self.captioner = captioner

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return keys and values of the image for all blocks, (B, N, 2, A, S, E)."""
        return _stacked(self.captioner.start_cache(self.captioner.encode(x_BCHW)).memory)


class _Step(nn.Module):
    def __init__(self, captioner: Captioner) -> None:
        super().__init__()
        self.captioner = captioner

    def forward(self, token_B: Tensor, memory: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, V), and the keys and values so far (B, N, 2, A, L + 1, E)."""
        before: list[KeysValues | None] = list(_parted(past))
        cache = Cache(_parted(memory), before, past.shape[4])
        logit_BV, cache = self.captioner.step(token_B, cache)
        return logit_BV, _stacked([kv for kv in cache.past if kv is not None])


def _stacked(blocks: list[KeysValues]) -> Tensor:
    return torch.stack([torch.stack(tuple(kv), dim=1) for kv in blocks], dim=1)


def _parted(kv_BN2ALE: Tensor) -> list[KeysValues]:
    return [KeysValues(*kv.unbind(1)) for kv in kv_BN2ALE.unbind(1)]


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write model.onnx, or a captioner's encoder.onnx, decoder.onnx and tokenizer.json.

    Raises:
        ConfigError: the extra onnx is not installed, or the model cannot be traced.
    """
    _runtime()
    batch, side = Dim("batch", min=1), product.image_size
    images = ("images", torch.zeros(2, 3, side, side), {0: batch})
    if not isinstance(product.trained, Captioner):
        network, outputs = product.module, ["features"]
        if isinstance(network, ImageClassifier):
            network, outputs = _Classified(network), ["logits", "probabilities"]
        _save(network, [images], outputs, folder / "model.onnx", product, metadata)
        return
    memory = _Remember(product.trained)(images[1])
    past = memory[..., :3, :].contiguous()
    inputs = [
        ("token", torch.tensor([3, 4]), {0: batch}),
        ("memory", memory, {0: batch}),
        ("past", past, {0: batch, 4: Dim("length", max=product.trained.cfg.num_tokens - 1)}),
    ]
    encoder, step = _Remember(product.trained), _Step(product.trained)
    _save(encoder, [images], ["memory"], folder / "encoder.onnx", product, metadata)
    outputs = ["logits", "extended"]
    _save(step, inputs, outputs, folder / "decoder.onnx", product, metadata)
    assert product.tokenizer is not None
    (folder / "tokenizer.json").write_bytes(product.tokenizer)


def how_to_load(product: Product) -> str:
    """Return Python that loads the export, run in its folder."""
    pixels = pixels_code(product.image_size, product.data)
    if isinstance(product.trained, Captioner):
        code = CAPTION.replace("NUM_TOKENS", str(product.trained.cfg.num_tokens))
        return code.replace("{pixels}", pixels)
    return LOADS.format(pixels=pixels) + USES[product.kind]


def pixels_code(side: int, data: DataConfig) -> str:
    """Return Python that makes x_BCHW of one Pillow image, as training and evaluation see it."""
    lines = ["w, h = image.size  # an upright RGB image of Pillow\n"]
    sizes, cut = data.own_sizes, (1 - kept_share(side, data)) / 2
    if isinstance(data, LibraryData):
        rule, resized = data.library, f"{data.library.side}, {data.library.side}"
        if rule.keep_aspect:
            resized = f"(int({rule.side} * n / min(w, h)) for n in (w, h))"
        number = int(Image.Resampling[rule.filter.upper()])
        lines += [_LIBRARY.format(size=resized, side=side, filter=number)]
    else:
        corner = f"{cut} * w, {cut} * h" if cut else "0, 0"
        if data.resize is None:
            corner = "(w - min(w, h)) / 2, (h - min(w, h)) / 2"
        if sizes:
            lines += [_OWN_SIZE.format(sizes=[*sizes], most=ENLARGEMENT, least=sizes[0])]
        lines += [_SQUARE.format(corner=corner, side="side" if sizes else side)]
    lines += [f"x_HWC = (numpy.asarray(image) / 255 - {[*data.mean]}) / {[*data.std]}\n"]
    if sizes:
        lines += [_CANVAS.format(canvas=side)]
    return "".join([*lines, "x_BCHW = x_HWC.transpose(2, 0, 1)[None].astype(numpy.float32)\n"])


def read(product: Product, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the exported model as a function, run by onnxruntime: one image, then the others."""
    if not isinstance(product.trained, Captioner):
        session = _session(folder / "model.onnx")

        def outputs(x_BCHW: Tensor) -> Tensor:
            rows = [session.run(None, {"images": x.numpy()})[0] for x in x_BCHW.split([1, 2])]
            return torch.cat([torch.from_numpy(row) for row in rows])

        return outputs
    encoder, decoder = _session(folder / "encoder.onnx"), _session(folder / "decoder.onnx")
    trained = product.trained

    def logits(x_BCHW: Tensor) -> Tensor:
        (memory,) = encoder.run(None, {"images": x_BCHW.numpy()})
        past, made = memory[..., :0, :], []
        for token_B in captions_to_check(trained, len(x_BCHW)).unbind(1):
            inputs = {"token": token_B.numpy(), "memory": memory, "past": past}
            logit_BV, past = decoder.run(None, inputs)
            made.append(torch.from_numpy(logit_BV))
        return torch.stack(made, dim=1)

    return logits


def _save(
    network: nn.Module,
    inputs: list[tuple[str, Tensor, dict[int, Any]]],
    outputs: list[str],
    path: Path,
    product: Product,
    metadata: dict[str, str],
) -> None:
    """Trace a network and save it with its lineage, without traces of this machine's paths."""
    names, examples = [name for name, _, _ in inputs], tuple(x for _, x, _ in inputs)
    dynamic = tuple(dims for _, _, dims in inputs)
    try:
        traced = torch.export.export(network.eval(), examples, dynamic_shapes=dynamic, strict=False)
        with warnings.catch_warnings(action="ignore"):  # about the names of dynamic dimensions
            program = torch.onnx.export(
                traced,
                examples,
                dynamo=True,
                input_names=names,
                output_names=outputs,
                dynamic_shapes=dynamic,
                verbose=False,
            )
    except Exception as error:  # torch's own types are many, and differ between versions
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        raise refused(
            "onnx",
            f"the model cannot be traced ({why})",
            "Use another encoder, or timm for one of timm's models.",
        ) from None
    assert program is not None
    model: Any = program.model
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces
    tensors = {
        name: torch.from_numpy(value.const_value.numpy().copy())
        for name, value in model.graph.initializers.items()
    }
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    model.metadata_props[METADATA] = lineage_record(tensors, product.lineage)
    program.save(path)


def _session(path: Path) -> Any:
    return _runtime().InferenceSession(path, providers=["CPUExecutionProvider"])


def _runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"export: --to onnx needs {error.name}, which is not installed; expected the extra "
            "onnx. Use pip install 'dpvision[onnx]'."
        ) from None
    return onnxruntime
