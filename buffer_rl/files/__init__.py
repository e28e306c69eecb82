"""Files that outlive a run, and those it starts from.

checkpoint   checkpoints: whole or absent, on disk and at URLs; which remain, and how they were evaluated
remote       paths that fsspec reaches
hf_config    the configuration of a Hugging Face model folder
model_folder  whether a model folder has whole weights and a tokenizer
row_file     the training rows of a rollout, as a file
"""
