"""``python -m packprop``: the command ``packprop``."""

import sys

from packprop.applications.reports.cli import main

if __name__ == "__main__":
    sys.exit(main())
