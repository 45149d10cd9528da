"""What `docs/generate.py` is made of."""
