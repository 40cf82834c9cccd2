"""What a few minutes of a CUDA device can tell: `python -m tests.gpu --minutes 8 --out FOLDER`.

Each part is a process of its own with a time-out, and each of its results is written at once. `table.py` lists them.
"""
