"""Rewards of a judge: a model behind an OpenAI address that scores, checks a rubric, or compares responses."""
