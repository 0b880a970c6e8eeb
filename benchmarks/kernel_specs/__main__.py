"""``python -m benchmarks.kernel_specs``: see :mod:`.compiled`."""

import sys

from .compiled import main

sys.exit(main())
