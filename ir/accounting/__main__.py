"""Write the support matrix as a page: `python -m stablecast.ir.accounting docs/ops.md`."""

import sys
from pathlib import Path

from stablecast.ir.accounting.matrix import markdown

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
