"""Audits of the mechanism that runs, on canaries (docs/audits.md).

result = white_box(get_recipe("vip.micro"), lambda what, done, total: None)
"""

from dpvision.audit.white_box import finished_run, white_box

__all__ = ["finished_run", "white_box"]
