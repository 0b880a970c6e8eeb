"""Runs the demonstration of a single server with stock, cold and warm requests."""

import sys

from .single import main

if __name__ == "__main__":
    sys.exit(main())
