"""Pictures of runs: one small data model, drawn as SVG, as an HTML page and as a Perfetto trace."""
