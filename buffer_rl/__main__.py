"""``python -m buffer_rl`` is ``buffer-rl``."""

import sys

from buffer_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
