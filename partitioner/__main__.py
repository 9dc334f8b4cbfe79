"""``python -m partitioner``: what torchrun starts."""

from partitioner.cli import main

main()
