"""Define the names of the files that a run writes to its folder, except for checkpoints and
run.json.

A run can be resumed without these files.
"""

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"
EVENTS_NAME = "events.jsonl"
STARTS_NAME = "starts.jsonl"
RECIPE_NAME = "recipe.yaml"
LENGTH_NAME = "length.json"
FORECAST_NAME = "forecast.json"
REPORT_NAME = "report.png"
HTML_NAME = "report.html"
