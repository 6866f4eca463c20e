"""Recipes: functions that return a RunConfig, by name. A recipe is a document: paper, numbers, expected result."""

from collections.abc import Callable

from dpvision.config import RunConfig
from dpvision.recipes import demo, vip

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "vip.nano": vip.nano,
    "vip.tiny": vip.tiny,
    "vip.small": vip.small,
    "vip.base": vip.base,
    "vip.large": vip.large,
    "vip.base_eps4": vip.base_eps4,
    "vip.base_eps2": vip.base_eps2,
    "vip.base_non_private": vip.base_non_private,
    "vip.micro": vip.micro,
    "vip.micro_non_private": vip.micro_non_private,
    "demo": demo.demo,
}
