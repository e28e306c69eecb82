"""Rollouts: generation, scoring, filtering, evaluation; where user code runs."""
