"""`python -m ridgeline`: the same as the `ridgeline` command."""
from __future__ import annotations

import sys

from ridgeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
