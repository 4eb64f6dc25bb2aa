"""`python -m moesim`, which is `moesim`."""

from moesim.start import main

main()
