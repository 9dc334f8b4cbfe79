"""Unusual models and losses, as data: each must train as a plain loop trains it, or be refused with a line of its code.

python -m tests.odd_models.run [--only NAME,…] [--chapter NAME] [--slice k/n] [--ways layer2,…] [--json FILE]
"""
