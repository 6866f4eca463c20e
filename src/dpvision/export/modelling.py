"""Models exported from dpvision, in plain PyTorch: needs torch, safetensors and Pillow; timm for a
head on one of its models.

    model = load("FOLDER")
    x_BCHW = model.preprocess(PIL.Image.open("photo.jpg"))[None]   # opened, not converted
    output = model(x_BCHW)        # features (B, D); logits (B, K) of model.config["class_names"]
    ids = model.caption(x_BCHW)   # of a captioner: token ids, for tokenizer.json

Legend: B images, L tokens, S encoder tokens, D width, H heads, K head width, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BOS, EOS = 0, 1, 2


def load(folder: str | Path) -> "Network":
    """Return the model in a folder, in evaluation mode."""
    config = json.loads((Path(folder) / "config.json").read_text())
    model = (Captioner if config["kind"] == "captioner" else Network)(config)
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    if config["encoder"]["kind"] == "timm":
        import timm

        model.encoder = timm.create_model(f"local-dir:{Path(folder) / 'encoder'}", pretrained=True)
    return model.eval()


def to_rgb(image: Any, window: list[float] | None = None) -> Image.Image:
    """Return an opened Pillow image as upright 8-bit RGB: grey of more than 8 bits by ``window`` or
    its range, transparency over white.

    Raises:
        ValueError: Pillow alone does not give its samples, or no longer does once it is loaded.
    """
    kind, mode, tile = image.format, image.mode, getattr(image, "tile", None)
    raw = str(tile[0][3]) if tile else "unknown"  # Pillow's name of the file's samples
    tags = getattr(image, "tag_v2", {})  # of TIFF: BitsPerSample, Photometric, Max, SampleFormat
    bits, photometric, most, sample_format = (
        tag[0] if isinstance(tag, tuple) and tag else tag
        for tag in map(tags.get, (258, 262, 281, 339))
    )
    stated = None
    if bits and (bits < 16 or (most and 255 <= most < 65535 and not most & (most + 1))):
        stated = 0, 2**bits - 1 if bits < 16 else most
    grey, ranged = mode == "F" or mode.startswith("I"), window or stated
    png = kind == "PNG"
    for why, found in (
        ("signed samples", sample_format == 2),
        ("floating-point samples", mode == "F" and (window is None or kind == "PPM")),
        ("LAB", mode == "LAB"),
        ("16-bit colour", not grey and ranged and (bits == 16 or ";16" in raw)),
        ("a PNG that is loaded", png and window and mode in ("RGB", "RGBA", "LA") and not tile),
        (
            "a transparent colour",
            png and "transparency" in image.info and (grey or mode in ("L", "RGB")) and raw != mode,
        ),
    ):
        if found:
            raise ValueError(
                f"preprocess: image={why} ({kind}, {mode}); expected what Pillow alone reads as "
                "dpvision does. Pass Image.open(file) itself, or convert the file to 8-bit RGB."
            )
    image = ImageOps.exif_transpose(image)
    if grey:
        low, high = (None if kind in ("PPM", "JPEG2000") else window) or stated or (0, 65535)
        values = bytearray(image.convert("F" if mode == "F" else "I").tobytes())
        v = torch.frombuffer(values, dtype=torch.float32 if mode == "F" else torch.int32)
        if mode != "F" and low == int(low) and high == int(high):
            low, high = int(low), int(high)
            v = (v.long().clamp(low, high) - low) * 256 // (high - low + 1)
        else:
            v = (((v.double() - low) / (high - low)).clamp(0, 1).nan_to_num() * 255).round()
        v = (255 - v if photometric == 0 else v).to(torch.uint8)  # 0: WhiteIsZero
        return Image.frombytes("L", image.size, bytes(v.tolist())).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if kind != "BMP" or image.getextrema()[3][1]:  # a BMP of alpha 0 has none
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def attend(q_BLD: Tensor, kv_BSE: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, the width split into heads; keys lie before values."""
    parts = (q_BLD, *kv_BSE.chunk(2, dim=-1))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, qkv_bias: bool, out_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width, bias=out_bias)

    def forward(self, x_BLD: Tensor, causal: bool = False) -> Tensor:
        q_BLD, kv_BLE = self.qkv(x_BLD).tensor_split([x_BLD.shape[-1]], dim=-1)
        return self.out(attend(q_BLD, kv_BLE, self.heads, causal))


class Block(nn.Module):
    """Pre-LayerNorm transformer block."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = c["width"], int(c["width"] * c["mlp_ratio"])
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, c["num_heads"], c["qkv_bias"])
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.mlp(self.norm2(x_BLD))


class ViT(nn.Module):
    """Vision transformer: all tokens after the last norm, class token first, (B, S, D)."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.patch = c["patch_size"]
        self.patch_embed = nn.Linear(3 * self.patch**2, c["width"])
        self.cls_token = nn.Parameter(torch.zeros(c["width"]))
        self.position = nn.Parameter(torch.zeros((c["image_size"] // self.patch) ** 2, c["width"]))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["depth"]))
        self.norm = nn.LayerNorm(c["width"], eps=1e-6)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        patch_BLE = F.unfold(x_BCHW, self.patch, stride=self.patch).transpose(1, 2)
        x_BLD = self.patch_embed(patch_BLE) + self.position
        x_BLD = torch.cat([self.cls_token.expand(x_BLD.shape[0], 1, -1), x_BLD], dim=1)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)


class Network(nn.Module):
    """An encoder; with a head, a classifier."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        ours = config["encoder"]["kind"] == "vit"
        self.encoder: Any = ViT(config["encoder"]) if ours else None
        if config["unit"]:
            self.centre = nn.Parameter(torch.zeros(config["width"]))
            self.spread = nn.Parameter(torch.ones(config["width"]))
        self.head: nn.Module = nn.Identity()
        if config["kind"] == "classifier":
            self.head = nn.Linear(config["width"], len(config["class_names"]))

    def features(self, x_BCHW: Tensor) -> Tensor:
        """Return the pooled features of normalised images, (B, D)."""
        found = self.encoder(x_BCHW)
        if self.config["encoder"]["kind"] == "timm":
            return found
        return found[:, 0] if self.config["pooling"] == "cls" else found[:, 1:].mean(1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features (B, D) or logits (B, K) of normalised images."""
        x_BD = self.features(x_BCHW)
        if self.config["unit"]:
            x_BD = F.normalize((x_BD - self.centre) / self.spread, dim=1)
        return self.head(x_BD)

    def probabilities(self, x_BCHW: Tensor) -> Tensor:
        """Return a classifier's probabilities (B, K)."""
        logit_BK = self(x_BCHW) / self.config["temperature"]
        return logit_BK.softmax(1) if self.config["loss"] == "softmax" else logit_BK.sigmoid()

    def preprocess(self, image: Any) -> Tensor:
        """Return a Pillow image, as it was opened, as normalised (3, H, W)."""
        image, c = to_rgb(image, self.config.get("window")), self.config
        (w, h), size, resize = image.size, c["image_size"], c["resize"]
        if resize is None:  # the centred square over the shorter side
            left, top = (w - min(w, h)) / 2, (h - min(w, h)) / 2
        else:  # the whole image, or the centre of a square to which it is resized
            cut = 1 - min(1.0, size / resize) if c["crop"] == "centre" else 0.0
            left, top = w * cut / 2, h * cut / 2
        image = image.resize((size, size), 3, box=(left, top, w - left, h - top))  # 3: bicubic
        x_HWC = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        x_HWC = x_HWC.reshape(size, size, 3) / 255
        return ((x_HWC - torch.tensor(c["mean"])) / torch.tensor(c["std"])).permute(2, 0, 1)


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor) -> Tensor:
        return self.out(attend(self.q(x_BLD), self.kv(memory_BSD), self.heads))


class CrossBlock(nn.Module):
    """Post-LayerNorm block: causal self-attention, attention to the image, MLP."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = c["width"], int(c["width"] * c["mlp_ratio"])
        self.self_attention = Attention(width, c["num_heads"], qkv_bias=False, out_bias=False)
        self.cross_attention = CrossAttention(width, c["num_heads"])
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
        )

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor) -> Tensor:
        x_BLD = self.norm1(x_BLD + self.self_attention(x_BLD, causal=True))
        x_BLD = self.norm2(x_BLD + self.cross_attention(x_BLD, memory_BSD))
        return self.norm3(x_BLD + self.mlp(x_BLD))


class Captioner(Network):
    """An encoder, and a decoder that writes a caption token by token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c, num_patches = config["decoder"], len(self.encoder.position)
        self.bridge = nn.Linear(config["encoder"]["width"], c["width"])
        self.position = nn.Parameter(torch.zeros(num_patches, c["width"]))
        self.blocks = nn.ModuleList(CrossBlock(c) for _ in range(c["depth"]))
        self.word_embed = nn.Embedding(config["vocab_size"], c["width"])
        self.word_position = nn.Parameter(torch.zeros(config["num_tokens"], c["width"]))
        self.word_norm = nn.LayerNorm(c["width"])
        self.word_head = nn.Linear(c["width"], config["vocab_size"])

    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Return the decoder's view of the images, (B, S, D)."""
        memory_BSD = self.bridge(self.encoder(x_BCHW))
        return torch.cat([memory_BSD[:, :1], memory_BSD[:, 1:] + self.position], dim=1)

    def decode(self, token_BL: Tensor, memory_BSD: Tensor) -> Tensor:
        """Return the logits of each next token, (B, L, V)."""
        x_BLD = self.word_embed(token_BL) + self.word_position[: token_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD, memory_BSD)
        return self.word_head(self.word_norm(x_BLD))

    @torch.inference_mode()
    def caption(self, x_BCHW: Tensor) -> list[list[int]]:
        """Return the most likely token at each step, for each image, without BOS and EOS."""
        memory_BSD = self.encode(x_BCHW)
        token_BL = torch.full((len(x_BCHW), 1), BOS)
        for place in range(self.config["num_tokens"] - 1):
            logit_BV = self.decode(token_BL, memory_BSD)[:, -1]
            logit_BV[:, [PAD, BOS, EOS] if place == 0 else [PAD, BOS]] = -torch.inf
            token_BL = torch.cat([token_BL, logit_BV.argmax(1, keepdim=True)], dim=1)
        rows = [row[1:] for row in token_BL.tolist()]
        return [row[: row.index(EOS) if EOS in row else -1] for row in rows]
