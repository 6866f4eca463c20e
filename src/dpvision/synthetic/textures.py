"""Procedural textures: endless pictures of shaded, textured things that hide each other, each a pure function of two integers.

    >>> textures(torch.arange(2), 32).shape
    torch.Size([2, 3, 32, 32])

A *program* (an integer) fixes a little world: three to twelve things, back to front, each with an outline (a closed contour roughened by a
field, or a half-plane), a surface (a field of the bank, turned, stretched, tilted in perspective and warped), colours from the world's
palette, light, and a shadow on what lies behind. An *instance* (another integer) fixes the look at it: place, zoom, turn, mirror,
exposure. Sizes of things follow a power law and fields have falling spectra, as in photographs (docs/textures.md).

Everything is one sequence of tensor operations without branches, so that on a GPU it compiles to one kernel for each thing, and a picture's
pixels do not depend on which others are made with it. Own design and own code: no program, picture or weight of anybody is used.

Legend: N pictures, K things, P parameters, H height, W width, C channels.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.errors import ConfigError
from dpvision.mixing import GOLDEN, mix_torch, signed, uniform_torch
from dpvision.synthetic.texture_bank import FIELD_SIDE, NUM_ANGLES, NUM_CONTOURS, NUM_FIELDS, contours_QA, fields_MSS

VERSION = 1
"""Changes whenever a program's pixels do."""
NUM_THINGS = 12
_LEVELS = 5
_CPU_PIXELS = 1 << 14  # pictures are made in parts of about this many pixels: 64 KiB a plane stays in a core's cache
_GPU_PIXELS = 1 << 22
Material = tuple[Tensor, Tensor, Tensor]
"""All fields of the bank at all levels in one vector, each level half the side of the one before; where each level starts; all contours."""
_BLUE_YELLOW, _RED_GREEN = (0.41, 0.41, -0.82), (0.71, -0.71, 0.0)


def textures(
    program_N: Tensor,
    size_px: int,
    *,
    instance_N: Tensor | None = None,
    device: str | torch.device = "cpu",
    compiled: bool | None = None,
) -> Tensor:
    """Pictures of the given programs, uint8 (N, 3, size_px, size_px) on ``device``.

    Args:
        program_N: int64, any values; each is a world of its own.
        size_px: side in pixels, 8 to 1024. The same world is shown at every size.
        instance_N: int64, the look at it; None: the straight look, the same for all.
        compiled: fuse the work with torch.compile: a minute or less at the first call of a size, then several times as fast. None: on a
            GPU, not on a CPU. A pixel may then differ by one level (of 255), rarely.

    Raises:
        ConfigError: ``size_px`` is out of range, or the integers are not int64 of one shape.
    """
    if not 8 <= size_px <= 1024:
        raise ConfigError(f"textures: size_px={size_px!r}; expected 8 to 1024 pixels. Use the image size of the model.")
    instance = torch.zeros_like(program_N) if instance_N is None else instance_N
    for name, value in (("program_N", program_N), ("instance_N", instance)):
        if value.dtype != torch.int64 or value.ndim != 1 or value.shape != program_N.shape:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ConfigError(f"textures: {name}={got}; expected int64 of shape (N,), the same for both. Number the pictures from 0.")
    device = torch.device(device)
    fused = device.type != "cpu" if compiled is None else compiled
    program_N, instance = program_N.to(device), instance.to(device)
    out = torch.empty(len(program_N), 3, size_px, size_px, dtype=torch.uint8, device=device)
    # Worlds of few things first, so that a part need not go through things that none of its worlds has: a third of the time.
    things_N = _count_things(program_N)
    pixels = _CPU_PIXELS if device.type == "cpu" else _GPU_PIXELS
    for here in things_N.argsort().split(max(1, pixels // size_px**2)):
        world, look = _draw_world(program_N[here]), _draw_look(program_N[here], instance[here], instance_N is None)
        if fused:
            out[here] = _fused_picture(world, look, size_px)
        else:
            out[here] = _picture(world, look, _material(device), size_px, int(things_N[here].max()))
    return out


def _picture(world: dict[str, Tensor], look: dict[str, Tensor], material: Material, size_px: int, most_things: int) -> Tensor:
    """The pictures of drawn parameters: everything per pixel, and nothing else.

    A thing that a world does not have leaves every bit as it was.
    """
    x, y = _places(look, size_px)
    red, green, blue = (torch.zeros_like(x) for _ in range(3))
    for k in range(most_things):
        thing = {name: value[:, k] for name, value in world.items()}
        red, green, blue = _paint(red, green, blue, x, y, thing, look, material, size_px)
    return _develop(torch.stack([red, green, blue], dim=1), look, size_px)


def _fused_picture(world: dict[str, Tensor], look: dict[str, Tensor], size_px: int) -> Tensor:
    """``_picture`` through one compiled program per size: a part that is not full is filled up, so that none is compiled twice."""
    device = look["cos"].device
    num, full = len(look["cos"]), max(1, (_CPU_PIXELS if device.type == "cpu" else _GPU_PIXELS) // size_px**2)
    if num < full:
        fill = torch.arange(full, device=device).clamp(max=num - 1)
        world, look = ({name: value[fill] for name, value in values.items()} for values in (world, look))
    return _compiled_picture()(world, look, _material(device), size_px, NUM_THINGS)[:num]


@functools.cache
def _compiled_picture() -> Callable[..., Tensor]:
    """``_picture`` as fused kernels: eagerly, memory traffic of some hundred passes over the picture decides the time."""
    return torch.compile(_picture, dynamic=False)


def _start(program_N: Tensor) -> Tensor:
    return mix_torch(program_N ^ signed(0xD9B1_5109_7E37_7000 + VERSION))


def _count_things(program_N: Tensor) -> Tensor:
    """How many things each world has, 3 to NUM_THINGS."""
    return (3 + (NUM_THINGS - 2) * uniform_torch(_start(program_N), 1)[:, 0]).long()


def _draw_world(program_N: Tensor) -> dict[str, Tensor]:
    """Parameters (N, K, 1, 1) of the things of each world."""
    start_N = _start(program_N)
    own_N = uniform_torch(start_N, 32)
    thing_NK = mix_torch(start_N[:, None] + torch.arange(101, 101 + NUM_THINGS, device=program_N.device) * signed(GOLDEN))
    u = uniform_torch(thing_NK, 40).unbind(-1)

    def of_world(i: int) -> Tensor:
        return own_N[:, i, None]

    def normal(a: Tensor, b: Tensor) -> Tensor:
        return (-2 * (1 - a).log()).sqrt() * (2 * math.pi * b).cos()

    def between(a: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * a

    def log_between(a: Tensor, low: float, high: float) -> Tensor:
        return (math.log(low) + math.log(high / low) * a).exp()

    back = torch.zeros(NUM_THINGS, device=program_N.device, dtype=torch.bool)
    back[0] = True
    present = torch.arange(NUM_THINGS, device=program_N.device) < _count_things(program_N)[:, None]
    # Sizes fall as a power law (dead leaves).
    power = between(of_world(1), 0.3, 0.8)
    radius = (0.2 * (1 - 0.98 * u[0]) ** -power).clamp(max=1.4) * log_between(of_world(2), 0.8, 1.8)
    plane = (u[1] < 0.15) & ~back
    # Palette: four colours of the world, low in saturation as the world is; a thing mixes two of them.
    saturation = 0.01 + 0.10 * of_world(3) ** 2
    pick, other, share = (4 * u[2]).floor().long(), (4 * u[3]).floor().long(), 0.35 * u[4]
    light_4, yellow_4, red_4 = own_N[:, 4:8], own_N[:, 8:12], own_N[:, 12:16]

    def mixed(values_N4: Tensor) -> Tensor:
        return values_N4.gather(1, pick) * (1 - share) + values_N4.gather(1, other) * share

    lightness = between((0.75 * mixed(light_4) + 0.25 * u[5]).clamp(0, 1), 0.05, 0.95)
    yellow = (mixed(yellow_4) - 0.5 + 0.3 * (u[6] - 0.5)) * 5 * saturation
    red = (mixed(red_4) - 0.5 + 0.3 * (u[7] - 0.5)) * 3 * saturation
    angle, surface_turn, light_turn = 2 * math.pi * u[8], 2 * math.pi * u[9], 2 * math.pi * of_world(16).expand_as(u[0])
    stretch = log_between(u[10], 0.45, 1.0)
    scale = log_between(u[11], 0.35, 3.5)
    surface_stretch = log_between(u[12], 0.6, 1.7)
    contrast = log_between(u[13], 0.012, 0.18)
    world = {
        "x": between(u[14], -1.25, 1.25),
        "y": between(u[15], -1.25, 1.25),
        "radius": radius, "present": present.float(),
        "back": back.float().expand_as(radius),
        "plane": plane.float(),
        "contour": (NUM_CONTOURS * u[16]).floor(),
        "cos": angle.cos(), "sin": angle.sin(), "stretch": stretch,
        "softness": 0.004 + 0.1 * u[17] ** 5,
        "rugged": 0.14 * u[18] ** 3,
        "field": (NUM_FIELDS * u[19]).floor(),
        "field_cos": surface_turn.cos() * scale * surface_stretch, "field_sin": surface_turn.sin() * scale * surface_stretch,
        "field_across": 1 / surface_stretch**2,
        "field_x": u[20], "field_y": u[21], "scale": scale,
        "tilt_x": 0.35 * (u[22] - 0.5), "tilt_y": 0.35 * (u[23] - 0.5) + torch.where(plane, 0.3, 0.0),
        "warp_field": (NUM_FIELDS / 17 * u[24]).floor() * 17,
        "warp": 0.25 * u[25] ** 2, "warp_x": u[26], "warp_y": u[27],
        "gain": log_between(u[28], 0.6, 4),
        "contrast": contrast, "contrast_yellow": contrast * 3 * saturation * normal(u[29], u[30]),
        "contrast_red": contrast * 2 * saturation * normal(u[31], u[32]),
        "lightness": lightness, "yellow": yellow, "red": red,
        "light_x": light_turn.cos(), "light_y": light_turn.sin(), "shade": 0.35 * u[33], "round": (u[34] * 1.6 - 0.5).clamp(0, 1),
        "shadow": torch.where(present & ~back, 0.5 * u[35] ** 2, 0.0), "shadow_reach": log_between(u[36], 4, 25),
    }  # fmt: skip
    return {name: value[..., None, None] for name, value in world.items()}


def _draw_look(program_N: Tensor, instance_N: Tensor, straight: bool) -> dict[str, Tensor]:
    """Parameters (N, 1, 1) of the look at each world."""
    both_N = mix_torch(mix_torch(program_N ^ signed(0xA54F_F53A_5F1D_36F1)) + instance_N * signed(GOLDEN))
    u = uniform_torch(both_N, 12)[..., None, None].unbind(1)
    own = uniform_torch(mix_torch(program_N ^ signed(0x510E_527F_ADE6_82D1)), 8)[..., None, None].unbind(1)
    free = 0.0 if straight else 1.0
    turn = free * 0.5 * (u[0] - 0.5)
    zoom = (free * (-0.8 * u[1])).exp()
    mirror = 1 - 2 * free * (u[2] < 0.5).float()
    return {
        "cos": turn.cos() * zoom, "sin": turn.sin() * zoom, "mirror": mirror,
        "x": free * 0.6 * (u[3] - 0.5) * (2 - zoom), "y": free * 0.6 * (u[4] - 0.5) * (2 - zoom),
        "spread": 0.12 + 0.16 * own[0] * (1 + free * 0.3 * (u[5] - 0.5)), "middle": 0.32 + 0.32 * own[1] + free * 0.1 * (u[6] - 0.5),
        "fall_x": 0.3 * (own[2] - 0.5), "fall_y": 0.3 * (own[3] - 0.5), "zoom": zoom,
        "tint_yellow": 0.05 * (own[4] - 0.5), "tint_red": 0.03 * (own[5] - 0.5),
    }  # fmt: skip


def _places(look: dict[str, Tensor], size_px: int) -> tuple[Tensor, Tensor]:
    """World coordinates (N, H, W) of the pixels: the straight look sees the square from -1 to 1."""
    device = look["cos"].device
    line = (torch.arange(size_px, device=device, dtype=torch.float32) + 0.5) * (2 / size_px) - 1
    px, py = line[None, None, :] * look["mirror"], line[None, :, None]
    return look["cos"] * px - look["sin"] * py + look["x"], look["sin"] * px + look["cos"] * py + look["y"]


def _paint(
    red: Tensor,
    green: Tensor,
    blue: Tensor,
    x: Tensor,
    y: Tensor,
    t: dict[str, Tensor],
    look: dict[str, Tensor],
    material: Material,
    size_px: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The picture so far (three planes) with one more thing ``t`` in front of it."""
    # The thing's own coordinates, and the surface's.
    dx, dy = x - t["x"], y - t["y"]
    ox, oy = t["cos"] * dx + t["sin"] * dy, (t["cos"] * dy - t["sin"] * dx) / t["stretch"]
    pixel = 2 / size_px * look["zoom"]  # side of a pixel in the world
    bend_x, bend_y = _wander(material, t, x, y, pixel)
    depth = 1 / (1 + t["tilt_x"] * x + t["tilt_y"] * y).clamp(min=0.25)
    sx, sy = x * depth + t["warp"] * bend_x, y * depth + t["warp"] * bend_y
    u = t["field_cos"] * sx - t["field_sin"] * sy + t["field_x"]
    v = (t["field_sin"] * sx + t["field_cos"] * sy) * t["field_across"] + t["field_y"]
    field = _read_field(material, t["field"], u, v, t["scale"] * pixel)
    field = (t["gain"] * field).tanh()
    # Outline: distance past the edge over the radius, below zero inside.
    reach = _read_contour(material, t["contour"], torch.atan2(oy, ox))
    from_centre = (ox * ox + oy * oy + 1e-12).sqrt()
    rho = from_centre / (t["radius"] * reach)
    beyond = torch.where(t["plane"] > 0, (t["cos"] * dy - t["sin"] * dx) / t["radius"], rho - 1) + t["rugged"] * (bend_x + bend_y)
    distance = beyond * t["radius"]
    edge = t["softness"] + 0.5 * pixel
    cover = torch.maximum((0.5 - distance / (2 * edge)).clamp(0, 1) * t["present"], t["back"])
    # Light: a slope over the thing, and a bulge for round ones.
    qx, qy = (dx / t["radius"]).clamp(-1.5, 1.5), (dy / t["radius"]).clamp(-1.5, 1.5)
    bulge = (1 - (rho * rho).clamp(max=1)).sqrt() - 0.6
    light = 1 + t["shade"] * (t["light_x"] * qx + t["light_y"] * qy + t["round"] * bulge)
    lightness = (t["lightness"] + t["contrast"] * field) * light
    yellow = (t["yellow"] + t["contrast_yellow"] * field) * light
    pink = (t["red"] + t["contrast_red"] * field) * light
    darker = 1 - t["shadow"] * (-t["shadow_reach"] * distance.clamp(min=0)).exp()

    def over(plane: Tensor, c: int) -> Tensor:
        colour = lightness + _BLUE_YELLOW[c] * yellow + _RED_GREEN[c] * pink
        plane = plane * darker
        return plane + cover * (colour - plane)

    return over(red, 0), over(green, 1), over(blue, 2)


def _develop(image_NCHW: Tensor, look: dict[str, Tensor], size_px: int) -> Tensor:
    """Exposure: light that falls off over the picture, a contrast and a middle of the picture's own, a tint; then uint8."""
    line = (torch.arange(size_px, device=image_NCHW.device, dtype=torch.float32) + 0.5) * (2 / size_px) - 1
    fall = 1 + look["fall_x"] * line[None, None, :] + look["fall_y"] * line[None, :, None]
    image_NCHW = image_NCHW * fall[:, None]
    grey_NHW = image_NCHW.mean(dim=1)
    mean_N = grey_NHW.flatten(1).mean(dim=1)[:, None, None]
    std_N = (grey_NHW - mean_N).square().flatten(1).mean(dim=1).sqrt()[:, None, None]
    # Flat worlds are brought up, at most fourfold, so that no picture is empty.
    gain = (look["spread"] / (std_N + 1e-3)).clamp(0.6, 4)
    image_NCHW = look["middle"][:, None] + gain[:, None] * (image_NCHW - mean_N[:, None])
    tint = [_BLUE_YELLOW[c] * look["tint_yellow"] + _RED_GREEN[c] * look["tint_red"] for c in range(3)]
    return ((image_NCHW + torch.stack(tint, dim=1)).clamp(0, 1) * 255).round().to(torch.uint8)


def _wander(material: Material, t: dict[str, Tensor], x: Tensor, y: Tensor, pixel: Tensor) -> tuple[Tensor, Tensor]:
    """Two smooth fields (N, H, W) that bend the outline and the surface."""
    u, v = 0.35 * x + t["warp_x"], 0.35 * y + t["warp_y"]
    bend_x = _read_field(material, t["warp_field"], u, v, 0.35 * pixel)
    return bend_x, _read_field(material, t["warp_field"], v + 0.37, u + 0.71, 0.35 * pixel)


def _read_field(material: Material, number: Tensor, u: Tensor, v: Tensor, texels: Tensor) -> Tensor:
    """A field of the bank at (u, v), in periods; bilinear, from the level whose texels are about as large as a pixel.

    Args:
        number: (N, 1, 1), which field.
        texels: periods per pixel, (N, 1, 1).
    """
    bank, starts, _ = material
    level = (texels * FIELD_SIDE).clamp(min=1).log2().round().clamp(max=_LEVELS - 1).long()
    side = FIELD_SIDE >> level
    base = starts[level] + number.long() * side * side
    mask = side - 1
    fu, fv = u * side, v * side
    column, row = fu.floor(), fv.floor()
    wu, wv = fu - column, fv - row
    column, row = column.long(), row.long()
    c0, c1 = column & mask, (column + 1) & mask
    r0, r1 = base + (row & mask) * side, base + ((row + 1) & mask) * side
    top = torch.lerp(bank[r0 + c0], bank[r0 + c1], wu)
    return torch.lerp(top, torch.lerp(bank[r1 + c0], bank[r1 + c1], wu), wv)


def _read_contour(material: Material, number: Tensor, angle: Tensor) -> Tensor:
    """Radius of a contour of the bank at an angle in [-pi, pi]; linear between the stored ones."""
    contours = material[2]
    place = (angle + math.pi) * (NUM_ANGLES / (2 * math.pi))
    below = place.floor()
    base, i = number.long() * NUM_ANGLES, below.long()
    return torch.lerp(contours[base + (i & (NUM_ANGLES - 1))], contours[base + ((i + 1) & (NUM_ANGLES - 1))], place - below)


@functools.cache
def _material(device: torch.device) -> Material:
    level = torch.from_numpy(fields_MSS())[:, None]
    parts, starts, at = [], [], 0
    for _ in range(_LEVELS):
        parts.append(level.flatten())
        starts.append(at)
        at += level.numel()
        level = torch.nn.functional.avg_pool2d(level, 2)
    return torch.cat(parts).to(device), torch.tensor(starts, device=device), torch.from_numpy(contours_QA()).flatten().to(device)
