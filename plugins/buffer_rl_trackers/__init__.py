"""Loggers of experiment trackers: Weights & Biases, Trackio and MLflow.

options     the options of all three, and the check that the packages are installed
logger      ``TrackerLogger``: starts a process for the tracker, sends it metrics, drops it if it fails
__main__    that process: one tracker, from its start to its end
trackers    Weights & Biases, Trackio and MLflow

``plugins/buffer_rl_trackers/README.md`` has the commands.
"""
