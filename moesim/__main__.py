"""`python -m moesim` is `moesim`."""

from moesim.cli import main

main()
