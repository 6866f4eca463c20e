"""``python -m dpvision``, for torchrun: ``torchrun --nproc-per-node 8 -m dpvision train ...``."""

import sys

from dpvision.cli import main

if __name__ == "__main__":
    sys.exit(main())
