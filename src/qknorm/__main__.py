"""`python -m qknorm`, the same as `qknorm`."""

from qknorm.cli import main

main()
