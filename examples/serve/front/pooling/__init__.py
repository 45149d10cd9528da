"""Endpoints of models that pool: vectors, scores and orders of texts."""
