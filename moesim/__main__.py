"""`python -m moesim`, which is `moesim`."""

from moesim.cli import main

main()
