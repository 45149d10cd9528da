"""The front: requests of clients over HTTP in, requests to rank 0 out, and tokens back as text."""
