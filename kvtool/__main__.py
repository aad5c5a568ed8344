"""`python -m kvtool` is `kvtool`."""

from kvtool.cli.main import main

main()
