"""`python -m stablecast`."""

from stablecast.cli import main

main()
