"""Audits of the mechanism that runs, on canaries (docs/audits.md).

result = white_box(get_recipe("vip.micro"), lambda what, done, total: None)
result = black_box(get_recipe("transfer.one_step"), None, 500)
"""

from dpvision.audit.black_box import black_box
from dpvision.audit.parts import Parts
from dpvision.audit.white_box import finished_run, white_box

__all__ = ["Parts", "black_box", "finished_run", "white_box"]
