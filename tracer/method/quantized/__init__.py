"""Products of few rows with quantized weights."""
