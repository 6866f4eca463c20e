"""Procedural textures: images of shaded objects that occlude each other.

Each is a pure function of two integers.

    >>> textures(torch.arange(2), 32).shape
    torch.Size([2, 3, 32, 32])

A *program* (an integer) determines a world: eight to twenty-four objects, back to front, each with
an outline (a closed contour roughened by a field, or a half-plane), a surface (a field of the bank,
rotated, stretched, tilted in perspective and warped), colours from the world's palette that vary in
waves over the surface, light, and a shadow on the objects behind; and the sharpness of the lens. An
*instance* (another integer) determines the view: position, zoom, rotation, mirroring, exposure.
Object sizes follow a power law and fields have decaying spectra, as in photographs
(docs/textures.md).

Everything is one sequence of tensor operations without branches, so that it compiles to fused
kernels on a GPU, and an image's pixels do not depend on the rest of its batch. No third-party
programs, images or weights are used.

Legend: N images, K objects, P parameters, H height, W width, C channels.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.errors import ConfigError
from dpvision.mixing import GOLDEN, mix_torch, signed, uniform_torch
from dpvision.synthetic.texture_bank import (
    FIELD_SIDE,
    NUM_ANGLES,
    NUM_CONTOURS,
    NUM_FIELDS,
    contours_QA,
    fields_MSS,
)

VERSION = 2
"""Changes whenever a program's pixels do."""
NUM_THINGS = 24
_LEAST_THINGS = 8
_LEVELS = 5
_CPU_PIXELS = (
    1 << 16
)  # pixels per part: small enough for the cache, large enough to amortise a call's overhead
_GPU_PIXELS = 1 << 22
Material = tuple[Tensor, Tensor, Tensor]
"""All fields of the bank at all levels in one vector (each level has half the previous side), the
levels' offsets, all contours.
"""
Canvas = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Planes (N, H, W): displacement fields (x, y), world coordinates of the pixels (x, y), and the
image so far (red, green, blue).
"""
_BLUE_YELLOW, _RED_GREEN = (0.41, 0.41, -0.82), (0.71, -0.71, 0.0)


def textures(
    program_N: Tensor,
    size_px: int,
    *,
    instance_N: Tensor | None = None,
    device: str | torch.device = "cpu",
    compiled: bool | None = None,
) -> Tensor:
    """Render the given programs, uint8 (N, 3, size_px, size_px) on ``device``.

    Args:
        program_N: int64, any values; each gives another world.
        size_px: side in pixels, 8 to 1024. A program shows the same world at every size.
        instance_N: int64, the views; if None, the canonical view for all.
        compiled: whether to fuse kernels with torch.compile: up to a minute at the first call of a
            size, then several times as fast. If None, only on a GPU. Rarely, a pixel then differs
            by one level (of 255).

    Raises:
        ConfigError: ``size_px`` is out of range, or the integers are not int64 of one shape.
    """
    if not 8 <= size_px <= 1024:
        raise ConfigError(
            f"textures: size_px={size_px!r}; expected 8 to 1024 pixels. Use the image size of "
            "the model."
        )
    instance = torch.zeros_like(program_N) if instance_N is None else instance_N
    for name, value in (("program_N", program_N), ("instance_N", instance)):
        if value.dtype != torch.int64 or value.ndim != 1 or value.shape != program_N.shape:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ConfigError(
                f"textures: {name}={got}; expected int64 of shape (N,), the same for both. "
                "Number the images from 0."
            )
    device = torch.device(device)
    fused = device.type != "cpu" if compiled is None else compiled
    program_N, instance = program_N.to(device), instance.to(device)
    out = torch.empty(len(program_N), 3, size_px, size_px, dtype=torch.uint8, device=device)
    # Worlds with few objects first, so that a part skips objects that none of its worlds has: this
    # saves a third of the time.
    things_N = _count_things(program_N)
    pixels = _CPU_PIXELS if device.type == "cpu" else _GPU_PIXELS
    for here in things_N.argsort().split(max(1, pixels // size_px**2)):
        world, look = (
            _draw_world(program_N[here]),
            _draw_look(program_N[here], instance[here], instance_N is None),
        )
        most_things = int(things_N[here].max())
        if fused:
            out[here] = _fused_image(world, look, size_px, most_things)
        else:
            out[here] = _image(
                world, look, _material(device), size_px, most_things, (_begin, _paint, _develop)
            )
    return out


def _image(
    world: dict[str, Tensor],
    look: dict[str, Tensor],
    material: Material,
    size_px: int,
    most_things: int,
    steps: tuple[Callable[..., Canvas], Callable[..., Canvas], Callable[..., Tensor]],
) -> Tensor:
    """Render images from drawn parameters: all per-pixel work.

    An object that a world does not have changes no bit.
    """
    begin, paint, develop = steps
    canvas = begin(look, material, size_px)
    for k in range(most_things):
        canvas = paint(
            canvas,
            {name: value[:, k].contiguous() for name, value in world.items()},
            look,
            material,
            size_px,
        )
    return develop(canvas, look, size_px)


def _fused_image(
    world: dict[str, Tensor], look: dict[str, Tensor], size_px: int, most_things: int
) -> Tensor:
    """Run ``_picture`` with three compiled programs per size; parts are padded to full size, so
    that each is compiled once.
    """
    device = look["cos"].device
    num, full = (
        len(look["cos"]),
        max(1, (_CPU_PIXELS if device.type == "cpu" else _GPU_PIXELS) // size_px**2),
    )
    if num < full:
        fill = torch.arange(full, device=device).clamp(max=num - 1)
        world, look = (
            {name: value[fill] for name, value in values.items()} for values in (world, look)
        )
    return _image(world, look, _material(device), size_px, most_things, _compiled_steps())[:num]


@functools.cache
def _compiled_steps() -> tuple[Callable[..., Canvas], Callable[..., Canvas], Callable[..., Tensor]]:
    """Return the steps of ``_picture`` as fused kernels: eagerly, the memory traffic of some
    hundred passes over the image dominates.

    One object is compiled, not the whole sequence, which would take the compiler many times as
    long.
    """
    return (
        torch.compile(_begin, dynamic=False),
        torch.compile(_paint, dynamic=False),
        torch.compile(_develop, dynamic=False),
    )


def _start(program_N: Tensor) -> Tensor:
    return mix_torch(program_N ^ signed(0xD9B1_5109_7E37_6FFF + VERSION))


def _count_things(program_N: Tensor) -> Tensor:
    """Return the number of objects of each world, _LEAST_THINGS to NUM_THINGS."""
    return (
        _LEAST_THINGS + (NUM_THINGS + 1 - _LEAST_THINGS) * uniform_torch(_start(program_N), 1)[:, 0]
    ).long()


def _draw_world(program_N: Tensor) -> dict[str, Tensor]:
    """Draw the parameters, (N, K, 1, 1), of the objects of each world."""
    start_N = _start(program_N)
    own_N = uniform_torch(start_N, 32)
    thing_NK = mix_torch(
        start_N[:, None]
        + torch.arange(101, 101 + NUM_THINGS, device=program_N.device) * signed(GOLDEN)
    )
    u = uniform_torch(thing_NK, 44).unbind(-1)

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
    # Sizes follow a power law (dead leaves). In some worlds objects cluster around one point, like
    # the parts of an object.
    power = between(of_world(1), 0.3, 0.8)
    radius = (0.16 * (1 - 0.98 * u[0]) ** -power).clamp(max=1.4) * log_between(
        of_world(2), 0.8, 1.8
    )
    gathered = u[38] < 0.5 * of_world(19)
    plane = (u[1] < 0.15) & ~back
    # Palette: four colours of the world, grey in most worlds and bright in a few; an object mixes
    # two of them.
    saturation = 0.035 + 0.35 * of_world(3) ** 2
    pick, other, share = (4 * u[2]).floor().long(), (4 * u[3]).floor().long(), 0.35 * u[4]
    light_4, yellow_4, red_4 = own_N[:, 4:8], own_N[:, 8:12], own_N[:, 12:16]

    def mixed(values_N4: Tensor) -> Tensor:
        return values_N4.gather(1, pick) * (1 - share) + values_N4.gather(1, other) * share

    lightness = between((0.75 * mixed(light_4) + 0.25 * u[5]).clamp(0, 1), 0.05, 0.95)
    yellow = (mixed(yellow_4) - 0.5 + 0.3 * (u[6] - 0.5)) * 5 * saturation
    red = (mixed(red_4) - 0.5 + 0.3 * (u[7] - 0.5)) * 3 * saturation
    circle = 2 * math.pi
    angle, surface_turn, light_turn = (
        circle * u[8],
        circle * u[9],
        circle * of_world(16).expand_as(u[0]),
    )
    stretch = log_between(u[10], 0.45, 1.0)
    scale = log_between(u[11], 0.2, 1.2)
    surface_stretch = log_between(u[12], 0.6, 1.7)
    # Patterns are strong, or absent (a tenth of the surfaces): with targets normalised per patch,
    # faint noise counts as much as edges.
    patterned = (u[37] >= 0.1).float()
    contrast, colourful = (
        patterned * log_between(u[13], 0.08, 0.35),
        patterned * 0.6 * saturation * u[43],
    )
    world = {
        "x": torch.where(
            gathered, of_world(17) - 0.5 + 0.9 * (u[14] - 0.5), between(u[14], -1.15, 1.15)
        ),
        "y": torch.where(
            gathered, of_world(18) - 0.5 + 0.9 * (u[15] - 0.5), between(u[15], -1.15, 1.15)
        ),
        "radius": radius,
        "present": present.float(),
        "back": back.float().expand_as(radius),
        "plane": plane.float(),
        "contour": (NUM_CONTOURS * u[16]).floor(),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "stretch": stretch,
        "softness": 0.004 + 0.1 * u[17] ** 5,
        "rugged": 0.14 * u[18] ** 3,
        "field": (NUM_FIELDS * u[19]).floor(),
        "field_cos": surface_turn.cos() * scale * surface_stretch,
        "field_sin": surface_turn.sin() * scale * surface_stretch,
        "field_across": 1 / surface_stretch**2,
        "field_x": u[20],
        "field_y": u[21],
        "scale": scale,
        "tilt_x": 0.35 * (u[22] - 0.5),
        "tilt_y": 0.35 * (u[23] - 0.5) + torch.where(plane, 0.3, 0.0),
        "warp": 0.25 * u[25] ** 2,
        "gain": log_between(u[28], 0.6, 3),
        # Colour is a wave over the field: a gentle one shades, a steep one gives every cell or
        # pebble of the field a different colour.
        "contrast": contrast,
        "wave_yellow": 1.5 * circle * u[39] ** 2,
        "phase_yellow": circle * u[40],
        "contrast_yellow": 4 * colourful * normal(u[29], u[30]),
        "wave_red": 1.5 * circle * u[41] ** 2,
        "phase_red": circle * u[42],
        "contrast_red": 3 * colourful * normal(u[31], u[32]),
        "lightness": lightness,
        "yellow": yellow,
        "red": red,
        "light_x": light_turn.cos(),
        "light_y": light_turn.sin(),
        "shade": 0.35 * u[33],
        "round": (u[34] * 1.6 - 0.5).clamp(0, 1),
        "shadow": torch.where(present & ~back, 0.5 * u[35] ** 2, 0.0),
        "shadow_reach": log_between(u[36], 4, 25),
    }
    return {name: value[..., None, None] for name, value in world.items()}


def _draw_look(program_N: Tensor, instance_N: Tensor, straight: bool) -> dict[str, Tensor]:
    """Draw the parameters, (N, 1, 1), of the view of each world."""
    both_N = mix_torch(
        mix_torch(program_N ^ signed(0xA54F_F53A_5F1D_36F1)) + instance_N * signed(GOLDEN)
    )
    u = uniform_torch(both_N, 12)[..., None, None].unbind(1)
    own = uniform_torch(mix_torch(program_N ^ signed(0x510E_527F_ADE6_82D1)), 10)[
        ..., None, None
    ].unbind(1)
    free = 0.0 if straight else 1.0
    turn = free * 0.5 * (u[0] - 0.5)
    zoom = (free * (-0.6 * u[1])).exp()
    mirror = 1 - 2 * free * (u[2] < 0.5).float()
    return {
        "cos": turn.cos() * zoom,
        "sin": turn.sin() * zoom,
        "mirror": mirror,
        "x": free * 0.6 * (u[3] - 0.5) * (2 - zoom),
        "y": free * 0.6 * (u[4] - 0.5) * (2 - zoom),
        "spread": 0.14 + 0.16 * own[0] * (1 + free * 0.3 * (u[5] - 0.5)),
        "middle": 0.32 + 0.32 * own[1] + free * 0.1 * (u[6] - 0.5),
        "fall_x": 0.3 * (own[2] - 0.5),
        "fall_y": 0.3 * (own[3] - 0.5),
        "zoom": zoom,
        "bend_field": (NUM_FIELDS / 24 * own[7]).floor() * 24,
        "bend_x": own[8],
        "bend_y": own[9],
        "blur": 0.3 * own[6] ** 2,
        "tint_yellow": 0.05 * (own[4] - 0.5),
        "tint_red": 0.03 * (own[5] - 0.5),
    }


def _places(look: dict[str, Tensor], size_px: int) -> tuple[Tensor, Tensor]:
    """Return world coordinates (N, H, W) of the pixels; the canonical view covers the square from
    -1 to 1.
    """
    device = look["cos"].device
    line = (torch.arange(size_px, device=device, dtype=torch.float32) + 0.5) * (2 / size_px) - 1
    px, py = line[None, None, :] * look["mirror"], line[None, :, None]
    return look["cos"] * px - look["sin"] * py + look["x"], look["sin"] * px + look[
        "cos"
    ] * py + look["y"]


def _begin(look: dict[str, Tensor], material: Material, size_px: int) -> Canvas:
    """Return the initial canvas: displacements, pixel coordinates, and black."""
    x, y = _places(look, size_px)
    black = torch.zeros_like(x)
    return (*_wander(material, look, x, y, size_px), x, y, black, black, black)


def _paint(
    canvas: Canvas, t: dict[str, Tensor], look: dict[str, Tensor], material: Material, size_px: int
) -> Canvas:
    """Return the canvas with one more object ``t`` in front."""
    bend_x, bend_y, x, y, red, green, blue = canvas
    # Coordinates of the object and of its surface.
    dx, dy = x - t["x"], y - t["y"]
    along, across = t["cos"] * dx + t["sin"] * dy, t["cos"] * dy - t["sin"] * dx
    pixel = 2 / size_px * look["zoom"]  # side of a pixel in the world
    depth = 1 / (1 + t["tilt_x"] * x + t["tilt_y"] * y).clamp(min=0.25)
    sx, sy = x * depth + t["warp"] * bend_x, y * depth + t["warp"] * bend_y
    u = t["field_cos"] * sx - t["field_sin"] * sy + t["field_x"]
    v = (t["field_sin"] * sx + t["field_cos"] * sy) * t["field_across"] + t["field_y"]
    field = _read_field(material, t["field"], u, v, t["scale"] * pixel)
    field = (t["gain"] * field).tanh()
    # Outline: distance beyond the edge over the radius, negative inside.
    reach = _read_contour(material, t["contour"], torch.atan2(across / t["stretch"], along))
    from_centre = (along * along + (across / t["stretch"]).square() + 1e-12).sqrt()
    rho = from_centre / (t["radius"] * reach)
    beyond = torch.where(t["plane"] > 0, across / t["radius"], rho - 1) + t["rugged"] * (
        bend_x + bend_y
    )
    distance = beyond * t["radius"]
    edge = t["softness"] + 0.5 * pixel
    cover = torch.maximum((0.5 - distance / (2 * edge)).clamp(0, 1) * t["present"], t["back"])
    # Light: a slope over the object, and a bulge for round ones.
    qx, qy = (dx / t["radius"]).clamp(-1.5, 1.5), (dy / t["radius"]).clamp(-1.5, 1.5)
    bulge = (1 - (rho * rho).clamp(max=1)).sqrt() - 0.6
    light = 1 + t["shade"] * (t["light_x"] * qx + t["light_y"] * qy + t["round"] * bulge)
    lightness = (t["lightness"] + t["contrast"] * field) * light
    yellow = (
        t["yellow"] + t["contrast_yellow"] * (t["wave_yellow"] * field + t["phase_yellow"]).sin()
    ) * light
    pink = (t["red"] + t["contrast_red"] * (t["wave_red"] * field + t["phase_red"]).sin()) * light
    darker = 1 - t["shadow"] * (-t["shadow_reach"] * distance.clamp(min=0)).exp()

    def over(plane: Tensor, c: int) -> Tensor:
        colour = lightness + _BLUE_YELLOW[c] * yellow + _RED_GREEN[c] * pink
        plane = plane * darker
        return plane + cover * (colour - plane)

    return bend_x, bend_y, x, y, over(red, 0), over(green, 1), over(blue, 2)


def _develop(canvas: Canvas, look: dict[str, Tensor], size_px: int) -> Tensor:
    """Expose the canvas: light fall-off, per-image contrast and mean, lens blur and tint; then
    convert to uint8.
    """
    image_NCHW = torch.stack(canvas[4:], dim=1)
    line = (torch.arange(size_px, device=image_NCHW.device, dtype=torch.float32) + 0.5) * (
        2 / size_px
    ) - 1
    fall = 1 + look["fall_x"] * line[None, None, :] + look["fall_y"] * line[None, :, None]
    image_NCHW = image_NCHW * fall[:, None]
    grey_NHW = image_NCHW.mean(dim=1)
    mean_N = _mean(grey_NHW)[:, None, None]
    std_N = _mean((grey_NHW - mean_N).square()).sqrt()[:, None, None]
    # Raise the contrast of flat worlds, at most fourfold, so that no image is empty.
    gain = (look["spread"] / (std_N + 1e-3)).clamp(0.6, 4)
    image_NCHW = look["middle"][:, None] + gain[:, None] * (image_NCHW - mean_N[:, None])
    # Keep each channel's mean away from the clipping limits, so that bright colours keep their
    # pattern.
    mean_NC11 = _mean(image_NCHW)[..., None, None]
    image_NCHW = image_NCHW + (mean_NC11.clamp(0.15, 0.85) - mean_NC11)
    blur = look["blur"][:, None]
    for axis in (2, 3):
        padded = torch.cat(
            [image_NCHW.narrow(axis, 0, 1), image_NCHW, image_NCHW.narrow(axis, size_px - 1, 1)],
            dim=axis,
        )
        beside = padded.narrow(axis, 0, size_px) + padded.narrow(axis, 2, size_px)
        image_NCHW = (1 - 2 * blur) * image_NCHW + blur * beside
    tint = [
        _BLUE_YELLOW[c] * look["tint_yellow"] + _RED_GREEN[c] * look["tint_red"] for c in range(3)
    ]
    return ((image_NCHW + torch.stack(tint, dim=1)).clamp(0, 1) * 255).round().to(torch.uint8)


def _mean(x_NHW: Tensor) -> Tensor:
    """Return the mean over the last two axes, row by row: threads would split one sum over a large
    image and change its last bit.
    """
    return x_NHW.mean(dim=-1).mean(dim=-1)


def _wander(
    material: Material, look: dict[str, Tensor], x: Tensor, y: Tensor, size_px: int
) -> tuple[Tensor, Tensor]:
    """Return two fields (N, H, W) that displace a world's outlines and surfaces, from one of eight
    fields of the bank.
    """
    u, v, texels = (
        0.35 * x + look["bend_x"],
        0.35 * y + look["bend_y"],
        0.7 / size_px * look["zoom"],
    )
    bend_x = _read_field(material, look["bend_field"], u, v, texels)
    return bend_x, _read_field(material, look["bend_field"], v + 0.37, u + 0.71, texels)


def _read_field(material: Material, number: Tensor, u: Tensor, v: Tensor, texels: Tensor) -> Tensor:
    """Sample a field of the bank bilinearly at (u, v), in periods, from the level whose texels are
    one to two pixels large.

    Args:
        number: (N, 1, 1), index of the field.
        texels: periods per pixel, (N, 1, 1).
    """
    bank, starts, _ = material
    level = ((texels * FIELD_SIDE).log2() + 0.7).round().clamp(min=0, max=_LEVELS - 1).long()
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
    """Return the radius of a contour of the bank at an angle in [-pi, pi], linearly
    interpolated.
    """
    contours = material[2]
    place = (angle + math.pi) * (NUM_ANGLES / (2 * math.pi))
    below = place.floor()
    base, i = number.long() * NUM_ANGLES, below.long()
    return torch.lerp(
        contours[base + (i & (NUM_ANGLES - 1))],
        contours[base + ((i + 1) & (NUM_ANGLES - 1))],
        place - below,
    )


@functools.cache
def _material(device: torch.device) -> Material:
    level = torch.from_numpy(fields_MSS())[:, None]
    parts, starts, at = [], [], 0
    for _ in range(_LEVELS):
        parts.append(level.flatten())
        starts.append(at)
        at += level.numel()
        level = torch.nn.functional.avg_pool2d(level, 2)
    return (
        torch.cat(parts).to(device),
        torch.tensor(starts, device=device),
        torch.from_numpy(contours_QA()).flatten().to(device),
    )
