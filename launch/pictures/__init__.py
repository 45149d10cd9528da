"""Draw runs: one small data model, drawn as SVG, as an HTML page and as a Perfetto trace.

In: a scheduled module, and times that were simulated or recorded. Out: a file.
"""
