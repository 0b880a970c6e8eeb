"""Runs the demonstration of one server: stock, cold and warm requests."""

import sys

from .single import main

if __name__ == "__main__":
    sys.exit(main())
