"""``python -m benchmarks.kernel_specs``: see :mod:`.compiled`."""

import sys

from .compiled import main

if __name__ == "__main__":
    sys.exit(main())
