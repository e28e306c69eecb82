"""Progress, metrics, sample dumps and reports of a run. No file here imports torch.

observer        what the driver reports, passed on to display, metrics, samples, trace and hooks; incidents of the run
terminal        what a terminal may show of text of models and data
progress        the progress display: its state, the live panel, the lines of text
memory          the peak memory of a process, as metrics of a step
metrics         metrics.jsonl, and the hub of metric loggers, of which one is TensorBoard's
run_folder      JSONL files that a resumed run continues; samples.jsonl and run.json
timeline        spans of work of all roles, their clocks, and trace.json
timeline_stats  idle shares, waits, overlap and lower bound of a step, from its spans
costs           seconds of engines, rewards and trainer, fitted from a run's timeline and metrics
curve           the learning curve, as a picture and as a line of text
gains           first against last evaluation, as a table of the terminal
svg_chart       line charts, stacked bars and the spans of a step as SVG
figures         the pictures of a report: curves, times of phases, timelines, dropped groups
sample_groups   the samples of a report, by prompt, and evaluation prompts over the steps
checks          the five lines at the top of a report: prompts, tokens, weights, rewards, scale
pulse           the pulse of a process: its calls and their progress; which members of a role hang
startup         when each part of a run was ready
page            a self-contained page from a template in templates/
report          the HTML report of a run; what a run learned, for the terminal at its end
comparison      several runs on one page
"""
