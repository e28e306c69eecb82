"""Progress, metrics, sample dumps and reports of a run. No file here imports torch.

observer        what the driver reports, passed on to display, metrics, samples, trace and hooks; incidents of the run
terminal        what a terminal may show of text of models and data
progress        the progress display: its state, the live panel, the lines of text
metrics         metrics.jsonl, and the hub of metric loggers
tensorboard     the logger of that name
run_folder      JSONL files that a resumed run continues; samples.jsonl and run.json
timeline        spans of work of all roles, their clocks, and trace.json
timeline_stats  idle shares, waits, overlap and lower bound of a step, from its spans
timeline_picture  the spans of a step as SVG
curve           the learning curve, as a picture and as a line of text
svg_chart       line charts and stacked bars as SVG
startup         when each part of a run was ready
summary         what a run learned, and where its files are
report          the HTML report, whose page is in templates/; the report on the terminal at the end of a run
options         the options of this package
"""
