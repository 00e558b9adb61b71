"""Random models and training loops from a seed, run plainly and run fitted, then compared; see `oracle.py`."""
