"""`python -m farandole` is `farandole`."""

from farandole.cli import main

main()
