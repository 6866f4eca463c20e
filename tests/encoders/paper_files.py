"""Files in the papers' layouts with random numbers, and their networks by explicit products of
matrices, from the files' own names.

Legend: B images, L tokens, D width, N heads, K head width, E values of a patch.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
HEAD = "[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"


def square_table(grid: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """The sin-cos table entry by entry, (1, 1 + grid^2, width): column in the first half of the
    width, row in the second; the class token has zeros. With a ``generator`` trained: all rows
    moved.
    """
    table = torch.zeros(1, 1 + grid**2, width, dtype=torch.float64)
    quarter = width // 4
    for row, column, i in itertools.product(range(grid), range(grid), range(quarter)):
        for half, place in enumerate((column, row)):
            angle = place / 10000 ** (i / quarter)
            table[0, 1 + row * grid + column, 2 * half * quarter + i] = math.sin(angle)
            table[0, 1 + row * grid + column, (2 * half + 1) * quarter + i] = math.cos(angle)
    if generator is not None:
        table += 0.2 * torch.randn(table.shape, generator=generator, dtype=torch.float64)
    return table.float()


def line_table(length: int, width: int) -> Tensor:
    """The sin-cos table of a sequence, (1, length, width): sines, then cosines."""
    table = torch.zeros(1, length, width, dtype=torch.float64)
    half = width // 2
    for place, i in itertools.product(range(length), range(half)):
        table[0, place, i] = math.sin(place / 10000 ** (i / half))
        table[0, place, half + i] = math.cos(place / 10000 ** (i / half))
    return table.float()


def _random(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Tensors:
    """Matrices that keep the size of what they multiply, all else near 0, norms near 1."""
    made = {}
    for name, shape in shapes.items():
        scale = math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.2
        made[name] = scale * torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            made[name] += 1
    return made


def _block(start: str, width: int, hidden: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("norm1", "norm2"):
        shapes |= {f"{start}.{name}.weight": (width,), f"{start}.{name}.bias": (width,)}
    for name, size, of in (
        ("attn.qkv", 3 * width, width),
        ("attn.proj", width, width),
        ("mlp.fc1", hidden, width),
        ("mlp.fc2", width, hidden),
    ):
        shapes |= {f"{start}.{name}.weight": (size, of), f"{start}.{name}.bias": (size,)}
    if not bias:
        del shapes[f"{start}.attn.qkv.bias"]
    return shapes


def _encoder(width: int, depth: int, patch: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for i in range(depth):
        shapes |= _block(f"blocks.{i}", width, 2 * width, bias)
    return shapes


def mae_file(
    *,
    width: int = 24,
    depth: int = 2,
    patch: int = 4,
    grid: int = 3,
    decoder: int | None = 16,
    trained: bool = False,
    seed: int = 5,
) -> Tensors:
    """A masked autoencoder's tensors; its encoder alone if ``decoder`` is None."""
    generator = torch.Generator().manual_seed(seed)
    shapes = _encoder(width, depth, patch)
    if decoder is not None:
        shapes |= {"mask_token": (1, 1, decoder)}
        shapes |= {"decoder_embed.weight": (decoder, width), "decoder_embed.bias": (decoder,)}
        shapes |= _block("decoder_blocks.0", decoder, 2 * decoder)
        shapes |= {"decoder_norm.weight": (decoder,), "decoder_norm.bias": (decoder,)}
        shapes |= {"decoder_pred.weight": (3 * patch**2, decoder)}
        shapes |= {"decoder_pred.bias": (3 * patch**2,)}
    made = _random(shapes, generator)
    moved = generator if trained else None
    made["pos_embed"] = square_table(grid, width, moved)
    if decoder is not None:
        made["decoder_pos_embed"] = square_table(grid, decoder, moved)
    return made


def dpcap_file(
    *,
    width: int = 24,
    depth: int = 2,
    decoder: int = 16,
    decoder_depth: int = 2,
    patch: int = 4,
    grid: int = 3,
    vocab_size: int = 130,
    seed: int = 6,
) -> Tensors:
    """A captioner's tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = _encoder(width, depth, patch, bias=False)
    for name, size in (
        ("mask_token", decoder),
        ("mask_token_text", decoder),
        ("encoder_image_type_embedding", width),
        ("encoder_text_type_embedding", width),
        ("decoder_image_type_embedding", decoder),
        ("decoder_text_type_embedding", decoder),
    ):
        shapes[name] = (1, 1, size)
    shapes |= {"decoder_embed.weight": (decoder, width), "decoder_embed.bias": (decoder,)}
    shapes |= {"text_embedding_layer_SimVLM.weight": (vocab_size, decoder)}
    shapes |= {"decoder_pred_text.1.weight": (vocab_size, decoder)}
    shapes |= {"decoder_pred_text.1.bias": (vocab_size,)}
    for i in range(decoder_depth):
        start = f"decoder.layers.{i}"
        for name, size, of in (
            ("self_attn.c_attn", 3 * decoder, decoder),
            ("self_attn.c_proj", decoder, decoder),
            ("multihead_attn.q_proj", decoder, decoder),
            ("multihead_attn.kv_proj", 2 * decoder, decoder),
            ("multihead_attn.c_proj", decoder, decoder),
            ("linear1", 4 * decoder, decoder),
            ("linear2", decoder, 4 * decoder),
        ):
            shapes[f"{start}.{name}.weight"] = (size, of)
        for name in ("norm1", "norm2", "norm3"):
            shapes |= {f"{start}.{name}.weight": (decoder,), f"{start}.{name}.bias": (decoder,)}
    made = _random(shapes, generator)
    made["decoder_pred_text.0.weight"] = 1 + 0.2 * torch.randn(decoder, generator=generator)
    made["decoder_pred_text.0.bias"] = 0.2 * torch.randn(decoder, generator=generator)
    made |= {
        "pos_embed": square_table(grid, width),
        "decoder_pos_embed": square_table(grid, decoder),
        "text_pos_embed": line_table(77, width),
        "text_decoder_pos_embed": line_table(77, decoder),
    }
    return made


def write(path: Path, tensors: Tensors) -> Path:
    """The file as its authors write it; as safetensors, which are opened without a process, for
    names with that ending.
    """
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    else:
        torch.save({"model": tensors, "epoch": 800}, path)
    return path


def write_vocabulary(path: Path, words: Sequence[str], size: int) -> Path:
    """A vocabulary of ``size`` entries in BERT's layout: letters as whole words and as pieces, then
    ``words``, then fillers.
    """
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    entries = [*HEAD, *dict.fromkeys([*words, *letters, *(f"##{c}" for c in letters)])][:size]
    entries += [f"[filler{i}]" for i in range(size - len(entries))]
    path.write_text("\n".join(entries) + "\n")
    return path


def double(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _norm(t: Tensors, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    size = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return centred / size * t[f"{name}.weight"] + t[f"{name}.bias"]


def _linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int, causal: bool = False) -> Tensor:
    """Attention head by head."""
    K = q.shape[-1] // num_heads
    heads = []
    for n in range(num_heads):
        own = slice(n * K, (n + 1) * K)
        score = q[..., own] @ k[..., own].transpose(-1, -2) / math.sqrt(K)
        if causal:
            score = score + torch.full_like(score, -math.inf).triu(1)
        heads.append(torch.softmax(score, -1) @ v[..., own])
    return torch.cat(heads, -1)


def _self_attention(t: Tensors, start: str, x: Tensor, num_heads: int) -> Tensor:
    q, k, v = _linear(t, f"{start}.attn.qkv", x).chunk(3, -1)
    x = _attend(q, k, v, num_heads)
    return _linear(t, f"{start}.attn.proj", x)


def _apply_block(t: Tensors, start: str, x: Tensor, num_heads: int) -> Tensor:
    x = x + _self_attention(t, start, _norm(t, f"{start}.norm1", x, 1e-6), num_heads)
    hidden = _gelu(_linear(t, f"{start}.mlp.fc1", _norm(t, f"{start}.norm2", x, 1e-6)))
    return x + _linear(t, f"{start}.mlp.fc2", hidden)


def _patches(x_BCHW: Tensor, patch: int) -> Tensor:
    """Patches of an image, one after another, each as (channel, row, column)."""
    B, _, H, W = x_BCHW.shape
    cut = [
        x_BCHW[:, :, i : i + patch, j : j + patch].reshape(B, -1)
        for i in range(0, H, patch)
        for j in range(0, W, patch)
    ]
    return torch.stack(cut, 1)


def encoder_blocks(
    t: Tensors, x_BCHW: Tensor, num_heads: int, keep_BS: Tensor | None = None
) -> list[Tensor]:
    """Tokens after each block of the encoder and, last, after its norm."""
    weight = t["patch_embed.proj.weight"]
    token = _patches(x_BCHW, weight.shape[-1]) @ weight.flatten(1).T + t["patch_embed.proj.bias"]
    token = token + t["pos_embed"][:, 1:]
    if keep_BS is not None:
        token = torch.stack([rows[keep] for rows, keep in zip(token, keep_BS, strict=True)])
    first = (t["cls_token"] + t["pos_embed"][:, :1]).expand(len(token), -1, -1)
    token = torch.cat([first, token], 1) + t.get("encoder_image_type_embedding", 0)
    found = []
    depth = len({name.split(".")[1] for name in t if name.startswith("blocks.")})
    for i in range(depth):
        token = _apply_block(t, f"blocks.{i}", token, num_heads)
        found.append(token)
    return [*found, _norm(t, "norm", token, 1e-6)]


def mae_losses(
    t: Tensors, x_BCHW: Tensor, noise_BL: Tensor, num_heads: int, decoder_heads: int, visible: int
) -> Tensor:
    """Mean squared error of each image over the pixels of its masked patches; the ``visible``
    patches with the smallest noise are seen.
    """
    patch = t["patch_embed.proj.weight"].shape[-1]
    order_BL = noise_BL.argsort(1)
    latent = encoder_blocks(t, x_BCHW, num_heads, order_BL[:, :visible])[-1]
    latent = _linear(t, "decoder_embed", latent)
    B, L = noise_BL.shape
    whole = t["mask_token"].expand(B, L, -1).clone()
    for b in range(B):
        for s in range(visible):
            whole[b, order_BL[b, s]] = latent[b, 1 + s]
    token = torch.cat([latent[:, :1], whole], 1) + t["decoder_pos_embed"]
    token = _apply_block(t, "decoder_blocks.0", token, decoder_heads)
    token = _norm(t, "decoder_norm", token, 1e-6)
    guess_BLE = _linear(t, "decoder_pred", token)[:, 1:]
    by_pixel = _patches(x_BCHW, patch).unflatten(-1, (3, patch, patch)).permute(0, 1, 3, 4, 2)
    error_BL = (guess_BLE - by_pixel.flatten(2)).square().mean(-1)
    masked_BL = torch.ones(B, L, dtype=torch.bool).scatter(1, order_BL[:, :visible], False)
    return torch.stack([row[mask].mean() for row, mask in zip(error_BL, masked_BL, strict=True)])


def caption_losses(
    t: Tensors, x_BCHW: Tensor, bert_BL: Tensor, num_heads: int, decoder_heads: int
) -> Tensor:
    """Mean cross-entropy of each caption over its tokens after the first, in BERT's numbers and
    without padding.
    """
    memory = _linear(t, "decoder_embed", encoder_blocks(t, x_BCHW, num_heads)[-1])
    memory = memory + t["decoder_pos_embed"] + t["decoder_image_type_embedding"]
    x = t["text_embedding_layer_SimVLM.weight"][bert_BL[:, :-1]]
    x = x + t["text_decoder_pos_embed"][:, : x.shape[1]] + t["decoder_text_type_embedding"]
    depth = len({name.split(".")[2] for name in t if name.startswith("decoder.layers.")})
    for i in range(depth):
        start = f"decoder.layers.{i}"
        q, k, v = _linear(t, f"{start}.self_attn.c_attn", x).chunk(3, -1)
        mixed = _linear(t, f"{start}.self_attn.c_proj", _attend(q, k, v, decoder_heads, True))
        x = _norm(t, f"{start}.norm1", x + mixed, 1e-5)
        q = _linear(t, f"{start}.multihead_attn.q_proj", x)
        k, v = _linear(t, f"{start}.multihead_attn.kv_proj", memory).chunk(2, -1)
        mixed = _linear(t, f"{start}.multihead_attn.c_proj", _attend(q, k, v, decoder_heads))
        x = _norm(t, f"{start}.norm2", x + mixed, 1e-5)
        hidden = _gelu(_linear(t, f"{start}.linear1", x))
        x = _norm(t, f"{start}.norm3", x + _linear(t, f"{start}.linear2", hidden), 1e-5)
    logit = _linear(t, "decoder_pred_text.1", _norm(t, "decoder_pred_text.0", x, 1e-5))
    log_p = logit.log_softmax(-1)
    losses = []
    for b, row in enumerate(bert_BL[:, 1:].tolist()):
        own = [-log_p[b, place, i] for place, i in enumerate(row) if i != 0]
        losses.append(torch.stack(own).mean())
    return torch.stack(losses)
