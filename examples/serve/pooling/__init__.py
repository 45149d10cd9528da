"""Models that pool: a vector, or a score, for each text. The engine's end; no tokens are drawn."""
