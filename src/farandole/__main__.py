"""`python -m farandole` is `farandole`."""

from farandole.cli.app import main

main()
